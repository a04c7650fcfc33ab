"""What live vLLM models compute with, against models that vLLM loaded from disk: one process, no engine.

    python -m tests.models.vllm_process DIRECTORY ARCHITECTURE:DTYPE ...

Writes checkpoints of two versions of each architecture below DIRECTORY, unless they are there. Prints one line of JSON
for each cell, when it is done: see `Outcome`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

VERSIONS = (1, 2)
MOST_NAMES = 5


@dataclass
class Outcome:
    """Of one architecture at one dtype."""

    architecture: str
    dtype: str
    num_tensors: int = 0
    """Compared, of one version."""
    whole: bool = False
    """Versions are loaded as from disk, into a second model: vLLM's reload does not reach all of it."""
    kept_wide: list[str] = field(default_factory=list)
    """Tensors of the file that vLLM keeps in float32 at any dtype."""
    different: dict[str, str] = field(default_factory=dict)
    """Tensor, with the version that was to be loaded, to what is different. Empty if all are equal."""
    refused: str | None = None
    """Why our side does not load it."""
    died: str | None = None
    """An error that is none of ours: a defect."""
    not_run: str | None = None
    """Why vLLM does not build or load the checkpoint from disk, in its words."""
    seconds: float = 0.0


def main() -> None:
    import torch

    base = Path(sys.argv[1])
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker on CPU has it
    out = sys.stdout
    for cell in sys.argv[2:]:
        name, _, dtype = cell.partition(":")
        began = time.perf_counter()
        outcome = Outcome(name, dtype)
        directories = {version: _written(base, name, version) for version in VERSIONS}
        try:
            _compare(outcome, directories)
        finally:
            gc.collect()
        outcome.seconds = round(time.perf_counter() - began, 2)
        out.write("\n" + json.dumps(asdict(outcome)) + "\n")
        out.flush()


def _written(base: Path, name: str, version: int) -> Path:
    from tests.models.architectures import ARCHITECTURES, write_checkpoint

    directory = base / f"{name}-{version}"
    if not directory.exists():
        write_checkpoint(ARCHITECTURES[name], directory, seed=version)
    return directory


def file_weights(directory: Path) -> Iterator[tuple[str, Any]]:
    """As a trainer sends them: every tensor of the directory's files under its own name, but those of towers."""
    from tests.models.cases import TOWERS

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if not name.startswith(TOWERS):
                    yield name, opened.get_tensor(name)


def _compare(outcome: Outcome, directories: dict[int, Path]) -> None:
    from verl.checkpoint_engine.engines.vllm.live import differences, live_tensors
    from verl.checkpoint_engine.errors import ActivationError, IntegrityError

    try:
        config = _config(directories[1], outcome.dtype, "dummy")
    except Exception as exc:  # noqa: BLE001 - told
        outcome.not_run = _line(exc)
        return
    with _distributed(config):
        try:
            expected = {version: _model(_config(path, outcome.dtype, "auto")) for version, path in directories.items()}
        except Exception as exc:  # noqa: BLE001 - told
            outcome.not_run = _line(exc)
            return
        live = _model(config)
        engine = _engine(config, live)
        outcome.kept_wide = _kept_wide(engine, directories[1])
        for version, path in directories.items():
            try:
                engine.load(lambda path=path: file_weights(path), version)
            except (ActivationError, IntegrityError) as exc:
                outcome.refused = _line(exc)
                return
            except Exception as exc:  # noqa: BLE001 - told
                outcome.died = _line(exc)
                return
            wanted = live_tensors(expected[version])
            found = differences(live_tensors(live), wanted)
            outcome.different |= {
                f"{name} (version {version})": text for name, text in list(found.items())[:MOST_NAMES]
            }
            outcome.num_tensors = len(wanted)
        outcome.whole = bool(engine._why_whole)


def _config(directory: Path, dtype: str, load_format: str) -> Any:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from verl.checkpoint_engine.parameter_server.endpoints import ENGINE_NAME

    return EngineArgs(
        model=str(directory),
        dtype=dtype,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        language_model_only=_is_wrapper(directory),
        weight_transfer_config=WeightTransferConfig(backend=ENGINE_NAME),
    ).create_engine_config()


def _is_wrapper(directory: Path) -> bool:
    from tests.models.configurations import WRAPPERS

    return json.loads((directory / "config.json").read_text())["model_type"] in WRAPPERS


def _model(config: Any) -> Any:
    """Built beside others of this process: with layers of its own in the configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    from verl.checkpoint_engine.compat.vllm import own_rotary_tables
    from verl.checkpoint_engine.engines.vllm.build import filled_memory

    with set_current_vllm_config(config), own_rotary_tables(), filled_memory():
        return get_model(vllm_config=config)


def _engine(config: Any, model: Any) -> Any:
    import torch
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from verl.checkpoint_engine.engines.vllm import plugin as vllm_plugin

    vllm_plugin.register()
    return WeightTransferEngineFactory.create_engine(config.weight_transfer_config, config, torch.device("cpu"), model)


def _kept_wide(engine: Any, directory: Path) -> list[str]:
    """Asked for as a server does."""
    from verl.checkpoint_engine.engines.vllm.receiver import ArenaInitInfo
    from verl.checkpoint_engine.engines.vllm.reports import take_workers

    reports = directory / "reports"
    reports.mkdir(exist_ok=True)
    engine.init_transfer_engine(ArenaInitInfo(report_directory=str(reports)))
    return list(take_workers(reports).kept_wide)


@contextlib.contextmanager
def _distributed(config: Any) -> Iterator[None]:
    """Groups of one rank, made for each configuration: that of experts depends on it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state as state

    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(config):
        state.init_distributed_environment(1, 0, f"file://{directory}/store", 0, backend="gloo")
        state.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            state.destroy_model_parallel()
            state.destroy_distributed_environment()


def _line(exc: Exception) -> str:
    said = " ".join(str(exc).split()).partition(": {'")[0]  # a set of names follows, in another order each time
    return f"{type(exc).__name__}: {said}"[:600]


if __name__ == "__main__":
    main()
