"""How long a version takes from a trainer's host to rollout nodes on other hosts, over links of a given speed.

    python -m benchmarks.hosts --gbit-per-s 1 --size-gib 0.25 --nodes 1 3 5

The hosts are network namespaces of this machine on a bridge, each link limited in both directions: what counts on a
cluster, the bytes on each link and who waits for whom, is real; the processors are shared. Needs root and iproute2.

Beside the backends: what one plain TCP connection carries, and the gathered broadcast of most frameworks. On several
nodes the least possible time is that of one copy over one link.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.command import program, progress
from benchmarks.fleet import on_hosts
from benchmarks.machine import require_memory
from benchmarks.namespaces import MAX_HOSTS, Host, joined_hosts
from benchmarks.peers import BASELINE, Job, gathering
from benchmarks.raw import tcp_gbit_per_s
from benchmarks.report import Panel, Report, medians, table
from benchmarks.synthetic_model import MIN_NBYTES, qwen_like_specs, row_sources
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.registry import resolve_backend
from verl.utils.config import ConfigError, option

WARM_UP = 2
"""Versions before the measured ones: each of the two slots has been written once."""
OVER_TCP = {"nixl": {"ucx_tls": "tcp"}}
"""UCX sees through namespaces: it would find that both ends share memory."""
WAYS: dict[str, dict[str, Any]] = {
    "gloo": {"backend": "gloo"},
    "kimi_ckpt_engine": {"backend": "kimi_ckpt_engine"},
    "mooncake": {"backend": "mooncake"},
    "mooncake-chain": {"backend": "mooncake", "topology": "chain"},
    "tcp": {"backend": "tcp"},
    "tcp-chain": {"backend": "tcp", "topology": "chain"},
    "tcp-tree": {"backend": "tcp", "topology": "tree"},
    "tcp-p2p_broadcast": {"backend": "tcp", "topology": "p2p_broadcast"},
    "nixl": {"backend": "nixl", "engine_kwargs": OVER_TCP},
    "nixl-chain": {"backend": "nixl", "engine_kwargs": OVER_TCP, "topology": "chain"},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    ways: list[str] = option(list(WAYS), "backends, some with a topology", choices=tuple(WAYS))
    gbit_per_s: float = option(1.0, "of each host's link, in each direction", least=0.01, most=1000)
    size_gib: float = option(0.25, "model size in bfloat16", least=MIN_NBYTES / 2**30)
    trainers: int = option(2, "trainer ranks, all on one host", least=1)
    nodes: list[int] = option([1, 3, 5], "rollout nodes, a host each", least=1, most=MAX_HOSTS - 1)
    repeats: int = option(3, "measured versions, after the warm-up", least=1)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("--nodes takes at least one number")


async def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds. Says on the console what it is doing: it takes minutes.

    Raises ConfigError; NotPermitted where namespaces cannot be made.
    """
    specs = qwen_like_specs(int(settings.size_gib * 2**30), "bfloat16")
    nbytes = sum(spec.nbytes for spec in specs)
    most = max(settings.nodes)
    # The ranks' weights and packed copies, and of every node two slots or the baseline's private copy.
    require_memory(nbytes * (3 + 2 * most), f"--size-gib {settings.size_gib:g} with --nodes {most}")
    configs, unavailable = {}, {}
    for name in settings.ways:
        config = CheckpointEngineConfig.from_mapping(WAYS[name])
        try:
            resolve_backend(config)
            configs[name] = config
        except BackendUnavailable as exc:
            unavailable[name] = str(exc)
    fleets = []
    for count in sorted(set(settings.nodes)):
        job = Job(specs=specs, source_dtype="bfloat16", trainers=settings.trainers, nodes=count)
        with joined_hosts(1 + count, gbit_per_s=settings.gbit_per_s) as hosts:
            fleets.append(await _measure_fleet(configs, job, hosts, settings.repeats, nbytes))
    return {"model": {"nbytes": nbytes, "tensors": len(specs)}, "fleets": fleets, "unavailable": unavailable}


async def _measure_fleet(
    configs: Mapping[str, CheckpointEngineConfig], job: Job, hosts: Sequence[Host], repeats: int, nbytes: int
) -> dict[str, Any]:
    """Every way beside plain TCP, with one number of nodes."""
    progress(f"nodes: {job.nodes}; measuring plain TCP")
    ceiling = tcp_gbit_per_s(hosts[0], hosts[1], nbytes)
    samples: dict[str, list[dict[str, float]]] = {}
    for name, config in configs.items():
        progress(f"nodes: {job.nodes}; measuring {name}")
        samples[name] = await _measure(config, job, hosts, repeats, nbytes)
    progress(f"nodes: {job.nodes}; measuring {BASELINE}")
    samples[BASELINE] = _measure_baseline(job, hosts, repeats, nbytes)
    ways = {name: {"samples": of_way, "summary": medians(of_way)} for name, of_way in samples.items()}
    return {"nodes": job.nodes, "tcp_gbit_per_s": ceiling, "ways": ways}


async def _measure(
    config: CheckpointEngineConfig, job: Job, hosts: Sequence[Host], repeats: int, nbytes: int
) -> list[dict[str, float]]:
    samples = []
    async with on_hosts(config, row_sources(list(job.specs), job.trainers, job.source_dtype), hosts) as fleet:
        for version in range(WARM_UP + repeats):
            await fleet.of_ranks("step")
            before = hosts[0].sent_nbytes
            report = await fleet.manager.update_weights(version)
            sample = {
                "version": version,
                "blocked_s": report.trainer_blocked_s,
                "stage_s": report.phase_s["stage"],
                "verify_s": report.phase_s["verify"],
                "total_s": report.total_s,
                "sent_in_models": (hosts[0].sent_nbytes - before) / nbytes,
            }
            samples.append(sample)
    return samples[WARM_UP:]


def _measure_baseline(job: Job, hosts: Sequence[Host], repeats: int, nbytes: int) -> list[dict[str, float]]:
    samples = []
    with gathering(job, hosts) as ways:
        for _ in range(1 + repeats):
            before = hosts[0].sent_nbytes
            sample = ways[BASELINE]()
            samples.append({**asdict(sample), "sent_in_models": (hosts[0].sent_nbytes - before) / nbytes})
    return samples[1:]


COLUMNS = {
    "": "{way}",
    "nodes": "{nodes}",
    "trainer blocked, s": "{blocked_s:.3f}",
    "stage, s": "{stage_s:.3f}",
    "of plain TCP": "{of_tcp:.0%}",
    "verify, s": "{verify_s:.3f}",
    "of the stage": "{of_stage:.0%}",
    "total, s": "{total_s:.3f}",
    "sent": "{sent_in_models:.2f}",
    "blocked less": "{less:.0f}x",
}


def report(result: dict[str, Any]) -> Report:
    """Over the number of nodes: how long a version is on its way, and how often the trainer's host sends it."""
    settings, nbytes, fleets = result["settings"], result["model"]["nbytes"], result["fleets"]
    rows = []
    for fleet in fleets:
        gathered = fleet["ways"][BASELINE]["summary"]
        for name, measured in fleet["ways"].items():
            row = {
                "way": name,
                "nodes": fleet["nodes"],
                "less": gathered["blocked_s"] / measured["summary"]["blocked_s"],
            }
            row |= {"stage_s": None, "of_tcp": None, "verify_s": None, "of_stage": None, **measured["summary"]}
            if row["stage_s"] is not None:
                row["of_tcp"] = 8 * nbytes / row["stage_s"] / 1e9 / fleet["tcp_gbit_per_s"]
                row["of_stage"] = row["verify_s"] / row["stage_s"]
            rows.append(row)
    title = f"{nbytes / 2**30:.2f} GiB over links of {settings['gbit_per_s']:g} Gbit/s"
    ideal = [(fleet["nodes"], 8 * nbytes / fleet["tcp_gbit_per_s"] / 1e9) for fleet in fleets]
    names = list(dict.fromkeys(row["way"] for row in rows))
    stages = {
        name: [(row["nodes"], row["stage_s"] or row["total_s"]) for row in rows if row["way"] == name] for name in names
    }
    sent = {name: [(row["nodes"], row["sent_in_models"]) for row in rows if row["way"] == name] for name in names}
    nodes = "rollout nodes, a host each"
    return Report(
        [
            table(f"{title}; trainer ranks: {settings['trainers']} on one host", COLUMNS, rows),
            "plain TCP, Gbit/s: "
            + ", ".join(f"{fleet['tcp_gbit_per_s']:.2f} (nodes: {fleet['nodes']})" for fleet in fleets)
            + f"\nsent: by the trainer ranks' host, in models; blocked less: than under the {BASELINE}\n"
            f"medians of {settings['repeats']}; the cores are those of all hosts",
            *(f"left out: {name}: {reason}" for name, reason in result["unavailable"].items()),
        ],
        [
            Panel(kind="lines", series={"one copy over one link": ideal, **stages}, x=nodes, y="seconds of the stage"),
            Panel(kind="lines", series=sent, x=nodes, y="sent by the trainer's host, models"),
        ],
        title,
    )


main = program("hosts", __doc__, Settings, measure, report, threads=1)
if __name__ == "__main__":
    sys.exit(main())
