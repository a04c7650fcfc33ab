"""The command-line options of `verl.checkpoint_engine.update`, and their checks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..support import envs
from ..support.files import why_not_written
from ..support.package import PACKAGE
from .endpoints import PAUSE_MODES, Endpoint

AFTER_ANOTHER = "--after-another"
METHODS = ("broadcast", "p2p", "all")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options of the command line."""

    checkpoint_path: Path | None
    endpoints: tuple[str, ...]
    methods: tuple[str, ...]
    """The methods of the updates to make, in order: `broadcast`, `p2p`."""
    parallel_size: int
    save_metas_file: Path | None
    load_metas_file: Path | None
    weight_version: str | None
    pause_mode: str
    hold_s: float | None
    skip_model_check: bool
    timeout_s: float
    after_another: bool
    """Whether this command repeats a killed one. It is not repeated itself."""
    rank: int
    world_size: int

    @property
    def num_workers(self) -> int:
        """The number of workers of all engines. Each rank below it feeds one."""
        return len(self.endpoints) * self.parallel_size

    def again(self, version: str) -> list[str]:
        """The command with which a rescue repeats a killed update from another job's weights, for the engine that this
        rank feeds. Empty if the ranks that feed it are not all on this host."""
        number, per_host = self.rank // self.parallel_size, envs.local_world_size() or 1
        hosts = {rank // per_host for rank in range(number * self.parallel_size, (number + 1) * self.parallel_size)}
        if self.load_metas_file is None or self.after_another or len(hosts) != 1:
            return []
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.parallel_size}", "-m"]
        return [
            *(sys.executable, "-m", *(launcher if self.parallel_size > 1 else ()), f"{PACKAGE}.update"),
            *("--load-metas-file", str(self.load_metas_file.resolve()), "--endpoint", self.endpoints[number]),
            *("--inference-parallel-size", str(self.parallel_size), "--weight-version", version),
            *("--pause-mode", self.pause_mode, "--timeout-s", str(self.timeout_s), AFTER_ANOTHER),
            *(["--skip-model-check"] if self.skip_model_check else ()),
        ]


def parse(arguments: Sequence[str] | None, description: str | None, program: str) -> Options:
    """Parse and check. `program`: the name in the help. Raises ConfigError for bad values, SystemExit on bad syntax."""
    parser = _parser(description, program)
    given = vars(parser.parse_args(arguments))
    try:
        rank, world_size = envs.rank() or 0, envs.world_size() or 1
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    method = given.pop("update_method") or ("p2p" if given["load_metas_file"] else "broadcast")
    options = Options(
        endpoints=tuple(given.pop("endpoint")),
        methods=("broadcast", "p2p") if method == "all" else (method,),
        parallel_size=given.pop("inference_parallel_size"),
        hold_s=given.pop("hold_seconds"),
        rank=rank,
        world_size=world_size,
        **given,
    )
    _check(options)
    return options


def _check(options: Options) -> None:
    if (options.checkpoint_path is None) == (options.load_metas_file is None):
        raise ConfigError("give either --checkpoint-path, or --load-metas-file of a job that holds a checkpoint")
    if not options.endpoints and options.save_metas_file is None:
        raise ConfigError("give --endpoint, the URL of an engine to update, or --save-metas-file to hold for others")
    if options.load_metas_file is not None and options.save_metas_file is not None:
        raise ConfigError(
            "--save-metas-file needs weights held by this job; with --load-metas-file another job holds them"
        )
    if options.save_metas_file is None and options.hold_s is not None:
        raise ConfigError("--hold-seconds is how long a job with --save-metas-file stays: give both")
    written = options.save_metas_file if options.rank == 0 else None
    if written is not None and (why := why_not_written(written)):
        raise ConfigError(f"metas cannot be written to {written}: {why}")
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
            f"{len(options.endpoints)} endpoints of --inference-parallel-size {options.parallel_size} need "
            f"{options.num_workers} ranks, not {options.world_size}: torchrun --nproc-per-node {options.num_workers} "
            f"-m {PACKAGE}.update ..." + (", or --update-method p2p" if many else "")
        )
    for url in options.endpoints:
        Endpoint(url, timeout_s=options.timeout_s)


def _parser(description: str | None, program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
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
    target.add_argument("--weight-version", metavar="V", help="the version that engines report (default: DIR's name)")
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
        help="broadcast: every rank sends its part to all (default); p2p: the engines' ranks pull the weights from the "
        "ranks that have them (always with --load-metas-file); all: broadcast, then p2p",
    )
    how.add_argument(
        "--save-metas-file",
        type=Path,
        metavar="F",
        help="then stay, with the weights in host memory, for jobs with --load-metas-file F",
    )
    how.add_argument("--hold-seconds", type=float, metavar="S", help="how long to stay (default: until Ctrl-C)")
    how.add_argument(
        "--skip-model-check", action="store_true", help="do not compare names and shapes with the engines' models"
    )
    how.add_argument(AFTER_ANOTHER, action="store_true", help=argparse.SUPPRESS)
    how.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="for each update and each request (default 600)"
    )
    return parser
