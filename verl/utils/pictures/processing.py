"""A model's inputs for pictures and videos: their patches, and the matching number of tokens in the prompt."""

from __future__ import annotations

import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.utils.config import ConfigError
from verl.utils.language_model import WITH_VIDEOS, sees
from verl.utils.pictures.picture import NO_LIMITS, Picture, PictureError, PixelLimits, keep
from verl.utils.pictures.video import RATE, FrameLimits, Frames, Video

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PretrainedConfig

MOST_CACHED_NBYTES = 2**28
BLANK_PIXELS = 56
MOST_KNOWN = 2**12
"""Pictures of which a process keeps places and digest: 8 bytes for each token. More than a micro-batch has."""
MOST_SIZES = 2**10
"""Of pictures, of which a process keeps the text: some 10 bytes for each token."""
OF_ONE_PROCESS = ("_cache", "_cached_nbytes", "_known", "_lock", "_blank")
"""Attributes that do not go to other processes."""
UNLOADABLE = (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError)
TORCHVISION = "transformers makes patches of videos with torchvision"
OF_PICTURES, OF_VIDEOS = 1, 2
"""What transformers calls tokens of both, beside 0 of text."""
Medium = Picture | Video


def kind_of(medium: Medium) -> int:
    """`OF_PICTURES` or `OF_VIDEOS`."""
    return OF_VIDEOS if isinstance(medium, Video) else OF_PICTURES


class _Known(NamedTuple):
    """Of a picture, also when the inputs that the model gets are no longer there."""

    places: tuple[bool, ...]
    """See `PictureProcessor.places`."""
    digest: str
    """Of those inputs."""


class PictureProcessor:
    """The processor of transformers that a model's directory names. It says what a picture or a video becomes, in the
    prompt and for the model. PIL computes pictures: the same patches on every host, with torchvision and without.
    Videos need it.

    Computes each once, and caches it by its digest while there is room. May be used from several threads, and passed
    to other processes, where it begins with an empty cache.
    """

    def __init__(self, processor: Any, config: PretrainedConfig, directory: str | Path | None = None) -> None:
        """`config` is the whole model's; `directory` has its processor of videos."""
        self.of_transformers = processor
        self.model_type = str(config.model_type)
        self.token_id = int(config.image_token_id)
        """In a prompt, once for each token that is made of a picture."""
        self.token_ids = {OF_PICTURES: self.token_id}
        """The same by kind."""
        if self.model_type in WITH_VIDEOS:
            self.token_ids[OF_VIDEOS] = int(config.video_token_id)
        self._directory = directory
        self._merged = getattr(config.vision_config, "spatial_merge_size", None)
        self._of_sizes: dict[tuple[tuple[int, int], PixelLimits], str] = {}
        """By width and height, and limits: the text that such pictures become. The latest `MOST_SIZES`."""
        self._begin_cache()

    def _begin_cache(self) -> None:
        self._cache: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._cached_nbytes = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()
        """By `Picture.key`, the latest `MOST_KNOWN`."""
        self._blank: dict[int, Medium] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in OF_ONE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_cache()

    def difference(self, other: PictureProcessor) -> list[str]:
        """Names of the settings by which `other` makes other inputs of pictures; tokens count as settings."""
        own, theirs = self._settings(), other._settings()
        return sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))

    def _settings(self) -> dict[str, Any]:
        tokens = {"image_token_id": self.token_id, "spatial_merge_size": self._merged}
        return dict(self.of_transformers.image_processor.to_dict()) | tokens

    @property
    def why_no_videos(self) -> str:
        """Why the model gets no videos; empty where it does."""
        if self.model_type not in WITH_VIDEOS:
            return f"{self.model_type} is trained with pictures, and not with videos ({', '.join(WITH_VIDEOS)} are)"
        if find_spec("torchvision") is None:
            return f"{TORCHVISION}, which is not installed: add the build for this torch"
        return ""

    def text(self, medium: Medium) -> str:
        """What it becomes in a prompt, as the processor writes it. Decodes it; computes one picture of each size, and
        every video.

        Raises PictureError if it is damaged or of a wrong size.
        """
        if isinstance(medium, Video):
            return self._made(medium)[2]
        return self.text_of(medium.open(), medium.limits)

    def mark(self, medium: Medium) -> str:
        """What the chat template writes for it."""
        token: str = getattr(self.of_transformers, "video_token" if isinstance(medium, Video) else "image_token")
        return token

    def text_of(self, image: Image.Image, limits: PixelLimits = NO_LIMITS) -> str:
        """See `text`. Raises PictureError for an image of a wrong size."""
        key = (image.size, limits)
        text = self._of_sizes.get(key)
        if text is None:
            try:
                text = self._computed(image, limits)[1]
            except ValueError as exc:
                raise PictureError(f"has {image.width} x {image.height} pixels: {exc}") from exc
            with self._lock:
                self._of_sizes[key] = text
                while len(self._of_sizes) > MOST_SIZES:
                    del self._of_sizes[next(iter(self._of_sizes))]
        return text

    def limited(self, limits: PixelLimits) -> PixelLimits:
        """`limits` as they are, with the model's own in the place of those that are not given. Raises ConfigError for a
        processor that has no such limits, and where the fewest pixels are more than the most."""
        if limits == NO_LIMITS:
            return limits
        pictures = self.of_transformers.image_processor
        size = dict(getattr(pictures, "size", None) or {})
        least, most = (
            own if given is None else given
            for given, own in zip(limits, (size.get("shortest_edge"), size.get("longest_edge")), strict=True)
        )
        if least is None or most is None or "min_pixels" not in pictures.valid_kwargs.__annotations__:
            raise ConfigError(f"{type(pictures).__name__} has no limits of pixels")
        if least > most:
            raise ConfigError(f"min_pixels={least} are more than max_pixels={most}")
        return PixelLimits(least, most)

    def expanded(self, prompt: str, texts: Sequence[str]) -> str:
        """The prompt with the `text` of each picture and video, from the chat template's, which has one mark for each.

        Raises PictureError if that has another number of marks.
        """
        of_videos = [OF_VIDEOS in self.token_ids and self.of_transformers.video_token in text for text in texts]
        for kind, token, name in self._marks():
            own = [text for text, is_video in zip(texts, of_videos, strict=True) if is_video == (kind == OF_VIDEOS)]
            pieces = prompt.split(token)
            if len(pieces) - 1 != len(own):
                raise PictureError(
                    f"the chat template writes {len(pieces) - 1} tokens for {name} where there are {len(own)}"
                )
            prompt = "".join(part for both in zip(pieces, [*own, ""], strict=True) for part in both)
        return prompt

    def _marks(self) -> list[tuple[int, str, str]]:
        marks = [(OF_PICTURES, self.of_transformers.image_token, "pictures")]
        if OF_VIDEOS in self.token_ids:
            marks.append((OF_VIDEOS, self.of_transformers.video_token, "videos"))
        return marks

    def require(self, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Raises PictureError unless a prompt has as many tokens for pictures, and for videos, as `texts` together."""
        for kind, _, name in self._marks():
            found = sum(token == self.token_ids[kind] for token in token_ids)
            wanted = sum(sum(self._placed(text, kind)) for text in texts)
            if found != wanted:
                raise PictureError(f"the prompt has {found} tokens for {name}, of which {wanted} are made of one")

    def inputs(self, media: Sequence[Medium]) -> dict[str, torch.Tensor]:
        """The model's inputs for all of them, such as `pixel_values` float32 [patches, values] and `image_grid_thw`
        int64 [pictures, 3]; {} without any. What differs in size is filled up with zeros, as by transformers.

        Raises PictureError for a missing or changed file.
        """
        found: dict[str, torch.Tensor] = {}
        for kind in self.token_ids:
            each = [self._of(medium) for medium in media if kind_of(medium) == kind]
            found |= {name: _joined([one[name] for one in each]) for name in (each[0] if each else ())}
        return found

    def digests(self, pictures: Sequence[Medium]) -> tuple[str, ...]:
        """Of the model's inputs for each, to compare with those that another process makes of it.

        Raises the errors of `inputs`.
        """
        return tuple(self._known_of(picture).digest for picture in pictures)

    def require_same(self, pictures: Sequence[Medium], digests: Sequence[str]) -> None:
        """Raises PictureError unless `digests`, those of another process, are the `digests` of these pictures."""
        if len(pictures) != len(digests):
            raise PictureError(f"the engine saw {len(digests)} pictures of a sample with {len(pictures)}")
        for picture, theirs, own in zip(pictures, digests, self.digests(pictures), strict=True):
            if theirs != own:
                raise PictureError(
                    f"the engine made other patches of {picture.path} than the trainer: their hosts must have the same "
                    "versions of pillow, transformers, torchvision and av"
                )

    def counts(self, pictures: Sequence[Medium]) -> list[int]:
        """The number of the model's tokens for each. Raises the errors of `inputs`."""
        return [sum(self.places(picture)) for picture in pictures]

    def places(self, picture: Medium) -> tuple[bool, ...]:
        """Of a picture's tokens in a prompt, from the first that is made of it to the last one: whether each is.
        Others stand between rows or tiles, and between frames. Raises the errors of `inputs`."""
        return self._known_of(picture).places

    def blank(self, kind: int = OF_PICTURES) -> Medium:
        """A small white picture, or a video of one step in time, of which a model makes few tokens."""
        from PIL import Image

        with self._lock:
            if kind not in self._blank:
                white = keep(Image.new("RGB", (BLANK_PIXELS, BLANK_PIXELS), "white"))
                self._blank[kind] = Video((white, white), in_frames=True) if kind == OF_VIDEOS else white
            return self._blank[kind]

    def _of(self, picture: Medium) -> dict[str, torch.Tensor]:
        with self._lock:
            if (found := self._cache.get(picture.key)) is not None:
                self._cache.move_to_end(picture.key)
                return found
        return self._made(picture)[0]

    def _known_of(self, picture: Medium) -> _Known:
        with self._lock:
            if (found := self._known.get(picture.key)) is not None:
                self._known.move_to_end(picture.key)
                return found
        return self._made(picture)[1]

    def _made(self, medium: Medium) -> tuple[dict[str, torch.Tensor], _Known, str]:
        made, text = self._read(medium)
        known = _Known(places=self._placed(text, kind_of(medium)), digest=_digest(made))
        with self._lock:
            self._known[medium.key] = known
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
            if medium.key not in self._cache:
                self._cache[medium.key] = made
                self._cached_nbytes += _nbytes(made)
            while self._cached_nbytes > MOST_CACHED_NBYTES and len(self._cache) > 1:
                self._cached_nbytes -= _nbytes(self._cache.popitem(last=False)[1])
        return made, known, text

    def _read(self, medium: Medium) -> tuple[dict[str, torch.Tensor], str]:
        """The model's inputs for it, and what it becomes in a prompt."""
        if not isinstance(medium, Video):
            return self._computed(medium.open(), medium.limits)
        if self.why_no_videos:
            raise PictureError(f"is a video: {self.why_no_videos}")
        processor = self._of_videos()
        frames = medium.open(self._chosen)
        if (count := len(frames.indices)) > processor.max_frames:
            raise PictureError(f"has {count} frames, more than the {processor.max_frames} of the processor")
        try:
            return self._computed_video(frames, medium.limits)
        except ValueError as exc:
            count, height, width, _ = frames.pixels.shape
            raise PictureError(f"has {count} frames of {width} x {height} pixels: {exc}") from exc

    def _of_videos(self) -> Any:
        """The processor's part for videos, which is loaded when there is the first one."""
        from transformers import AutoVideoProcessor

        with self._lock:
            if self.of_transformers.video_processor is None:
                auto: Any = AutoVideoProcessor
                try:
                    found = auto.from_pretrained(self._directory, trust_remote_code=False)
                except UNLOADABLE as exc:
                    why = str(exc).strip().splitlines()[0]
                    raise PictureError(
                        f"is a video, and the processor in {self._directory} cannot be loaded: {why}"
                    ) from exc
                self.of_transformers.video_processor = found
            return self.of_transformers.video_processor

    def _chosen(self, total: int, rate: float, limits: FrameLimits) -> Sequence[int]:
        """Frames of a file, as the processor samples them."""
        from transformers.video_utils import VideoMetadata

        processor = self._of_videos()
        asked = {"num_frames": limits.num_frames, "fps": limits.fps}
        if asked == {"num_frames": None, "fps": None} and not (processor.num_frames or processor.fps):
            asked["fps"] = RATE
        video = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
        try:
            chosen: list[int] = [int(index) for index in processor.sample_frames(metadata=video, **asked)]
        except (ValueError, ZeroDivisionError, RuntimeError) as exc:
            raise PictureError(f"has {total} frames, which cannot be sampled: {exc}") from exc
        return chosen

    def _computed_video(self, frames: Frames, limits: FrameLimits) -> tuple[dict[str, torch.Tensor], str]:
        import torch

        size = dict(self._of_videos().size)
        bounds = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
        scaled = {name: size.get(name) if value is None else value for name, value in bounds.items()}
        described = {"fps": frames.rate, "total_num_frames": frames.total, "frames_indices": list(frames.indices)}
        options = {
            "do_sample_frames": False,  # it is done
            "video_metadata": [described | {"duration": frames.total / frames.rate}],
            "input_data_format": "channels_first",
            "return_metadata": True,
            **({} if set(bounds.values()) == {None} else {"size": scaled}),
        }
        pixels = torch.from_numpy(frames.pixels).permute(0, 3, 1, 2).contiguous()
        return self._by_transformers(self.of_transformers.video_token, videos=[pixels], videos_kwargs=options)

    def _computed(self, image: Image.Image, limits: PixelLimits) -> tuple[dict[str, torch.Tensor], str]:
        least, most = limits
        scaled = (
            {} if limits == NO_LIMITS else {"images_kwargs": {"size": {"shortest_edge": least, "longest_edge": most}}}
        )
        return self._by_transformers(self.of_transformers.image_token, images=[image], **scaled)

    def _by_transformers(self, token: str, **given: Any) -> tuple[dict[str, torch.Tensor], str]:
        """The model's inputs for one picture or video, and what it becomes in a prompt."""
        made = self.of_transformers(
            text=[token],
            add_special_tokens=False,
            return_text_replacement_offsets=True,
            return_mm_token_type_ids=False,
            return_tensors="pt",
            **given,
        )
        ((replaced,),) = made["text_replacement_offsets"]
        of_text = {"text_replacement_offsets", "token_type_ids", "mm_token_type_ids", "video_metadata"}
        of_text.update(self.of_transformers.tokenizer.model_input_names)
        return {name: made[name] for name in sorted(made.keys() - of_text)}, replaced["replacement"]

    def _placed(self, text: str, kind: int = OF_PICTURES) -> tuple[bool, ...]:
        ids, own = self.of_transformers.tokenizer.encode(text, add_special_tokens=False), self.token_ids[kind]
        made = [place for place, token in enumerate(ids) if token == own]
        return tuple(token == own for token in ids[made[0] : made[-1] + 1]) if made else ()


def load_processor(directory: str | Path, config: PretrainedConfig) -> PictureProcessor | None:
    """The processor of the model of `config` in `directory`; None for a text model. Runs no code of the directory.

    Raises ConfigError for a processor that cannot be loaded.
    """
    if not sees(config):
        return None
    from transformers import AutoImageProcessor, AutoTokenizer

    auto: Any = AutoImageProcessor
    try:
        pictures = auto.from_pretrained(directory, backend="pil", trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        return PictureProcessor(_whole(directory, config, pictures, tokenizer), config, directory)
    except UNLOADABLE as exc:
        why = str(exc).strip().splitlines()[0]
        raise ConfigError(f"the image processor in {directory} cannot be loaded: {why}") from exc


def _whole(directory: str | Path, config: PretrainedConfig, pictures: Any, tokenizer: Any) -> Any:
    """The processor of transformers around them, yet without its part for videos, which needs torchvision."""
    kind = _class_of(directory, config)
    described, _ = kind.get_processor_dict(directory)
    accepted = inspect.signature(kind.__init__).parameters
    parts = {"image_processor": pictures, "tokenizer": tokenizer, "video_processor": None, "feature_extractor": None}
    fields = {name: value for name, value in (described | parts).items() if name in accepted}
    processor = kind.__new__(kind)
    processor.check_argument_for_proper_class = lambda name, part: None  # which refuses parts that are not there
    processor.__init__(**fields)
    del processor.check_argument_for_proper_class
    return processor


def _class_of(directory: str | Path, config: PretrainedConfig) -> Any:
    """The class of the processor as AutoProcessor finds it: what the directory names, else that of the architecture.
    LLaVA's with a tower of Pixtral name Pixtral's, for instance. Raises ValueError for an unknown name."""
    from transformers import ImageProcessingMixin, ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

    processor: Any = ProcessorMixin
    tokenizer = Path(directory) / "tokenizer_config.json"
    for read in (
        lambda: processor.get_processor_dict(directory)[0],
        lambda: ImageProcessingMixin.get_image_processor_dict(directory)[0],
        lambda: json.loads(tokenizer.read_text("utf-8")) if tokenizer.is_file() else {},
    ):
        if (name := read().get("processor_class")) is not None:
            if (kind := processor_class_from_name(name)) is None:
                raise ValueError(f"transformers does not know processor_class={name}")
            return kind
    return PROCESSOR_MAPPING[type(config)]


def _joined(each: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other. What differs in size is filled up at its ends with zeros."""
    import torch

    sizes = [max(sizes) for sizes in zip(*(one.shape[1:] for one in each), strict=True)]
    filled = []
    for one in each:
        missing = [end for size, own in zip(sizes[::-1], one.shape[:0:-1], strict=True) for end in (0, size - own)]
        filled.append(torch.nn.functional.pad(one, missing) if any(missing) else one)
    return torch.cat(filled)


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
