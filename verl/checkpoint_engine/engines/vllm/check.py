"""Check that a vLLM worker computes with the version that it loaded, and with no value of an earlier one.

At a worker's first activation (`first`) the check loads a second model from the arena, as vLLM loads from disk. Before
the reload it overwrites every live tensor that a load writes with NaNs of a recognisable pattern. After the reload the
live model must equal the second one bit for bit. The pattern matters if both versions are the same: a tensor that the
reload skips would be right then, and wrong from the next version on.

At later versions (`always`) the first and last rows of those tensors get the pattern. The reload must overwrite it, and
must pack packed tensors again. That needs no second model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import xxhash
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from ...errors import ActivationError, IntegrityError
from ...plan.types import EngineCheckResult
from ...support.package import PACKAGE
from .build import Weights, load_as_from_disk, quantizes_online
from .live import INTEGERS, LiveTensor, Packed, as_integers, differences, live_tensors

logger = logging.getLogger(__name__)

MODES = ("first", "always", "off")
PATTERNS = {
    torch.float32: 0x7FC5A5A5,
    torch.bfloat16: 0x7FDA,
    torch.float16: 0x7F5A,
    torch.float64: 0x7FF8A5A5A5A5A5A5,
    torch.float8_e4m3fn: 0xFF,
}
"""NaNs that no arithmetic produces. float8_e4m3fn has only two NaNs; no conversion produces this one."""
MOST_NAMES = 8
MARGIN = 1.2
"""The factor of memory for a second model: packing needs more than the tensors themselves."""


class EngineCheck:
    """The check of one vLLM worker: call `before` or `before_part`, load a version, and call `after`."""

    def __init__(
        self,
        mode: str,
        vllm_config: VllmConfig,
        device: torch.device,
        free: Callable[[torch.device], int] | None = None,
    ) -> None:
        """`free` returns the free bytes of a device. Raises ValueError for an unknown `mode`."""
        if mode not in MODES:
            raise ValueError(f"check_engine must be one of {', '.join(MODES)}, not {mode!r}")
        self._mode = mode
        self._vllm_config = vllm_config
        self._device = device
        self._free = free or free_nbytes
        self._passed = mode == "off"
        self._written: frozenset[str] | None = None
        """The names of tensors that a load writes, found by watching the load of a second model."""
        self._fresh: torch.nn.Module | None = None
        self._marked: dict[str, LiveTensor] = {}
        self._seconds = 0.0
        self._compared = False
        self._why_not = ""
        """Why there is no second model to compare with; empty if there was one."""
        self.result: EngineCheckResult | None = None
        """The result for the last loaded version; None if it was not checked."""

    @property
    def compares(self) -> bool:
        """Whether a second model exists, which the live one must equal."""
        return self._fresh is not None

    def start_over(self) -> None:
        """Compare the next version as if it were the first."""
        self._passed = self._mode == "off"

    def before(
        self, model: torch.nn.Module, weights: Callable[[], Weights] | None, agree: Callable[[bool], bool]
    ) -> None:
        """Prepare the check of a full load. `weights` iterates over the version's tensors; None if that works only
        once. `agree` returns whether all ranks passed true.

        Raises ActivationError if a model that quantizes its weights cannot be compared with a second one: only that
        comparison finds values that are rounded differently than from disk.
        """
        began = time.perf_counter()
        self.result = None
        if not self._passed:
            whole = weights is not None and agree(self._fits(model))
            if weights is not None and whole:
                self._build(weights)
            elif weights is not None and quantizes_online(self._vllm_config):
                raise ActivationError(
                    f"an engine that quantizes weights must pass a comparison with a load from disk before it serves: "
                    f"{self._lacking(model)}; make its KV cache smaller (rollout.gpu_memory_utilization)",
                    phase="activate",
                )
            else:
                self._why_not = self._reason(model, weights)
            names = self._written if self._written is not None else frozenset(dict(model.named_parameters()))
            self._marked = _mark(model, names, whole=True)
        elif self._mode == "always":
            names = self._written if self._written is not None else frozenset(dict(model.named_parameters()))
            self._marked = _mark(model, names, whole=False)
        self._seconds = time.perf_counter() - began

    def before_part(
        self, model: torch.nn.Module, weights: Callable[[], Weights], agree: Callable[[bool], bool]
    ) -> bool:
        """As `before`, if a part of the model is not loaded again. No tensor may be overwritten then, so the whole
        model is compared with a second one. False if memory for that lacks, or this version is not to be checked."""
        began = time.perf_counter()
        self.result = None
        if self._mode != "first" or not self._passed or not agree(self._fits(model)):
            return False
        self._build(weights)
        self._seconds = time.perf_counter() - began
        return True

    def after(self, model: torch.nn.Module, version: int | None) -> None:
        """Check the loaded model. Raises IntegrityError naming the tensors that are wrong. The caller may then load the
        version in another way and call this again, or `forget` it."""
        if not self._marked and self._fresh is None:
            return
        began = time.perf_counter()
        found = live_tensors(model)
        wrong = {
            name: "has values from before" for name, old in self._marked.items() if _is_stale(found.get(name), old)
        }
        self._compared = self._fresh is not None
        if self._fresh is not None:
            expected = live_tensors(self._fresh)
            # A forward pass may have added some, which a model that was never used does not have.
            wrong = differences({name: found[name] for name in found.keys() & expected.keys()}, expected) | wrong
            wrong |= dict.fromkeys(expected.keys() - found.keys(), "is not there")
        if wrong:
            named = "; ".join(f"{name} {text}" for name, text in list(wrong.items())[:MOST_NAMES])
            more = f"; and {len(wrong) - MOST_NAMES} more" if len(wrong) > MOST_NAMES else ""
            raise IntegrityError(
                f"{len(wrong)} tensors of {type(model).__name__} are not what vLLM would have loaded from disk: "
                f"{named}{more}",
                version=version,
                phase="activate",
            )
        text = self._text(len(found))
        self.forget()
        self._passed = True
        self.result = EngineCheckResult(seconds=self._seconds + time.perf_counter() - began, found=text)
        logger.info("version %s: %s (%.3f s)", version, text, self.result.seconds)

    def _text(self, num_live: int) -> str:
        if self._compared:
            return f"{num_live} live tensors equal a load from disk"
        written = f"{len(self._marked)} of {num_live} live tensors were written anew"
        why_not, self._why_not = self._why_not, ""
        return f"{written}; not compared with a load from disk: {why_not}" if why_not else written

    def forget(self) -> None:
        """Drop the second model and the marks of a version that could not be loaded."""
        self._fresh, self._marked = None, {}

    def release(self) -> None:
        """Free the second model: the live one is about to be loaded in the same way, and needs the memory."""
        self._fresh = None

    def _build(self, weights: Callable[[], Weights]) -> None:
        before: dict[str, int] = {}

        def watch(built: torch.nn.Module) -> None:
            before.update({name: digest_of(tensor) for name, tensor in live_tensors(built).items()})

        self._fresh = load_as_from_disk(self._vllm_config, weights(), watch)
        after = live_tensors(self._fresh)
        self._written = frozenset(name for name, tensor in after.items() if before.get(name) != digest_of(tensor))

    def _fits(self, model: torch.nn.Module) -> bool:
        return needed_nbytes(model) < self._free(self._device)

    def _reason(self, model: torch.nn.Module, weights: Callable[[], Weights] | None) -> str:
        reason = "the weights come only once" if weights is None else self._lacking(model)
        logger.warning(
            "the live model is not compared with a load from disk (%s); the only check is that loading writes every "
            "parameter. `python -m %s.certify` compares all of it",
            reason,
            PACKAGE,
        )
        return reason

    def _lacking(self, model: torch.nn.Module) -> str:
        needed, free = (nbytes / 2**30 for nbytes in (needed_nbytes(model), self._free(self._device)))
        return f"a second model needs {needed:.3g} GiB on {self._device}, where {free:.3g} GiB are free"


def needed_nbytes(model: torch.nn.Module) -> int:
    """The bytes that a second model like `model` needs while it is loaded."""
    storages: dict[int, int] = {}
    for tensor in live_tensors(model).values():
        if isinstance(tensor, Packed):
            storages[id(tensor.multiply)] = tensor.nbytes
        elif not tensor.is_meta:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return int(sum(storages.values()) * MARGIN) + max(map(_quantizing_nbytes, model.modules()), default=0)


def _quantizing_nbytes(layer: torch.nn.Module) -> int:
    """What a layer needs beside its quantized weights while it makes them: the plain ones, once more with padding, and
    two of one matrix at a time in float32."""
    if not getattr(getattr(layer, "quant_method", None), "uses_meta_device", False):
        return 0
    plain = [tensor for tensor in get_layerwise_info(layer).restore_metadata[0].values() if tensor.dim() > 1]
    return sum(2 * tensor.nbytes + 8 * tensor.shape[-2] * tensor.shape[-1] for tensor in plain)


def free_nbytes(device: torch.device) -> int:
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(torch.get_device_module(device).mem_get_info(device)[0])


@torch.inference_mode()
def _mark(model: torch.nn.Module, names: frozenset[str], *, whole: bool) -> dict[str, LiveTensor]:
    """Put the pattern into those of the live tensors that have `names` and floating-point elements; what is packed is
    remembered instead. Returns them."""
    marked: dict[str, LiveTensor] = {}
    for name, tensor in live_tensors(model).items():
        if name not in names:
            continue
        if isinstance(tensor, Packed):
            marked[name] = tensor
        elif tensor.dtype in PATTERNS and tensor.numel() and not tensor.is_meta:
            for part in (tensor,) if whole or tensor.dim() == 0 else (tensor[0], tensor[-1]):
                part.copy_(_pattern(tensor.dtype, tensor.device).expand(part.shape))
            marked[name] = tensor
    return marked


def _pattern(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(PATTERNS[dtype], dtype=INTEGERS[dtype.itemsize], device=device).view(dtype)


def _is_stale(found: LiveTensor | None, before: LiveTensor) -> bool:
    """`found` is what the live model has now under the name of `before`."""
    if isinstance(before, Packed):
        return isinstance(found, Packed) and found.source is before.source
    if not isinstance(found, torch.Tensor) or found.dtype not in PATTERNS or found.is_meta:
        return False
    return bool((as_integers(found) == PATTERNS[found.dtype]).any())


def digest_of(tensor: LiveTensor) -> Any:
    """A value that differs after a load has changed `tensor`; None for a tensor on the meta device."""
    if isinstance(tensor, Packed):
        return id(tensor.source)
    if tensor.is_meta:
        return None
    return tensor.dtype, tuple(tensor.shape), xxhash.xxh3_64_intdigest(as_integers(tensor).cpu().numpy().data)
