r"""Push a Hugging Face checkpoint directory into running inference engines, without a trainer.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --load-format dummy \
        --gpu-memory-utilization 0.5 --weight-transfer-config '{"backend": "verl_arena"}'
    python -m verl.checkpoint_engine.update --checkpoint-path DIR --endpoint http://127.0.0.1:8000

Run it on the hosts of the engines. An engine with several workers, or several engines, need one rank for each worker,
in the order of the endpoints:

    torchrun --nproc-per-node 2 -m verl.checkpoint_engine.update --inference-parallel-size 2 ...
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BackendUnavailable, CheckpointEngineError
from .parameter_server.checkpoint_directory import State, checkpoint_files, states_of
from .parameter_server.endpoints import Endpoint
from .parameter_server.metas import load_metas, save_metas
from .parameter_server.records import RankMetas
from .parameter_server.safetensors_files import read_checkpoint, split_files
from .parameter_server.update_options import Options, parse
from .support.console import is_live, log_to_console, say
from .support.package import PACKAGE, extra
from .support.signals import end_when_told

if TYPE_CHECKING:
    from .parameter_server.server import ParameterServer

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
PAUSED = (
    "an engine that had begun to load reads the files again, or pulls again: a process that stays behind sees to it. "
    "With --load-metas-file, one whose ranks are on several hosts stays paused until an update succeeds"
)

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the command line names, read."""

    endpoints: list[Endpoint]
    name: str
    metas: Mapping[int, RankMetas]
    files: list[Path]
    states: dict[str, State]
    tensors: Tensors


def read(options: Options) -> Given:
    """Raises ConfigError for what is not there or cannot be read. Asks no server."""
    endpoints = [Endpoint(url, timeout_s=options.timeout_s) for url in options.endpoints]
    name, metas = load_metas(options.load_metas_file) if options.load_metas_file else ("", {})
    files: list[Path] = []
    states: dict[str, State] = {}
    if options.checkpoint_path is not None:
        files = checkpoint_files(options.checkpoint_path)
        states = states_of(files)
        name = options.checkpoint_path.resolve().name
    tensors = tensors_of_metas(metas) if metas else tensors_of_files(files)
    return Given(endpoints=endpoints, name=name, metas=metas, files=files, states=states, tensors=tensors)


def run(options: Options, given: Given) -> None:
    """Run one rank's part. Raises CheckpointEngineError; if a check fails, no byte has been moved."""
    endpoints, name, metas, files = given.endpoints, given.name, given.metas, given.files
    if options.rank == 0:
        for endpoint in endpoints:
            endpoint.check(options.parallel_size, None if options.skip_model_check else given.tensors)

    from .parameter_server.server import ParameterServer  # torch: only when all is well

    with ParameterServer(rank=options.rank, world_size=options.world_size, timeout_s=options.timeout_s) as server:
        if metas:
            server.load_metas(metas)
        else:
            server.register_checkpoint(name, files=split_files(files, options.world_size)[options.rank])
            server.gather_metas(name)
        for method in options.methods if endpoints else ():
            _update(server, name, method, options, endpoints, given.states)
            if method == "p2p" and not metas:
                server.gather_metas(name)  # a meeting: ranks that are only read from stay until all have read
        if options.save_metas_file is not None:
            _hold(server, name, options)


def _update(
    server: ParameterServer,
    name: str,
    method: str,
    options: Options,
    endpoints: Sequence[Endpoint],
    states: Mapping[str, State],
) -> None:
    version = options.weight_version or name

    def request(sockets: list[tuple[str, str]]) -> None:
        """On every feeding rank. The first of those that feed an engine speaks for them."""
        number, worker = divmod(options.rank, options.parallel_size)
        if worker == 0:
            own = sockets[number * options.parallel_size : (number + 1) * options.parallel_size]
            paths, again = dict(own), options.again(version)
            endpoints[number].update(paths, version, pause_mode=options.pause_mode, files=states, again=again)

    def num_loaded() -> int:
        return sum(event.kind == "load-end" for event in server.events)

    receivers = list(range(options.num_workers)) if method == "p2p" else None
    try:
        with _bar(f"updating engines by {method}", num_loaded, shown=options.rank == 0):
            report = server.update(name, request, receivers)
    except CheckpointEngineError:
        if options.rank == 0:
            say(PAUSED)
        raise
    if report is not None and options.rank == 0:
        say(
            f"{name}: {report.nbytes / 1e9:.3g} GB in {report.seconds:.2f} s, {report.gbytes_per_s:.3g} GB/s "
            f"({report.mode}, {report.buckets} buckets); version {version!r} is served by "
            + ", ".join(endpoint.url for endpoint in endpoints)
        )


def _hold(server: ParameterServer, name: str, options: Options) -> None:
    """Stay, for jobs with `--load-metas-file` to read from this one's memory, until Ctrl-C or `--hold-seconds`."""
    assert options.save_metas_file is not None  # the caller has looked
    if not all(metas.p2p_address for metas in server.get_metas().values() if metas.buffers):
        raise BackendUnavailable(f"--save-metas-file needs the package 'mooncake': {extra('kimi')}")
    if options.rank == 0:
        save_metas(options.save_metas_file, name, server.get_metas())
        until = f"for {options.hold_s:g} s" if options.hold_s else "until Ctrl-C"
        say(f"{name} is held for others {until}; metas are in {options.save_metas_file}")
    try:
        threading.Event().wait(options.hold_s)
    except KeyboardInterrupt:  # how this is meant to end
        if options.rank == 0:
            say(f"{name} is not held any longer")
    finally:
        if options.rank == 0:
            options.save_metas_file.unlink(missing_ok=True)  # nobody can use it any more


def tensors_of_files(files: Sequence[Path]) -> Tensors:
    """(dtype, shape) of each tensor in `files`, by name. Raises ConfigError if a file cannot be loaded."""
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in read_checkpoint(files)}


def tensors_of_metas(metas: Mapping[int, RankMetas]) -> Tensors:
    packed = (tensor for rank in metas.values() for buffer in rank.buffers for tensor in buffer.tensors)
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in packed}


@contextmanager
def _bar(what: str, num_loaded: Callable[[], int], *, shown: bool) -> Iterator[None]:
    """On a terminal: that something moves, how much of it has arrived, and for how long."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class Loaded(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{num_loaded()} buckets loaded")

    console = Console(stderr=True)
    if not shown or not is_live(console):
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), Loaded(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(what, total=None)
        yield


FAILURE, USAGE_ERROR = 1, 2
PROGRAM = f"python -m {PACKAGE}.update"


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run and return the exit code, 2 for what the command line says wrongly; report on stderr. `program`: the name in
    the help."""
    code = USAGE_ERROR
    try:
        options = parse(arguments, __doc__, program)
        given = read(options)
        code = FAILURE
        run(options, given)
    except CheckpointEngineError as exc:
        say(f"error: {exc}")
        return code
    except KeyboardInterrupt:
        say(f"interrupted; {PAUSED}")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    log_to_console()
    end_when_told()
    sys.exit(main())
