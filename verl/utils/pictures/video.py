"""A video as it passes between processes: the path of its file, or its frames as pictures. Never its pixels.

PyAV reads files. It gets their bytes alone, and may open no other file and no address that they name.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.utils.config import ConfigError
from verl.utils.pictures.picture import MOST_PIXELS, Picture, PictureError, keep, pixel_limits

if TYPE_CHECKING:
    import av
    import numpy as np

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
"""FFmpeg's names of the formats that are read. Playlists are none of them: they name other files."""
MOST_FRAMES = 2**17
"""Of a file: 36 minutes with 60 in a second."""
MOST_SAMPLED_PIXELS = 2**29
"""Of all frames that a model gets, before they are scaled: 1.5 GiB."""
RATE = 2.0
"""Frames in a second: of those that are given one by one, and to which files are sampled. As in qwen-vl-utils."""
PARTS = ("video", "bytes", "path", "video_url")
"""Fields of a dict with a video; the first one that is not null counts."""
OF_SAMPLING = {"fps": "fps", "nframes": "num_frames", "num_frames": "num_frames"}
PACKAGE = "PyAV reads video files: pip install 'verl-sync[video]'"


class FrameLimits(NamedTuple):
    """How many frames of a file a model gets, and to how many pixels they are scaled, as its processor counts them.
    None: as the processor says."""

    fps: float | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


EVERY = FrameLimits()


class Frames(NamedTuple):
    """Those of a video that a model gets."""

    pixels: np.ndarray
    """uint8 [frames, height, width, 3]."""
    indices: list[int]
    """Which frames of the video they are."""
    total: int
    """All of the video."""
    rate: float
    """Frames of the video in a second."""


Choose = Callable[[int, float, FrameLimits], Sequence[int]]
"""Which frames of a file are taken: called with their number, their rate, and the limits of the video."""


def frame_limits(given: Mapping[str, Any]) -> FrameLimits:
    """Those of `data.mm_processor_kwargs`: flat, as for pictures, or within `videos_kwargs`. Raises ConfigError for a
    wrong value."""
    key, own = "data.mm_processor_kwargs", dict(given.get("videos_kwargs") or {})
    of_pixels = {name: value for name, value in given.items() if name in ("min_pixels", "max_pixels", "size")}
    sampling = {name: own.pop(name, given.get(name)) for name in ("fps", "num_frames")}
    return FrameLimits(**_sampling(sampling, key), **pixel_limits(of_pixels | own)._asdict())


def _sampling(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        kinds = (int, float) if name == "fps" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < MOST_FRAMES:
            raise ConfigError(f"{key}.{name}={value}: give a number above 0")
    if len(found) > 1:
        raise ConfigError(f"{key}: give fps, or num_frames, and not both")
    return found


@dataclass(frozen=True, slots=True)
class Video:
    """A video in local files, which must be visible to every process that opens it."""

    files: tuple[Picture, ...]
    """The file, or those of its frames."""
    in_frames: bool
    rate: float = RATE
    """Of frames, in a second; files say their own."""
    limits: FrameLimits = EVERY
    """The run's, and the video's own, which travel with it."""

    @property
    def path(self) -> str:
        """Of the first file, to name it by."""
        return self.files[0].path

    @property
    def key(self) -> str:
        """The same for videos of which a model's processor makes the same."""
        digests = " ".join(each.digest for each in self.files)
        digest = hashlib.sha256(digests.encode()).hexdigest() if self.in_frames else digests
        return f"{digest} {self.rate if self.in_frames else ''} {self.limits}"

    def limited(self, limits: FrameLimits) -> Video:
        """With `limits` where it has none of its own."""
        own = self.limits._asdict()
        if self.limits.fps is not None or self.limits.num_frames is not None:
            limits = limits._replace(fps=None, num_frames=None)
        filled = {name: value if own[name] is None else own[name] for name, value in limits._asdict().items()}
        return replace(self, limits=FrameLimits(**filled))

    def open(self, choose: Choose) -> Frames:
        """The frames, RGB. Raises PictureError for files that have changed, are damaged or too large, for frames of
        different sizes, for another format, and where PyAV is missing."""
        return self._frames() if self.in_frames else _decoded(self.files[0].read(), choose, self.limits)

    def _frames(self) -> Frames:
        import numpy as np

        images = []
        for number, file in enumerate(self.files):
            try:
                images.append(file.open())
            except PictureError as exc:
                raise PictureError(f"has a frame {number} that {exc}") from exc
            if images[-1].size != images[0].size:
                raise PictureError(f"has frames of {images[0].size} and {images[-1].size} pixels")
            _require_room(images[0].width, images[0].height, len(self.files))
        count = len(images)
        return Frames(np.stack([np.asarray(image) for image in images]), list(range(count)), count, self.rate)


def keep_video(given: Any) -> Video:
    """`given` as data sets have it: a list of frames, each as `keep` takes it; a path, a `file:` or `data:` URL, or
    bytes of a file; or a dict with one of them under one of `PARTS`, with `fps` or `nframes` to sample a file by, or
    `sample_fps` of frames. Raises PictureError for anything else."""
    rate, limits = RATE, EVERY
    if isinstance(given, Video):
        return given
    if isinstance(given, Mapping):
        fields = {name: value for name, value in given.items() if value is not None and name != "type"}
        if asked := sorted(fields.keys() - {*PARTS, *OF_SAMPLING, "sample_fps"}):
            known = ", ".join((*PARTS, *OF_SAMPLING, "sample_fps"))
            raise PictureError(f"has {', '.join(map(str, asked))}, and only {known} are known")
        try:
            asked_for = {OF_SAMPLING[name]: fields[name] for name in OF_SAMPLING if name in fields}
            limits = FrameLimits(**_sampling(asked_for, "it"))
            rate = float(_sampling({"fps": fields.get("sample_fps")}, "it, sample_").get("fps", RATE))
        except ConfigError as exc:
            raise PictureError(f"is asked for wrongly: {exc}") from exc
        given = next((fields[name] for name in PARTS if name in fields), None)
        if isinstance(given, Mapping):  # {"video_url": {"url": ...}}
            given = given.get("url")
    if isinstance(given, (list, tuple)):
        if not given:
            raise PictureError("has no frames")
        return Video(tuple(_frame(number, each) for number, each in enumerate(given)), True, rate, limits)
    if isinstance(given, (bytes, bytearray, memoryview, str, Path)):
        return Video((keep(given),), False, rate, limits)
    raise PictureError(f"is {type(given).__name__}, neither list of frames, path, data URL nor bytes of a file")


def _frame(number: int, given: Any) -> Picture:
    try:
        return keep(given)
    except PictureError as exc:
        raise PictureError(f"has a frame {number} that {exc}") from exc


def _require_room(width: int, height: int, count: int) -> None:
    if width * height > MOST_PIXELS:
        raise PictureError(f"has frames of {width} x {height} pixels, more than {MOST_PIXELS}")
    if width * height * count > MOST_SAMPLED_PIXELS:
        raise PictureError(
            f"has {count} frames of {width} x {height} pixels, together more than {MOST_SAMPLED_PIXELS}: set "
            "data.mm_processor_kwargs.fps or num_frames to a smaller number"
        )


def _decoded(data: bytes, choose: Choose, limits: FrameLimits) -> Frames:
    import numpy as np

    try:
        import av
    except ImportError as exc:
        raise PictureError(f"is a file, and {PACKAGE}") from exc
    try:
        total, rate = _counted(av, data)
        _require_length(total)
        indices = [int(index) for index in choose(total, rate, limits)]
        wanted, found = set(indices), dict[int, "np.ndarray"]()
        for index, frame in enumerate(_each(av, data)):
            if index in wanted:
                _require_room(frame.width, frame.height, len(indices))
                found[index] = frame.to_ndarray(format="rgb24")
            if index >= indices[-1]:
                break
        _require_whole(found, wanted)
    except PictureError:
        raise
    except Exception as exc:  # decoders raise what they like
        raise PictureError(f"is damaged, or none of {CONTAINERS} ({type(exc).__name__})") from exc
    return Frames(np.stack([found[index] for index in indices]), indices, total, rate)


def _require_whole(found: Mapping[int, np.ndarray], wanted: set[int]) -> None:
    sizes = {each.shape for each in found.values()}
    if len(sizes) != 1 or len(found) != len(wanted):
        raise PictureError(f"is damaged: {len(found)} of {len(wanted)} frames are there, of {len(sizes)} sizes")


def _require_length(total: int) -> None:
    if not 0 < total <= MOST_FRAMES:
        raise PictureError(f"has {total} frames, not 1 to {MOST_FRAMES}")


def _counted(library: Any, data: bytes) -> tuple[int, float]:
    """The frames that can be decoded, and how many there are in a second. Raises PictureError if some cannot."""
    with _opened(library, data) as container:
        stream = container.streams.video[0]
        rate, said = stream.average_rate or stream.base_rate, stream.frames
        alone = len(container.streams) == 1 and container.duration
        seconds = float(stream.duration * stream.time_base if stream.duration else (alone or 0) / library.time_base)
        _require_length(max(said, 1))
    total, last = 0, 0.0
    for frame in _each(library, data):
        total, last = total + 1, max(last, frame.time or 0.0)
    if said > total:
        raise PictureError(f"is damaged: it says that it has {said} frames, and {total} can be decoded")
    if last + 1.0 < 0.9 * seconds:
        raise PictureError(f"is damaged: it says that it has {seconds:.1f} s, and {last:.1f} s can be decoded")
    if not rate:
        raise PictureError("does not say how many frames it has in a second: give its frames one by one")
    return total, float(rate)


def _each(library: Any, data: bytes) -> Iterator[av.VideoFrame]:
    with _opened(library, data) as container:
        container.streams.video[0].thread_type = "AUTO"
        for number, frame in enumerate(container.decode(video=0)):
            _require_length(number + 1)
            yield frame


def _opened(library: Any, data: bytes) -> Any:
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
    container = library.open(io.BytesIO(data), options=options, metadata_errors="ignore")
    if not container.streams.video:
        container.close()
        raise PictureError("has no moving pictures")
    return container
