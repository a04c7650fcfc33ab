"""A vLLM model with a packed copy of a weight that its loader does not refresh, and what the check says about it.

    python -m tests.checkpoint_engine.check_process MODEL [QUANTIZABLE]

The second one's weights are quantized as they are loaded. No engine.
Prints a list of JSON records, one for each activation that was tried: see `Tried`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORGETFUL = "ForgetfulLlamaForCausalLM"
PLAIN = {"dtype": "float32"}
QUANTIZED = {"dtype": "bfloat16", "quantization": "fp8_per_block"}


@dataclass
class Tried:
    case: str
    version: int
    error: str | None
    message: str
    """Of the error, or what the check found; empty if it did not look."""
    seconds: float = 0.0
    is_stale: bool = False
    """Whether the copy of the norm's weight is another version's, when this one has been loaded."""


def main() -> None:
    import torch

    from tests.models.vllm_process import _distributed, _model

    torch.accelerator.empty_cache = lambda: None
    directory = Path(sys.argv[1])
    register_forgetful()
    plain, forgetful = ({"architectures": [name]} for name in ("LlamaForCausalLM", FORGETFUL))
    tried = []
    config = make_config(directory, plain)
    with _distributed(config):
        for mode in ("first", "always", "off"):
            for kind, overrides in (("plain", plain), ("forgetful", forgetful)):
                config = make_config(directory, overrides)
                tried += activations(f"{kind} {mode}", config, _model(config), mode, directory)
        config = make_config(directory, forgetful)
        tried += forgetful_later(config, _model(config), directory)
        config = make_config(directory, forgetful)
        tried += without_memory("without memory", config, _model(config), directory)
    if len(sys.argv) > 2:
        tried += quantized(Path(sys.argv[2]))
    sys.stdout.write("\n" + json.dumps([asdict(one) for one in tried]))


def register_forgetful() -> None:
    import torch
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class ForgetfulLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
        """Computes with copies of its norm's weight and of a quantized projection's that are made when weights are
        loaded for the first time."""

        refreshes = False
        """Whether it is made again later."""

        def load_weights(self, weights: Any) -> set[str]:
            loaded: set[str] = super().load_weights(weights)
            if self.refreshes or not hasattr(self.model, "packed"):
                self.model.packed = self.model.norm.weight.detach().clone()
                projection = self.model.layers[0].mlp.down_proj.weight
                if projection.dtype == torch.float8_e4m3fn:
                    self.model.projection = projection.detach().clone()
            return loaded

    ModelRegistry.register_model(FORGETFUL, ForgetfulLlamaForCausalLM)


def quantized(directory: Path) -> list[Tried]:
    from tests.models.vllm_process import _distributed, _model

    forgetful = {"architectures": [FORGETFUL]}
    config = make_config(directory, {}, QUANTIZED)
    with _distributed(config):
        tried = activations("float8 first", config, _model(config), "first", directory)
        config = make_config(directory, {}, QUANTIZED)
        tried += without_memory("float8 without memory", config, _model(config), directory)
        for mode in ("first", "always"):
            config = make_config(directory, forgetful, QUANTIZED)
            tried += activations(f"float8 forgetful {mode}", config, _model(config), mode, directory)
    return tried


def make_config(directory: Path, overrides: dict[str, Any], options: Mapping[str, Any] = PLAIN) -> Any:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from verl.checkpoint_engine.parameter_server.endpoints import ENGINE_NAME

    return EngineArgs(
        model=str(directory),
        load_format="auto",
        hf_overrides=overrides,
        skip_tokenizer_init=True,
        enforce_eager=True,
        weight_transfer_config=WeightTransferConfig(backend=ENGINE_NAME),
        **options,
    ).create_engine_config()


def weights_of(directory: Path, version: int) -> Any:
    """Those of the file, and other ones for each later version."""
    from tests.models.vllm_process import file_weights

    return lambda: ((name, tensor + version - 1) for name, tensor in file_weights(directory))


def activations(case: str, config: Any, model: Any, mode: str, directory: Path) -> list[Tried]:
    from tests.models.vllm_process import _engine
    from verl.checkpoint_engine.engines.vllm.receiver import ArenaInitInfo

    engine = _engine(config, model)
    engine.init_transfer_engine(ArenaInitInfo(check_engine=mode))
    return [activate(case, engine, directory, version) for version in (1, 2)]


def activate(case: str, engine: Any, directory: Path, version: int) -> Tried:
    try:
        engine.load(weights_of(directory, version), version)
    except Exception as exc:  # noqa: BLE001 - told
        engine._check.forget()
        return Tried(case, version, type(exc).__name__, str(exc))
    checked, inner = engine.checked, engine.model.model
    is_stale = hasattr(inner, "packed") and bool((inner.packed != inner.norm.weight).any())
    return Tried(case, version, None, checked.found if checked else "", checked.seconds if checked else 0.0, is_stale)


def forgetful_later(config: Any, model: Any, directory: Path) -> list[Tried]:
    """The first activation finds nothing."""
    from tests.models.vllm_process import _engine
    from verl.checkpoint_engine.engines.vllm.receiver import ArenaInitInfo

    engine = _engine(config, model)
    engine.init_transfer_engine(ArenaInitInfo(check_engine="always"))
    model.refreshes = True
    tried = [activate("forgetful later", engine, directory, 1)]
    model.refreshes = False
    return [*tried, activate("forgetful later", engine, directory, 2)]


def without_memory(case: str, config: Any, model: Any, directory: Path) -> list[Tried]:
    """The same, where a second model does not fit."""
    from tests.models.vllm_process import _engine
    from verl.checkpoint_engine.engines.vllm.check import EngineCheck

    engine = _engine(config, model)
    engine._check = EngineCheck("first", config, engine.device, free=lambda device: 1000)
    return [activate(case, engine, directory, 1)]


if __name__ == "__main__":
    main()
