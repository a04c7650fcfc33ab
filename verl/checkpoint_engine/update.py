"""Push a Hugging Face checkpoint directory into running inference engines, without a trainer.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --load-format dummy --weight-transfer-config '{"backend": "verl_arena"}'
    python -m verl.checkpoint_engine.update --checkpoint-path DIR --endpoint http://127.0.0.1:8000

Runs on the hosts of the engines. An engine with several workers, or several engines, need one rank for each worker,
in the order of the endpoints:

    torchrun --nproc-per-node 2 -m verl.checkpoint_engine.update --inference-parallel-size 2 ...
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from verl import envs
from verl.checkpoint_engine.endpoints import PAUSE_MODES, Endpoint
from verl.checkpoint_engine.errors import BackendUnavailable, CheckpointEngineError, ConfigError
from verl.checkpoint_engine.parameter_server.metas import load_metas, save_metas
from verl.checkpoint_engine.parameter_server.records import RankMetas
from verl.checkpoint_engine.parameter_server.safetensors_files import read_checkpoint, split_files
from verl.utils.console import is_live, log_to_console
from verl.utils.signals import sigterm_as_ctrl_c

if TYPE_CHECKING:
    from verl.checkpoint_engine.parameter_server.server import ParameterServer

METHODS = ("broadcast", "p2p", "all")
INDEX = "model.safetensors.index.json"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says, checked."""

    checkpoint_path: Path | None
    endpoints: tuple[str, ...]
    methods: tuple[str, ...]
    """Updates to make, one after the other: `broadcast`, `p2p`."""
    parallel_size: int
    save_metas_file: Path | None
    load_metas_file: Path | None
    weight_version: str | None
    pause_mode: str
    hold_s: float | None
    skip_model_check: bool
    timeout_s: float
    rank: int
    world_size: int

    @property
    def num_workers(self) -> int:
        """Workers of all engines together; ranks below feed one each."""
        return len(self.endpoints) * self.parallel_size


def parse(arguments: Sequence[str] | None) -> Options:
    """Raises ConfigError for what cannot work, SystemExit for what cannot be read."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        rank, world_size = envs.rank() or 0, envs.world_size() or 1
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    method = given.update_method or ("p2p" if given.load_metas_file else "broadcast")
    options = Options(
        checkpoint_path=given.checkpoint_path,
        endpoints=tuple(given.endpoint),
        methods=("broadcast", "p2p") if method == "all" else (method,),
        parallel_size=given.inference_parallel_size,
        save_metas_file=given.save_metas_file,
        load_metas_file=given.load_metas_file,
        weight_version=given.weight_version,
        pause_mode=given.pause_mode,
        hold_s=given.hold_seconds,
        skip_model_check=given.skip_model_check,
        timeout_s=given.timeout_s,
        rank=rank,
        world_size=world_size,
    )
    _check(options)
    return options


def _check(options: Options) -> None:
    if (options.checkpoint_path is None) == (options.load_metas_file is None):
        raise ConfigError("give either --checkpoint-path, or --load-metas-file of a job that holds a checkpoint")
    if not options.endpoints and options.save_metas_file is None:
        raise ConfigError("give --endpoint, the URL of an engine to update, or --save-metas-file to hold for others")
    if options.load_metas_file is not None and options.save_metas_file is not None:
        raise ConfigError("--save-metas-file writes what this job holds; with --load-metas-file another one holds it")
    if options.load_metas_file is not None and options.methods != ("p2p",):
        raise ConfigError("with --load-metas-file the weights are another job's: --update-method must be p2p")
    if options.parallel_size < 1:
        raise ConfigError(f"--inference-parallel-size must be 1 or more, not {options.parallel_size}")
    for flag, value in (("--timeout-s", options.timeout_s), ("--hold-seconds", options.hold_s)):
        if value is not None and not value > 0:
            raise ConfigError(f"{flag} must be positive, not {value}")
    few = options.world_size < options.num_workers
    many = options.world_size > options.num_workers > 0 and "broadcast" in options.methods
    if few or many:
        raise ConfigError(
            f"{len(options.endpoints)} endpoints of --inference-parallel-size {options.parallel_size} are fed by "
            f"{options.num_workers} ranks, not {options.world_size}: torchrun --nproc-per-node {options.num_workers} "
            "-m verl.checkpoint_engine.update ..." + (", or --update-method p2p" if many else "")
        )
    for url in options.endpoints:
        Endpoint(url, timeout_s=options.timeout_s)


def run(options: Options) -> None:
    """One rank's part. Raises CheckpointEngineError; nothing has been moved if a check fails."""
    endpoints = [Endpoint(url, timeout_s=options.timeout_s) for url in options.endpoints]
    name, metas = load_metas(options.load_metas_file) if options.load_metas_file else ("", {})
    files: list[Path] = []
    if options.checkpoint_path is not None:
        files = checkpoint_files(options.checkpoint_path)
        name = options.checkpoint_path.resolve().name
    tensors = tensors_of_metas(metas) if metas else tensors_of_files(files)
    if options.rank == 0:
        for endpoint in endpoints:
            endpoint.check(options.parallel_size, None if options.skip_model_check else tensors)

    from verl.checkpoint_engine.parameter_server.server import ParameterServer  # torch: only when all is well

    with ParameterServer(rank=options.rank, world_size=options.world_size, timeout_s=options.timeout_s) as server:
        if metas:
            server.load_metas(metas)
        else:
            server.register_checkpoint(name, files=split_files(files, options.world_size)[options.rank])
            server.gather_metas(name)
        for method in options.methods if endpoints else ():
            _update(server, name, method, options, endpoints)
            if method == "p2p" and not metas:
                server.gather_metas(name)  # a meeting: ranks that are only read from stay until all have read
        if options.save_metas_file is not None:
            _hold(server, name, options)


def _update(server: ParameterServer, name: str, method: str, options: Options, endpoints: Sequence[Endpoint]) -> None:
    version = options.weight_version or name

    def request(sockets: list[tuple[str, str]]) -> None:
        """On every feeding rank. The first of those that feed an engine speaks for them."""
        number, worker = divmod(options.rank, options.parallel_size)
        if worker == 0:
            own = sockets[number * options.parallel_size : (number + 1) * options.parallel_size]
            endpoints[number].update(dict(own), version, pause_mode=options.pause_mode)

    with _bar(f"updating {len(endpoints)} engines", shown=options.rank == 0):
        receivers = list(range(options.num_workers)) if method == "p2p" else None
        report = server.update(name, request, receivers)
    if report is not None and options.rank == 0:
        _say(
            f"{name}: {report.nbytes / 1e9:.3f} GB in {report.seconds:.2f} s, {report.gbytes_per_s:.2f} GB/s "
            f"({report.mode}, {report.buckets} buckets); version {version!r} is served by "
            + ", ".join(endpoint.url for endpoint in endpoints)
        )


def _hold(server: ParameterServer, name: str, options: Options) -> None:
    """Stay, for jobs with `--load-metas-file` to read from this one's memory, until Ctrl-C or `--hold-seconds`."""
    assert options.save_metas_file is not None  # the caller has looked
    if not all(metas.p2p_address for metas in server.get_metas().values() if metas.buffers):
        raise BackendUnavailable("--save-metas-file needs the package 'mooncake': pip install 'verl-sync[kimi]'")
    if options.rank == 0:
        save_metas(options.save_metas_file, name, server.get_metas())
        until = f"for {options.hold_s:g} s" if options.hold_s else "until Ctrl-C"
        _say(f"{name} is held for others {until}; metas are in {options.save_metas_file}")
    try:
        threading.Event().wait(options.hold_s)
    except KeyboardInterrupt:  # how this is meant to end
        if options.rank == 0:
            _say(f"{name} is not held any longer")
    finally:
        if options.rank == 0:
            options.save_metas_file.unlink(missing_ok=True)  # nobody can use it any more


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face checkpoint: those that its index names, else all. Raises ConfigError."""
    index = directory / INDEX
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            what = "has no *.safetensors files" if directory.is_dir() else "is not a directory"
            raise ConfigError(f"--checkpoint-path {directory} {what}")
        return files
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=dict[str, object])["weight_map"]
        of_tensor = msgspec.convert(weight_map, dict[str, str])
    except (msgspec.MsgspecError, KeyError) as exc:
        raise ConfigError(f"{index} is not the index of a checkpoint: {exc}") from exc
    files = [directory / file for file in sorted(set(of_tensor.values()))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} of the {len(files)} files in {INDEX}: {', '.join(missing)}"
        )
    absent = sorted(of_tensor.keys() - {tensor.name for tensor in read_checkpoint(files)})
    if absent:
        raise ConfigError(f"{directory} lacks {len(absent)} of the tensors in {INDEX}: {', '.join(absent)}")
    return files


def tensors_of_files(files: Sequence[Path]) -> Tensors:
    """Raises ConfigError for files that cannot be loaded."""
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in read_checkpoint(files)}


def tensors_of_metas(metas: Mapping[int, RankMetas]) -> Tensors:
    packed = (tensor for rank in metas.values() for buffer in rank.buffers for tensor in buffer.tensors)
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in packed}


@contextmanager
def _bar(what: str, *, shown: bool) -> Iterator[None]:
    """On a terminal: that something moves, and for how long."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not shown or not is_live(console):
        yield
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        bar.add_task(what, total=None)
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.checkpoint_engine.update",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_argument_group("the weights, one of")
    source.add_argument(
        "--checkpoint-path", type=Path, metavar="DIR", help="a Hugging Face checkpoint directory with safetensors files"
    )
    source.add_argument(
        "--load-metas-file", type=Path, metavar="F", help="pull them from a job that runs with --save-metas-file F"
    )
    target = parser.add_argument_group("the engines")
    target.add_argument(
        "--endpoint",
        nargs="+",
        default=[],
        metavar="URL",
        help="vLLM servers started with VLLM_SERVER_DEV_MODE=1 and our weight-transfer backend, as above",
    )
    target.add_argument(
        "--inference-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="workers of each engine: tensor- times pipeline-parallel size (default 1)",
    )
    target.add_argument("--weight-version", metavar="V", help="what the engines shall call them (default: DIR's name)")
    target.add_argument(
        "--pause-mode",
        choices=PAUSE_MODES,
        default="wait",
        help="requests in flight are ended, waited for, or frozen and continued with the new weights (default wait)",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--update-method",
        choices=METHODS,
        help="broadcast: ranks send what they hold to all (default); p2p: the engines' ranks pull from those that hold "
        "the weights (with --load-metas-file always); all: first the one, then the other",
    )
    how.add_argument(
        "--save-metas-file",
        type=Path,
        metavar="F",
        help="then stay, with the weights in host memory, for jobs with --load-metas-file F",
    )
    how.add_argument("--hold-seconds", type=float, metavar="S", help="how long to stay (default: until Ctrl-C)")
    how.add_argument(
        "--skip-model-check", action="store_true", help="do not have engines hold names and shapes against their model"
    )
    how.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="for each update and each request (default 600)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. What happened is said on stderr."""
    try:
        run(parse(arguments))
    except CheckpointEngineError as exc:
        _say(f"error: {exc}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    log_to_console()
    sigterm_as_ctrl_c()
    sys.exit(main())
