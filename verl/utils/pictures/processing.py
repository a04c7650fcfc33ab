"""A model's inputs for pictures: their patches, and the matching number of tokens in the prompt."""

from __future__ import annotations

import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.utils.config import ConfigError
from verl.utils.language_model import sees
from verl.utils.pictures.picture import NO_LIMITS, Picture, PictureError, PixelLimits, keep

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


class _Known(NamedTuple):
    """Of a picture, also when the inputs that the model gets are no longer there."""

    places: tuple[bool, ...]
    """See `PictureProcessor.places`."""
    digest: str
    """Of those inputs."""


class PictureProcessor:
    """The processor of transformers that a model's directory names. It says what a picture becomes, in the prompt and
    for the model. PIL computes it: the same patches on every host, with torchvision and without.

    Computes a picture once, and caches it by its digest while there is room. May be used from several threads, and
    passed to other processes, where it begins with an empty cache.
    """

    def __init__(self, processor: Any, config: PretrainedConfig) -> None:
        """`config` is the whole model's."""
        self.of_transformers = processor
        self.model_type = str(config.model_type)
        self.token_id = int(config.image_token_id)
        """In a prompt, once for each token that is made of a picture."""
        self._merged = getattr(config.vision_config, "spatial_merge_size", None)
        self._of_sizes: dict[tuple[tuple[int, int], PixelLimits], str] = {}
        """By width and height, and limits: the text that such pictures become. The latest `MOST_SIZES`."""
        self._begin_cache()

    def _begin_cache(self) -> None:
        self._cache: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._cached_nbytes = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()
        """By `Picture.key`, the latest `MOST_KNOWN`."""
        self._blank: Picture | None = None
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

    def text(self, picture: Picture) -> str:
        """What a picture becomes in a prompt, as the processor writes it. Decodes it; computes one of each size.

        Raises PictureError if it is damaged or of a wrong size.
        """
        return self.text_of(picture.open(), picture.limits)

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
        """The prompt with the `text` of each picture, from the chat template's, which has one mark for each.

        Raises PictureError if that has another number of marks.
        """
        pieces = prompt.split(self.of_transformers.image_token)
        if len(pieces) - 1 != len(texts):
            raise PictureError(
                f"the chat template writes {len(pieces) - 1} tokens for pictures where there are {len(texts)}"
            )
        return "".join(part for both in zip(pieces, [*texts, ""], strict=True) for part in both)

    def require(self, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Raises PictureError unless a prompt has as many tokens for pictures as `texts` together."""
        found = sum(token == self.token_id for token in token_ids)
        wanted = sum(sum(self._placed(text)) for text in texts)
        if found != wanted:
            raise PictureError(f"the prompt has {found} tokens for pictures, of which {wanted} are made of one")

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """The model's inputs for all of them, such as `pixel_values` float32 [patches, values] and `image_grid_thw`
        int64 [pictures, 3]; {} without any. What differs in size is filled up with zeros, as by transformers.

        Raises PictureError for a missing or changed file.
        """
        each = [self._of(picture) for picture in pictures]
        return {name: _joined([one[name] for one in each]) for name in (each[0] if each else ())}

    def digests(self, pictures: Sequence[Picture]) -> tuple[str, ...]:
        """Of the model's inputs for each picture, to compare with those that another process makes of it.

        Raises the errors of `inputs`.
        """
        return tuple(self._known_of(picture).digest for picture in pictures)

    def require_same(self, pictures: Sequence[Picture], digests: Sequence[str]) -> None:
        """Raises PictureError unless `digests`, those of another process, are the `digests` of these pictures."""
        if len(pictures) != len(digests):
            raise PictureError(f"the engine saw {len(digests)} pictures of a sample with {len(pictures)}")
        for picture, theirs, own in zip(pictures, digests, self.digests(pictures), strict=True):
            if theirs != own:
                raise PictureError(
                    f"the engine made other patches of {picture.path} than the trainer: their hosts must have the same "
                    "versions of pillow and transformers"
                )

    def counts(self, pictures: Sequence[Picture]) -> list[int]:
        """The number of the model's tokens for each picture. Raises the errors of `inputs`."""
        return [sum(self.places(picture)) for picture in pictures]

    def places(self, picture: Picture) -> tuple[bool, ...]:
        """Of a picture's tokens in a prompt, from the first that is made of it to the last one: whether each is.
        Others stand between rows or tiles. Raises the errors of `inputs`."""
        return self._known_of(picture).places

    def blank(self) -> Picture:
        """A small white picture, of which a model makes few tokens."""
        from PIL import Image

        with self._lock:
            if self._blank is None:
                self._blank = keep(Image.new("RGB", (BLANK_PIXELS, BLANK_PIXELS), "white"))
            return self._blank

    def _of(self, picture: Picture) -> dict[str, torch.Tensor]:
        with self._lock:
            if (found := self._cache.get(picture.key)) is not None:
                self._cache.move_to_end(picture.key)
                return found
        return self._made(picture)[0]

    def _known_of(self, picture: Picture) -> _Known:
        with self._lock:
            if (found := self._known.get(picture.key)) is not None:
                self._known.move_to_end(picture.key)
                return found
        return self._made(picture)[1]

    def _made(self, picture: Picture) -> tuple[dict[str, torch.Tensor], _Known]:
        made, text = self._computed(picture.open(), picture.limits)
        known = _Known(places=self._placed(text), digest=_digest(made))
        with self._lock:
            self._known[picture.key] = known
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
            if picture.key not in self._cache:
                self._cache[picture.key] = made
                self._cached_nbytes += _nbytes(made)
            while self._cached_nbytes > MOST_CACHED_NBYTES and len(self._cache) > 1:
                self._cached_nbytes -= _nbytes(self._cache.popitem(last=False)[1])
        return made, known

    def _computed(self, image: Image.Image, limits: PixelLimits) -> tuple[dict[str, torch.Tensor], str]:
        """The model's inputs for a picture, and what it becomes in a prompt."""
        least, most = limits
        scaled = (
            {} if limits == NO_LIMITS else {"images_kwargs": {"size": {"shortest_edge": least, "longest_edge": most}}}
        )
        given = self.of_transformers(
            images=[image],
            text=[self.of_transformers.image_token],
            add_special_tokens=False,
            return_text_replacement_offsets=True,
            return_mm_token_type_ids=False,
            return_tensors="pt",
            **scaled,
        )
        ((replaced,),) = given["text_replacement_offsets"]
        of_text = {"text_replacement_offsets", "token_type_ids", "mm_token_type_ids"}
        of_text.update(self.of_transformers.tokenizer.model_input_names)
        return {name: given[name] for name in sorted(given.keys() - of_text)}, replaced["replacement"]

    def _placed(self, text: str) -> tuple[bool, ...]:
        ids = self.of_transformers.tokenizer.encode(text, add_special_tokens=False)
        made = [place for place, token in enumerate(ids) if token == self.token_id]
        return tuple(token == self.token_id for token in ids[made[0] : made[-1] + 1]) if made else ()


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
        return PictureProcessor(_whole(directory, config, pictures, tokenizer), config)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as exc:
        why = str(exc).strip().splitlines()[0]
        raise ConfigError(f"the image processor in {directory} cannot be loaded: {why}") from exc


def _whole(directory: str | Path, config: PretrainedConfig, pictures: Any, tokenizer: Any) -> Any:
    """The processor of transformers around them, without its part for videos, which would need torchvision."""
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
