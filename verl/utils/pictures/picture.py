"""A picture as it passes between processes: the path of its file, never its pixels.

Pictures are untrusted: only local files of a known raster format and bounded size are opened; nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from verl import envs
from verl.utils.config import ConfigError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
MOST_PIXELS = 2**26
"""8,192 x 8,192; below what PIL itself warns of."""
MOST_NBYTES = 2**28
"""The most bytes of a file."""
DIGEST = re.compile(r"[0-9a-f]{64}")
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""PIL's modes of wider values than processors read."""
CUT_OFF = "of which the model's processor would see white: convert it to 8 bits"
OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")
"""PIL's modes that a PNG keeps."""
LIMITS = ("min_pixels", "max_pixels")
OF_SIZE = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
OF_VIDEOS = ("fps", "num_frames", "videos_kwargs")
"""What `frame_limits` reads."""
ORIENTATION = 0x0112
"""The tag of EXIF."""
WORDS = ("bytes", "path", "image", "image_url")
"""Fields of a dict with the location of a picture; the first one that is not null counts."""


class PictureError(ValueError):
    """An unusable picture; the message has the reason. The caller adds file, row and number."""


class PixelLimits(NamedTuple):
    """The fewest and the most pixels that a picture is scaled to; None: those of the model's processor."""

    min_pixels: int | None = None
    max_pixels: int | None = None


NO_LIMITS = PixelLimits()


def pixel_limits(given: Mapping[str, Any]) -> PixelLimits:
    """Those of `data.mm_processor_kwargs`, also as `size` or within `images_kwargs`, as transformers takes them.

    Raises ConfigError for anything else that a processor would be told.
    """
    key, found = "data.mm_processor_kwargs", {}
    options = dict(given)
    for name, value in dict(options.pop("images_kwargs", None) or {}).items():
        options.setdefault(name, value)
    for name, value in dict(options.pop("size", None) or {}).items():
        options.setdefault(OF_SIZE.get(name, f"size.{name}"), value)
    for name, value in options.items():
        if value is None:
            continue
        if name in OF_VIDEOS:
            continue
        if name not in LIMITS:
            known = (*LIMITS, *OF_VIDEOS)
            raise ConfigError(f"{key}.{name}={value}: only {', '.join(known[:-1])} and {known[-1]} are known")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key}.{name}={value}: give a number of pixels, at least 1")
        found[name] = value
    limits = PixelLimits(**found)
    if None not in limits and limits.min_pixels > limits.max_pixels:  # type: ignore[operator]
        raise ConfigError(f"{key}: min_pixels={limits.min_pixels} are more than max_pixels={limits.max_pixels}")
    return limits


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a local file, which must be visible to every process that opens it."""

    path: str
    digest: str
    """SHA-256 of the file, in hexadecimal digits."""
    limits: PixelLimits = NO_LIMITS
    """The run's, which travel with the picture: whoever computes its patches keeps to them."""

    @property
    def key(self) -> str:
        """The same for pictures of which a model's processor makes the same."""
        return self.digest if self.limits == NO_LIMITS else f"{self.digest} {self.limits}"

    def open(self) -> Image.Image:
        """The pixels, RGB. Raises PictureError for a file that has changed, is damaged, too large or of another
        format."""
        return _decoded(self.read())

    def read(self) -> bytes:
        """Of the file. Raises PictureError if it has changed."""
        data = _bytes_of(Path(self.path))
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise PictureError(f"{self.path} is no longer what it was when the data were read")
        return data


def keep(given: Any) -> Picture:
    """`given` as data sets have it: encoded bytes, a PIL image, a path, a `file:` or `data:` URL, or a dict with one of
    them under one of `WORDS`. Bytes without a file are written to one in `verl.envs.cache_dir()`, under their digest.

    Does not decode the pixels. Raises PictureError for anything else, including URLs of other machines.
    """
    if isinstance(given, Picture):
        return given
    if isinstance(given, Mapping):
        if asked := sorted(key for key, value in given.items() if value is not None and key not in (*WORDS, "type")):
            raise PictureError(f"has {', '.join(map(str, asked))}, and only {', '.join(WORDS)} are known")
        given = next((given[word] for word in WORDS if given.get(word) is not None), None)
        if isinstance(given, Mapping):  # {"image_url": {"url": ...}}
            given = given.get("url")
    if isinstance(given, (bytes, bytearray, memoryview)):
        return _stored(bytes(given))
    if isinstance(given, (str, Path)) and str(given):
        return _named(str(given))
    if hasattr(given, "save") and hasattr(given, "getbands"):
        return _stored(_as_png(given))
    raise PictureError(f"is {type(given).__name__}, neither bytes, path, data URL nor PIL image")


def restored(path: str, digest: str, *limits: int | None) -> Picture:
    """The picture that another process had there, in a checkpoint for instance: at its path, or in the present
    `verl.envs.cache_dir()`. Raises PictureError where neither has it, or for what is no path and digest."""
    if not (isinstance(path, str) and isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise PictureError(f"is {path!r} with the digest {digest!r}")
    places = (Path(path), _kept_at(digest))
    for place in places:
        if place.is_file():
            return Picture(str(place), digest, PixelLimits(*limits))
    raise PictureError(f"is neither at {' nor at '.join(map(str, places))}")


def _as_png(image: Any) -> bytes:
    written = io.BytesIO()
    if image.mode in DEEP:
        raise PictureError(f"has values of more than 8 bits (mode {image.mode}), {CUT_OFF}")
    try:
        kept = image if image.mode in OF_PNG else image.convert("RGB")
        kept.save(written, format="PNG")
    except Exception as exc:  # encoders raise what they like
        raise PictureError(f"cannot be kept as PNG: {type(exc).__name__}: {exc}") from exc
    return written.getvalue()


def _named(name: str) -> Picture:
    scheme = urlsplit(name).scheme.lower() if ":" in name else ""
    if scheme == "data":
        header, _, data = name.partition(",")
        if not header.endswith(";base64"):
            raise PictureError("is a data URL without ';base64'")
        try:
            return _stored(base64.b64decode(data, validate=True))
        except (binascii.Error, ValueError) as exc:
            raise PictureError(f"is a data URL whose base64 is damaged: {exc}") from exc
    if scheme == "file":
        name = unquote(urlsplit(name).path)
    elif "://" in name:
        raise PictureError(f"is at {name[:80]!r}, and nothing is fetched: give the file")
    path = Path(name).expanduser().absolute()
    return Picture(str(path), hashlib.sha256(_bytes_of(path)).hexdigest())


def _bytes_of(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise PictureError(f"is at {path}, where there is no file")
        if path.stat().st_size > MOST_NBYTES:
            raise PictureError(f"has {path.stat().st_size} bytes ({path}), more than {MOST_NBYTES}")
        return path.read_bytes()
    except OSError as exc:
        raise PictureError(f"cannot be read: {exc}") from exc


def _stored(data: bytes) -> Picture:
    if len(data) > MOST_NBYTES:
        raise PictureError(f"has {len(data)} bytes, more than {MOST_NBYTES}")
    digest = hashlib.sha256(data).hexdigest()
    path = _kept_at(digest)
    try:
        if not path.is_file() or path.stat().st_size != len(data):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{digest}.{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(path)
    except OSError as exc:
        raise PictureError(f"cannot be kept in {path.parent} ({exc}): set VERL_CACHE_DIR to a writable place") from exc
    return Picture(str(path), digest)


def _kept_at(digest: str) -> Path:
    return envs.cache_dir().expanduser().absolute() / "pictures" / digest[:2] / digest


def _decoded(data: bytes) -> Image.Image:
    from PIL import Image

    size, mode = (0, 0), ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is lower
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                size, mode = image.size, image.mode
                if mode not in DEEP and size[0] * size[1] <= MOST_PIXELS:
                    image.load()
                    return _rgb(image)
    except Image.DecompressionBombError as exc:
        raise PictureError(f"has more than {MOST_PIXELS} pixels: {exc}") from exc
    except Exception as exc:  # decoders raise what they like
        raise PictureError(f"is damaged, or none of {', '.join(FORMATS)} ({type(exc).__name__}: {exc})") from exc
    if mode in DEEP:
        raise PictureError(f"has values of more than 8 bits (mode {mode}), {CUT_OFF}")
    raise PictureError(f"has {size[0]} x {size[1]} pixels, more than {MOST_PIXELS}")


def is_turned(image: Image.Image) -> bool:
    """Whether its file asks viewers to turn or mirror it (EXIF), which no processor does."""
    try:
        return image.getexif().get(ORIENTATION, 1) not in (0, 1)
    except Exception:  # noqa: BLE001 - of damaged metadata decoders raise what they like
        return False


def _rgb(image: Image.Image) -> Image.Image:
    """As in verl: RGBA on white, all else as PIL converts it. The first of several frames. Not turned (EXIF)."""
    from PIL import Image

    if image.mode == "RGB":
        return image.copy()
    if image.mode == "RGBA":
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        white.info = dict(image.info)
        return white
    return image.convert("RGB")
