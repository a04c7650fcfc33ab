"""vLLM's models of many architectures, in one process without an engine: what a sync leaves beside a load from disk.

    python -m tests.models.vllm_process DIRECTORY NAME ...

Writes checkpoints below DIRECTORY. Prints one line of JSON for each architecture: what is wrong with it, by dtype.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.models.architectures import ARCHITECTURES, write_checkpoint

DTYPES = ("float32", "bfloat16")
FIRST, SECOND = 0, 1
"""Seeds of the two versions."""


def main() -> None:
    base, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:  # before vLLM changes the classes of transformers
        for dtype in DTYPES:
            for seed in (FIRST, SECOND):
                directory = base / name / dtype / str(seed)
                write_checkpoint(ARCHITECTURES[name], directory, seed=seed, dtype=getattr(torch, dtype))
    for name in names:
        found = {dtype: problem(base / name / dtype, dtype) for dtype in DTYPES}
        sys.stdout.write("\n" + json.dumps({"name": name} | found) + "\n")
        sys.stdout.flush()


def problem(directory: Path, dtype: str) -> str | None:
    """What a model that started from dummy weights has that one loaded from disk has not; None if nothing."""
    try:
        model, config = build(directory / str(FIRST), dtype, "dummy")
    except Exception as exc:  # noqa: BLE001 - whatever vLLM raises, it says that it cannot run the model
        return f"vLLM cannot build it: {_line(exc)}"
    disk = {}
    try:
        for seed in (FIRST, SECOND):
            disk[seed] = build(directory / str(seed), dtype, "auto")[0]
    except Exception as exc:  # noqa: BLE001
        return f"vLLM cannot load it from disk: {_line(exc)}"
    from verl.checkpoint_engine.receivers.vllm_live import differences, live_tensors

    engine = transfer_engine(model, config)
    for version, seed in enumerate((FIRST, SECOND, SECOND, FIRST)):
        try:
            engine.load(lambda seed=seed: weights(directory / str(seed)), version)
        except Exception as exc:  # noqa: BLE001
            return f"version {version} is refused: {_line(exc)}"
        if wrong := differences(live_tensors(model), live_tensors(disk[seed])):
            return f"version {version}: {len(wrong)} tensors differ: {dict(list(wrong.items())[:3])}"
    return None


def build(directory: Path, dtype: str, load_format: str) -> tuple[Any, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    from verl.checkpoint_engine.receivers.vllm_build import own_tables

    _set_torch_accelerator_to_noop()
    config = EngineArgs(
        model=str(directory),
        dtype=dtype,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
    ).create_engine_config()
    with set_current_vllm_config(config), own_tables():
        if not model_parallel_is_initialized():
            store = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as the process
            init_distributed_environment(1, 0, f"file://{store.name}", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config), config


def transfer_engine(model: Any, config: Any) -> Any:
    from vllm.config import WeightTransferConfig

    from verl.checkpoint_engine.receivers.vllm_engine import ArenaInitInfo, ArenaWeightTransferEngine
    from verl.checkpoint_engine.receivers.vllm_plugin import ENGINE_NAME

    engine = ArenaWeightTransferEngine(WeightTransferConfig(backend=ENGINE_NAME), config, torch.device("cpu"), model)
    engine.init_transfer_engine(ArenaInitInfo(check_engine="always"))
    return engine


def weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(directory.glob("*.safetensors")):
        yield from load_file(file).items()


def _line(exc: Exception) -> str:
    return f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"


if __name__ == "__main__":
    main()
