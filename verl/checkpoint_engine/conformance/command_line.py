"""The options of `certify` for a server, and that server: one that runs, or one that is started for the run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import BackendUnavailable, ConfigError
from ..memory.janitor import scratch_directory
from ..parameter_server.checkpoint_directory import checkpoint_files
from ..parameter_server.safetensors_files import read_checkpoint
from ..support.console import say

ROUTES = "arena, disk; vLLM: update, checkpoint_engine, lora; SGLang: tensor, distributed"
ROUTE = "arena"
"""Of a server that is started."""


def add_options(parser: argparse.ArgumentParser) -> None:
    served = parser.add_argument_group("a server")
    served.add_argument("--server", metavar="URL", help="certify this server of vLLM or SGLang")
    served.add_argument(
        "--engine",
        choices=("vllm", "sglang"),
        help="start such a server on a free port of this host, certify and end it; without --server and --engine, an "
        "engine in this process is compared tensor by tensor",
    )
    served.add_argument(
        "flags", nargs="*", metavar="-- FLAG", help="more flags for the server of --engine, after two dashes"
    )
    served.add_argument(
        "--route",
        metavar="R",
        help=f"how versions reach it (default of --engine: arena): {ROUTES}",
    )
    served.add_argument(
        "--pause-mode",
        choices=("wait", "abort", "keep"),
        help="of requests in flight (default wait; --engine sglang: abort)",
    )
    served.add_argument(
        "--level",
        choices=("quick", "full"),
        help="quick (default): four updates with requests in flight; full: then one after each level of sleep, while "
        "clients leave, in each other pause mode, and with an adapter on top, as far as the server has them",
    )
    served.add_argument("--timeout-seconds", type=float, default=300.0, metavar="S", help="of each call (default 300)")
    served.add_argument(
        "--faults",
        nargs="*",
        metavar="NAME",
        help="have updates fail, by these faults or by all, in every phase: does the server keep the contract",
    )
    served.add_argument(
        "--deadline-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="of --faults: in which an update ends, and the server then serves or refuses (default 20)",
    )
    served.add_argument(
        "--worker-pid",
        type=int,
        metavar="PID",
        help="of --faults: stop and, at the end, kill this process of the server, which you then restart",
    )
    served.add_argument("--html", type=Path, metavar="FILE", help="write a report for people there")
    served.add_argument("--junit", type=Path, metavar="FILE", help="write a report for CI there")


def certify_server(options: argparse.Namespace) -> int:
    """Certify the server of --server, or one that --engine has it start. Returns the exit code. Raises
    CheckpointEngineError, OSError."""
    from .command import SKIPPED, Options, main
    from .routes import require_route

    _check_server(options)
    model = options.model.expanduser().absolute()
    read_checkpoint(checkpoint_files(model))
    if options.engine is not None:
        try:
            require_route(options.route or ROUTE)
        except BackendUnavailable as exc:
            say(f"skipped: {exc}")
            return SKIPPED
    with scratch_directory() as scratch, _served(options, model, scratch) as url:
        asked = Options(
            server=url,
            model=model,
            route=options.route or ROUTE,
            dtype=options.dtype,
            pause_mode=options.pause_mode or ("abort" if options.engine == "sglang" else "wait"),
            level=options.level or "quick",
            timeout_s=options.timeout_seconds,
            faults=options.faults,
            deadline_s=options.deadline_seconds,
            worker_pid=options.worker_pid,
            is_ours=options.engine is not None,
        )
        return main(asked, scratch, html=options.html, junit=options.junit, answer=options.json)


def _check_server(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not belong together."""
    if options.server is not None and options.engine is not None:
        raise ConfigError("--server URL is a server that runs, --engine starts one: name one of them")
    if options.engine is None and options.route is None:
        raise ConfigError(f"--server needs --route R: {ROUTES}")
    if options.engine is None and options.flags:
        raise ConfigError(f"{' '.join(options.flags)}: flags after -- are of a server that --engine starts")
    if options.timeout_seconds <= 0:
        raise ConfigError(f"--timeout-seconds must be more than 0, not {options.timeout_seconds:g}")
    if options.deadline_seconds <= 0:
        raise ConfigError(f"--deadline-seconds must be more than 0, not {options.deadline_seconds:g}")
    if options.backend != "naive" or (options.tensor_parallel_size != 1 and options.engine is None):
        raise ConfigError("--tensor-parallel-size and --backend are of an engine that certify starts, not of --server")
    if options.worker_pid is not None and (options.faults is None or options.engine is not None):
        raise ConfigError("--worker-pid is of --faults, and of a server that you have started")


@contextmanager
def _served(options: argparse.Namespace, model: Path, scratch: Path) -> Iterator[str]:
    """The URL of the server. Raises CheckpointEngineError."""
    if options.engine is None:
        yield options.server
        return
    from .started import arguments, started

    given = arguments(
        options.engine,
        model,
        route=options.route or ROUTE,
        dtype=options.dtype,
        ranks=options.tensor_parallel_size,
        on_top=options.level == "full",
        more=options.flags,
    )
    with started(options.engine, given, scratch / "server.log", timeout_s=options.timeout_seconds) as url:
        yield url
