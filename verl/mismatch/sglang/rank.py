"""A rank of SGLang that records what its model computes.

SGLang calls a custom weight loader with its model and a list of (name, tensor). The name is an order in JSON: a method
of an extension, its arguments, and a file for the answer. Nothing is loaded.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils import dynamic_import

from verl.checkpoint_engine.compat.sglang import own_rotary_tables
from verl.mismatch.places import decoder_layers, is_block
from verl.mismatch.recorder import Recorder, sequence_of

LOADER = f"{__name__}.load"
"""The value of SGLang's `custom_weight_loader`, and the `load_format` of an order."""
_extensions: dict[str, Probe] = {}
"""Those of this process, by path."""


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out an order. An exception here would end SGLang; it is the answer instead."""
    ((text, _),) = named_tensors
    order = json.loads(text)
    try:
        if (path := order["extension"]) not in _extensions:
            _extensions[path] = dynamic_import(path)(model)
        answer = {"answer": getattr(_extensions[path], order["method"])(*order["arguments"])}
    except Exception:  # noqa: BLE001 - whatever SGLang raises
        answer = {"failed": traceback.format_exc()}
    Path(order["reply"].format(torch.distributed.get_rank())).write_text(json.dumps(answer), "utf-8")


class Probe:
    """What the engine's process can ask for. One in each rank."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def begin_recording(self, names: Sequence[str], sequences: Sequence[Sequence[int]]) -> list[str]:
        """Record from now on at the modules that have `names`; returns the names of those that exist.

        `sequences`: token ids of prompt and response by number; what a prompt alone is there for is sampled freely.
        """
        self._recorder = _SGLangRecorder(self.model, sequences)
        return self._recorder.hook(names)

    def end_recording(self, path: str) -> int:
        """Write the steps to `path` with the rank in place of `{}`; returns their number."""
        self._recorder.close()
        torch.save(self._recorder.steps, path.format(torch.distributed.get_rank()))
        return len(self._recorder.steps)

    def compare_with_disk(self, directory: str) -> tuple[int, dict[str, str]]:
        """The number of the model's tensors, and their differences to a model that SGLang loads from `directory`."""
        arguments = get_server_args()
        config = ModelConfig.from_server_args(arguments, model_path=directory)
        device = next(self.model.parameters()).device
        with own_rotary_tables(), torch.no_grad():
            fresh = get_model(
                model_config=config, load_config=LoadConfig(), device_config=DeviceConfig(device.type, device.index)
            )
        live = _tensors(self.model)
        return len(live), _differences(live, _tensors(fresh))


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _differences(live: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor]) -> dict[str, str]:
    found = dict.fromkeys(live.keys() - fresh.keys(), "is not there after a load from disk")
    found |= dict.fromkeys(fresh.keys() - live.keys(), "is not there")
    for name in sorted(live.keys() & fresh.keys()):
        own, other = live[name].detach(), fresh[name].detach()
        if "rotary" in name and own.shape[1:] == other.shape[1:]:  # SGLang adds rows for long requests after the load
            own, other = (each[: min(len(own), len(other))] for each in (own, other))
        if (own.dtype, own.shape) != (other.dtype, other.shape):
            found[name] = f"is {own.dtype} {[*own.shape]}, not {other.dtype} {[*other.shape]}"
        elif wrong := int((own.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).sum()):
            found[name] = f"{wrong} of {own.nbytes} bytes differ"
    return found


class _SGLangRecorder(Recorder):
    def hook(self, names: Sequence[str]) -> list[str]:
        model: Any = self._model
        path, _ = decoder_layers(model)
        inner = model.get_submodule(path.rpartition(".")[0])  # SGLang calls the outer one's `forward` by itself
        self._add(inner.register_forward_pre_hook(self._step_begins, with_kwargs=True))
        kernels = [(name, module) for name, module in model.named_modules() if isinstance(module, RadixAttention)]
        found = self.hook_modules(names, kernels)
        self._add(model.logits_processor.register_forward_hook(self._scored))
        self._replace_of_class(Sampler, "forward", self._sample(Sampler.forward))
        return found

    def _replace_of_class(self, owner: type, name: str, function: Any) -> None:
        before = vars(owner)[name]
        setattr(owner, name, function)
        self._undo.append(lambda: setattr(owner, name, before))

    def states_before(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
        return self._whole(name, super().states_before(name, arguments, options), arguments, options)

    def states_after(
        self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], returned: Any
    ) -> list[torch.Tensor]:
        return self._whole(name, super().states_after(name, arguments, options, returned), arguments, options)

    def _whole(
        self, name: str, states: list[torch.Tensor], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Of a layer, with what SGLang keeps apart in the batch and adds in the next layer. Of a norm of queries or
        keys, whose rows are heads, the heads of a token in one row."""
        batch = _batch_in(arguments, options)
        if is_block(name) and batch is not None and batch.residual_stream is not None and len(states) == 1:
            return [residual_batch.snapshot(states[0], batch)]
        count = len(self.steps[-1]["rows"])
        heads = name.endswith(("q_norm", "k_norm")) and all(len(each) % count == 0 for each in states)
        return [each.reshape(count, -1) for each in states] if heads else states

    def _step_begins(self, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        batch = _batch_in(arguments, options)
        assert batch is not None and batch.rids is not None, f"{type(model).__name__} is called without a batch"
        lengths = [int(length) for length in batch.seq_lens]
        counts = [1] * len(lengths) if batch.forward_mode.is_decode() else batch.extend_seq_lens_cpu
        rows = [
            (sequence_of(request), length - count + offset)
            for request, length, count in zip(batch.rids, lengths, counts, strict=True)
            for offset in range(count)
        ]
        self.begin(rows, arguments, options)

    def _scored(self, module: Any, arguments: tuple[Any, ...], returned: Any) -> None:
        self.scores(returned.next_token_logits)

    def _sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(sampler: Any, output: Any, sampling: Any, *arguments: Any, **options: Any) -> Any:
            """SGLang's own record of what it samples from, of all rows."""
            everything = torch.arange(len(output.next_token_logits), device=output.next_token_logits.device)
            sampling.sampling_mask_batch_indices = everything
            sampling.sampling_support_logprobs_capture_indices = everything
            tokens = original(sampler, output, sampling, *arguments, **options)
            kept, output.sampling_mask_output = output.sampling_mask_output, None
            sampling.sampling_mask_batch_indices = sampling.sampling_support_logprobs_capture_indices = None
            log_probs = torch.full(output.next_token_logits.shape, -torch.inf)
            for row, count in enumerate(kept.lengths.tolist()):
                log_probs[row, kept.token_ids[row, :count].long().cpu()] = kept.support_logprobs[row, :count].cpu()
            self.sampled(tokens, log_probs)
            return tokens

        return sample


def _batch_in(arguments: tuple[Any, ...], options: dict[str, Any]) -> ForwardBatch | None:
    return next((each for each in (*arguments, *options.values()) if isinstance(each, ForwardBatch)), None)
