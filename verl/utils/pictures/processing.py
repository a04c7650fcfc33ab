"""A model's inputs for pictures: their patches, and the matching number of tokens in the prompt."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.config import ConfigError
from verl.utils.language_model import sees
from verl.utils.pictures.picture import LIMITS, NO_LIMITS, Picture, PictureError, PixelLimits, keep

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PretrainedConfig

MOST_CACHED_NBYTES = 2**28
BLANK_PIXELS = 56
OF_ONE_PROCESS = ("_cache", "_cached_nbytes", "_made", "_lock", "_blank")
"""Attributes that do not go to other processes."""


class PictureProcessor:
    """The image processor of transformers that a model's directory names, computed by PIL: the same patches on every
    host, with torchvision and without. May be used from several threads, and passed to other processes.

    Computes a picture once, and caches it by its digest while there is room. A copy begins with an empty cache.
    """

    def __init__(self, image_processor: Any, config: PretrainedConfig) -> None:
        """`config` is the whole model's."""
        self._processor = image_processor
        self.token_id = int(config.image_token_id)
        """In a prompt, once for each token that is made of a picture."""
        self.other_id = int(self.token_id == 0)
        """A token of text."""
        self._merged = int(config.vision_config.spatial_merge_size) ** 2
        self._begin_cache()

    def _begin_cache(self) -> None:
        self._cache: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._cached_nbytes = 0
        self._made: dict[str, str] = {}
        """By `Picture.key`: the digest of its patches."""
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
        tokens = {"image_token_id": self.token_id, "spatial_merge_size squared": self._merged}
        return dict(self._processor.to_dict()) | tokens

    def num_tokens(self, picture: Picture) -> int:
        """The model's tokens for a picture, which is decoded. Raises PictureError if it is damaged or of a wrong
        size."""
        return self.num_tokens_of(picture.open(), picture.limits)

    def num_tokens_of(self, image: Image.Image, limits: PixelLimits = NO_LIMITS) -> int:
        """The model's tokens for an image. Raises PictureError if it is of a wrong size."""
        given = {name: value for name, value in zip(LIMITS, limits, strict=True) if value is not None}
        try:
            patches = int(self._processor.get_number_of_image_patches(image.height, image.width, given))
        except ValueError as exc:
            raise PictureError(f"has {image.width} x {image.height} pixels: {exc}") from exc
        return patches // self._merged

    def limited(self, limits: PixelLimits) -> PixelLimits:
        """`limits` as they are, with the model's own in the place of those that are not given. Raises ConfigError for a
        processor that has no such limits, and where the fewest pixels are more than the most."""
        if limits == NO_LIMITS:
            return limits
        size = dict(getattr(self._processor, "size", None) or {})
        least, most = (
            own if given is None else given
            for given, own in zip(limits, (size.get("shortest_edge"), size.get("longest_edge")), strict=True)
        )
        if least is None or most is None or "min_pixels" not in self._processor.valid_kwargs.__annotations__:
            raise ConfigError(f"{type(self._processor).__name__} has no limits of pixels")
        if least > most:
            raise ConfigError(f"min_pixels={least} are more than max_pixels={most}")
        return PixelLimits(least, most)

    def expanded(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """The prompt with `counts` tokens per picture, from the chat template's, which has one token per picture.

        Raises PictureError if that has another number of pictures than `counts`.
        """
        written = sum(token == self.token_id for token in token_ids)
        if written != len(counts):
            raise PictureError(f"the chat template writes {written} tokens for pictures where there are {len(counts)}")
        rest = iter(counts)
        ids: list[int] = []
        for token in token_ids:
            ids += [token] * next(rest) if token == self.token_id else [token]
        return ids

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """`pixel_values` float32 [patches, values] of all, and `image_grid_thw` int64 [pictures, 3]; {} without any.

        Raises PictureError for a missing or changed file.
        """
        import torch

        each = [self._of(picture) for picture in pictures]
        return {name: torch.cat([one[name] for one in each]) for name in (each[0] if each else ())}

    def digests(self, pictures: Sequence[Picture]) -> tuple[str, ...]:
        """Of the model's inputs for each picture, to compare with those that another process makes of it.

        Raises the errors of `inputs`.
        """
        for picture in pictures:
            if picture.key not in self._made:
                self._of(picture)
        return tuple(self._made[picture.key] for picture in pictures)

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

    def counts(self, image_grid_thw: torch.Tensor) -> torch.Tensor:
        """The number of the model's tokens for each picture, [pictures], from its grids [pictures, 3]."""
        return image_grid_thw.prod(-1) // self._merged

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
        least, most = picture.limits
        scaled = {} if picture.limits == NO_LIMITS else {"size": {"shortest_edge": least, "longest_edge": most}}
        given = self._processor(images=[picture.open()], return_tensors="pt", **scaled)
        made = {name: given[name] for name in ("pixel_values", "image_grid_thw")}
        digest = _digest(made)
        with self._lock:
            self._made[picture.key] = digest
            if picture.key not in self._cache:
                self._cache[picture.key] = made
                self._cached_nbytes += _nbytes(made)
            while self._cached_nbytes > MOST_CACHED_NBYTES and len(self._cache) > 1:
                self._cached_nbytes -= _nbytes(self._cache.popitem(last=False)[1])
        return made


def load_processor(directory: str | Path, config: PretrainedConfig) -> PictureProcessor | None:
    """The processor of the model of `config` in `directory`; None for a text model. Runs no code of the directory.

    Raises ConfigError for a processor that cannot be loaded.
    """
    if not sees(config):
        return None
    from transformers import AutoImageProcessor

    auto: Any = AutoImageProcessor
    try:
        return PictureProcessor(auto.from_pretrained(directory, backend="pil", trust_remote_code=False), config)
    except (OSError, ValueError, ImportError, KeyError) as exc:
        why = str(exc).strip().splitlines()[0]
        raise ConfigError(f"the image processor in {directory} cannot be loaded: {why}") from exc


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
