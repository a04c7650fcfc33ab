"""What certify asks of the workers of a vLLM engine."""

from __future__ import annotations

from typing import Any

import torch
import xxhash

from verl.checkpoint_engine.receivers.vllm_live import Packed, as_integers, live_tensors


class LiveDigests:
    """vLLM mixes it into every worker: `worker_extension_cls`."""

    model_runner: Any

    @torch.inference_mode()
    def live_digests(self) -> dict[str, str]:
        """Name to dtype, shape and digest of the bits, for every tensor that this rank's model computes with."""
        digests = {}
        for name, tensor in live_tensors(self.model_runner.get_model()).items():
            values = tensor.read() if isinstance(tensor, Packed) else tensor
            kind = f"{values.dtype} {list(values.shape)}"
            if not values.is_meta:
                kind += f" {xxhash.xxh3_64_hexdigest(as_integers(values).cpu().numpy().data)}"
            digests[name] = kind
        return digests
