"""The command line of `verl-sync plan`."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.planning.hardware import UNKNOWN, read_hardware
from verl.planning.job import STRATEGIES, Fabric, Hosts, Job, bytes_per_s, fraction_of, hosts_of
from verl.planning.request import Request
from verl.planning.simulation import Workload
from verl.utils.config import ConfigError

T = TypeVar("T")

BACKENDS = ("naive", "tcp", "gloo", "nccl", "nixl", "mooncake", "kimi_ckpt_engine")
TOPOLOGIES = ("direct", "broadcast", "chain", "tree", "p2p_broadcast")
DESCRIPTION = """\
Says what syncs of a model would move, how long they would take and what memory
they need, before a cluster is there. Bytes are exact: the plan and the
topologies are those of a run. Seconds lie between two bounds, which are closer
where the doctor has measured the hosts.
"""
EPILOG = """\
exit code: 0 planned; 1 something does not fit into the memory that there is;
2 the command line, or the model

  verl-sync plan config.json --trainers 2x8 --rollouts 4x8 --link 8x400gbit
  verl-sync plan DIR --strategy megatron --tp 4 --pp 8 --ep 8 --trainers 32x8
  verl-sync doctor --json > hosts.json
  verl-sync plan DIR --hardware hosts.json --delta 1% --json
"""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Millions of objects stay until a plan is printed: searches for garbage among them only cost."""
    was_enabled = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)  # the search at exit takes a second, and all memory goes with the process
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        request = _request(options)
        hardware = read_hardware(request.hardware_path) if request.hardware_path else UNKNOWN
        hardware = replace(hardware, threads=_threads(request.cores))
        if request.host_nbytes is not None:
            hardware = replace(hardware, host_nbytes=request.host_nbytes)
        from verl.planning.planned import planned

        result = planned(request, hardware)
    except (ConfigError, CheckpointEngineError) as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 2
    if request.as_json:
        print(json.dumps(result.document(), indent=2))  # noqa: T201
    else:
        from verl.planning.tables import show

        show(result)
    if request.picture is not None:
        from verl.planning.picture import draw

        draw(result, request.picture)
    return 0 if result.fits else 1


def _threads(cores: int) -> int:
    """As `memory_threads` would say there."""
    from verl.checkpoint_engine.memory.threads import FEW_THREADS, SHARE_OF_CORES

    return max(min(FEW_THREADS, cores), cores // SHARE_OF_CORES)


def _request(options: argparse.Namespace) -> Request:
    """Raises ConfigError."""
    if options.picture is not None and not options.picture.resolve().parent.is_dir():
        raise ConfigError(f"--plot {options.picture}: there is no directory {options.picture.resolve().parent}")
    job = Job(
        trainers=options.trainers,
        strategy=options.strategy,
        rollouts=options.rollouts or options.trainers,
        rollout_tp=options.rollout_tp,
        fabric=Fabric(
            host_bytes_per_s=options.link,
            hosts_per_leaf=options.hosts_per_leaf,
            oversubscription=options.oversubscription,
        ),
        tensor=options.tp,
        pipeline=options.pp,
        expert=options.ep,
        expert_tensor=options.etp,
        fsdp_size=options.fsdp_size,
        colocated=options.rollouts is None,
        dtype=options.dtype,
        slots=options.slots,
        changed=options.delta,
    )
    backends = (options.backend,) if options.backend != "auto" else _backends_of(job, options.device)
    if options.backend == "nccl" and options.device != "cuda":
        raise ConfigError(f"--backend nccl needs CUDA devices: not --device {options.device}")
    if "naive" in backends and not job.colocated:
        raise ConfigError("--backend naive needs rollouts on the trainers' hosts: leave --rollouts out")
    return Request(
        path=options.model.expanduser(),
        job=job,
        backends=backends,
        topology=options.topology,
        rdma=options.rdma,
        device=options.device,
        device_nbytes=int(options.device_memory * 2**30) if options.device == "cuda" else None,
        host_nbytes=int(options.host_memory * 2**30) if options.host_memory else None,
        hardware_path=options.hardware,
        cores=options.cores,
        workload=_workload(options.simulate, job),
        as_json=options.json,
        picture=options.picture,
    )


def _workload(words: Sequence[str] | None, job: Job) -> Workload | None:
    """Raises ConfigError for a word that is none."""
    if words is None:
        return None
    from verl.utils.config import from_mapping

    values = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            values[name] = json.loads(text)
        except ValueError as exc:
            raise ConfigError(f"--simulate {word}: write NAME=NUMBER, such as prompts=64") from exc
    work = from_mapping(Workload, values, "--simulate")
    return work if work.replicas else replace(work, replicas=job.replicas)


def _backends_of(job: Job, device: str) -> tuple[str, ...]:
    crossing = tuple(name for name in BACKENDS if name != "naive" and (name != "nccl" or device == "cuda"))
    return ("naive", *crossing) if job.colocated else crossing


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-sync plan",
        usage="verl-sync plan MODEL [--trainers 64x8] [--rollouts 32x8] [...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="a model directory, or its config.json alone; no weights are needed")
    job = parser.add_argument_group("the job")
    add = job.add_argument
    add("--trainers", type=_as(hosts_of), default=Hosts(count=1, each=8), metavar="HOSTSxRANKS", help="default: 1x8")
    add("--rollouts", type=_as(hosts_of), metavar="HOSTSxDEVICES", help="default: on the trainers' hosts and devices")
    add("--rollout-tp", type=_count, default=1, metavar="N", help="devices of one replica (default: 1)")
    add("--strategy", choices=STRATEGIES, default="fsdp2", help="default: fsdp2")
    add("--fsdp-size", type=int, default=-1, metavar="N", help="fsdp2: ranks that share one copy; -1: all")
    add("--tp", type=_count, default=1, metavar="N", help="megatron: tensor-parallel ranks")
    add("--pp", type=_count, default=1, metavar="N", help="megatron: pipeline stages")
    add("--ep", type=_count, default=1, metavar="N", help="megatron: ranks that share the experts of a layer")
    add("--etp", type=_count, metavar="N", help="megatron: ranks that share every expert; default: --tp")
    add(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of rollouts (default: bfloat16)",
    )
    add(
        "--delta",
        type=_as(fraction_of),
        metavar="PART",
        help="values that change between versions, as 1%%: plan deltas",
    )
    add("--slots", type=int, choices=(1, 2), default=2, help="of each rollout host's arena (default: 2)")
    add("--backend", choices=("auto", *BACKENDS), default="auto", help="auto: all that suit (default)")
    add("--topology", choices=TOPOLOGIES, help="default: each that a backend has")
    place = parser.add_argument_group("the hosts")
    add = place.add_argument
    rate = "of a host, each way: 400gbit, 8x400gbit, 50GB (default: 100gbit)"
    add("--link", type=_as(bytes_per_s), default=bytes_per_s("100gbit"), metavar="RATE", help=rate)
    add("--rdma", action="store_true", help="nixl, mooncake and kimi_ckpt_engine use it; otherwise TCP")
    add("--hosts-per-leaf", type=_count, metavar="N", help="hosts below one switch; default: all")
    add(
        "--oversubscription", type=_ratio, default=1.0, metavar="X", help="of a switch's way to the others (default: 1)"
    )
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where weights are and engines compute (default: cuda)",
    )
    add("--device-memory", type=_ratio, default=80.0, metavar="GIB", help="of a device (default: 80)")
    add("--host-memory", type=_ratio, metavar="GIB", help="of a host; default: as --hardware says")
    add("--cores", type=_count, default=32, metavar="N", help="of a host (default: 32)")
    add("--hardware", type=Path, metavar="FILE", help="what `verl-sync doctor --json` wrote on such hosts")
    words = ", ".join(f"{field.name} ({field.metadata['help']})" for field in fields(Workload))
    steps = f"also simulate steps in the three modes; NAMEs: {words}".replace("%", "%%")
    add("--simulate", nargs="*", metavar="NAME=NUMBER", help=steps)
    shown = parser.add_argument_group("what is shown")
    add = shown.add_argument
    add("--json", action="store_true", help="one JSON document instead of tables")
    add("--plot", dest="picture", type=Path, metavar="FILE", help="also draw seconds and memory, as .png, .svg or .pdf")
    return parser


def _as(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` with its own message."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return parsed


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
