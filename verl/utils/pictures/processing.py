"""A model's inputs for pictures: their patches, and the matching number of tokens in the prompt."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.config import ConfigError
from verl.utils.language_model import sees
from verl.utils.pictures.picture import Picture, PictureError, keep

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PretrainedConfig

MOST_CACHED_NBYTES = 2**28
BLANK_PIXELS = 56


class PictureProcessor:
    """The processor of transformers that a model's directory names. It says what a picture becomes, in the prompt and
    for the model. PIL computes it: the same patches on every host, with torchvision and without.

    Computes a picture once, and caches it by its digest while there is room. May be used from several threads.
    """

    def __init__(self, processor: Any, config: PretrainedConfig) -> None:
        """`config` is the whole model's."""
        self.of_transformers = processor
        self.token_id = int(config.image_token_id)
        """In a prompt, once for each token that is made of a picture."""
        self.other_id = int(self.token_id == 0)
        """A token of text."""
        self._of_sizes: dict[tuple[int, int], str] = {}
        """By width and height: the text that pictures of this size become."""
        self._cache: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._counts: dict[str, int] = {}
        """By digest: the number of tokens."""
        self._cached_nbytes = 0
        self._lock = threading.Lock()
        self._blank: Picture | None = None

    def text(self, picture: Picture) -> str:
        """What a picture becomes in a prompt, as the processor writes it. Decodes it; computes one of each size.

        Raises PictureError if it is damaged or of a wrong size.
        """
        image = picture.open()
        if image.size not in self._of_sizes:
            try:
                self._of_sizes[image.size] = self._computed(image)[1]
            except ValueError as exc:
                raise PictureError(f"has {image.width} x {image.height} pixels: {exc}") from exc
        return self._of_sizes[image.size]

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
        wanted = sum(map(self._count, texts))
        if found != wanted:
            raise PictureError(f"the prompt has {found} tokens for pictures, of which {wanted} are made of one")

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """The model's inputs for all of them, such as `pixel_values` float32 [patches, values] and `image_grid_thw`
        int64 [pictures, 3]; {} without any. What differs in size is filled up with zeros, as by transformers.

        Raises PictureError for a missing or changed file.
        """
        each = [self._of(picture) for picture in pictures]
        return {name: _joined([one[name] for one in each]) for name in (each[0] if each else ())}

    def counts(self, pictures: Sequence[Picture]) -> list[int]:
        """The number of the model's tokens for each picture. Raises the errors of `inputs`."""
        for picture in pictures:
            if picture.digest not in self._counts:
                self._of(picture)
        return [self._counts[picture.digest] for picture in pictures]

    def blank(self) -> Picture:
        """A small white picture, of which a model makes few tokens."""
        from PIL import Image

        with self._lock:
            if self._blank is None:
                self._blank = keep(Image.new("RGB", (BLANK_PIXELS, BLANK_PIXELS), "white"))
            return self._blank

    def _of(self, picture: Picture) -> dict[str, torch.Tensor]:
        with self._lock:
            if (found := self._cache.get(picture.digest)) is not None:
                self._cache.move_to_end(picture.digest)
                return found
        made, text = self._computed(picture.open())
        with self._lock:
            self._counts[picture.digest] = self._count(text)
            if picture.digest not in self._cache:
                self._cache[picture.digest] = made
                self._cached_nbytes += _nbytes(made)
            while self._cached_nbytes > MOST_CACHED_NBYTES and len(self._cache) > 1:
                self._cached_nbytes -= _nbytes(self._cache.popitem(last=False)[1])
        return made

    def _computed(self, image: Image.Image) -> tuple[dict[str, torch.Tensor], str]:
        """The model's inputs for a picture, and what it becomes in a prompt."""
        given = self.of_transformers(
            images=[image],
            text=[self.of_transformers.image_token],
            add_special_tokens=False,
            return_text_replacement_offsets=True,
            return_mm_token_type_ids=False,
            return_tensors="pt",
        )
        ((replaced,),) = given["text_replacement_offsets"]
        of_text = {"text_replacement_offsets", "token_type_ids", "mm_token_type_ids"}
        of_text.update(self.of_transformers.tokenizer.model_input_names)
        return {name: given[name] for name in given.keys() - of_text}, replaced["replacement"]

    def _count(self, text: str) -> int:
        return list(self.of_transformers.tokenizer.encode(text, add_special_tokens=False)).count(self.token_id)


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
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any = PROCESSOR_MAPPING[type(config)]
    described, _ = kind.get_processor_dict(directory)
    accepted = inspect.signature(kind.__init__).parameters
    parts = {"image_processor": pictures, "tokenizer": tokenizer, "video_processor": None, "feature_extractor": None}
    fields = {name: value for name, value in (described | parts).items() if name in accepted}
    processor = kind.__new__(kind)
    processor.check_argument_for_proper_class = lambda name, part: None  # which refuses parts that are not there
    processor.__init__(**fields)
    del processor.check_argument_for_proper_class
    return processor


def _joined(each: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other. What differs in size is filled up at its ends with zeros."""
    import torch

    sizes = [max(sizes) for sizes in zip(*(one.shape[1:] for one in each), strict=True)]
    filled = []
    for one in each:
        missing = [end for size, own in zip(sizes[::-1], one.shape[:0:-1], strict=True) for end in (0, size - own)]
        filled.append(torch.nn.functional.pad(one, missing) if any(missing) else one)
    return torch.cat(filled)


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
