"""How fast a ParameterServer brings a checkpoint into engines, next to the raw speed of Mooncake and of gloo.

    python -m benchmarks.parameter_server --size-gib 1 --bucket-megabytes 64 --repeats 5

Ranks are processes, engines are threads of theirs. An engine copies every tensor into memory of its own, which takes
time and memory bandwidth from the other stages, or takes it for loaded as soon as it is there, which shows what the
other stages can do. Rank 0 of one job holds the checkpoint. Before and after every update Mooncake reads, and gloo
broadcasts, as many bytes between two processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks import raw
from benchmarks.command import program
from benchmarks.free_ports import free_port
from benchmarks.machine import require_memory
from benchmarks.processes import members
from benchmarks.report import Report, medians, table
from benchmarks.synthetic_model import MIN_NBYTES, RowsOfModel, qwen_like_specs
from verl.checkpoint_engine.parameter_server.engine_receiver import receive
from verl.checkpoint_engine.parameter_server.progress import UpdateReport
from verl.checkpoint_engine.parameter_server.server import ParameterServer
from verl.checkpoint_engine.plan.types import TensorSpec
from verl.utils.config import option

NAME = "benchmark"
WARM_UP = 1
TIMEOUT_S = 300.0
OF_RAW = 0.85
"""Target for a stage: of what its library does alone."""
OVERLAP = 1.25
"""Target for the whole: at most so many times the slowest stage, and one bucket."""
COPIES = 10
"""Of the checkpoint, at most, in memory at a time: the owner's, four engines', the raw pairs', and buckets."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    size_gib: float = option(1.0, "size of the checkpoint", least=MIN_NBYTES / 2**30)
    bucket_megabytes: int = option(64, "most MiB in a bucket", least=1)
    repeats: int = option(5, "measured updates of each kind, after the warm-up", least=1)
    dtype: str = option("bfloat16", "of the checkpoint", choices=("bfloat16", "float16", "float32"))


Call = Callable[..., list[Any]]


@dataclass(frozen=True)
class Case:
    joiners: bool
    """Not the job of the rank that holds the checkpoint, but another one, which has its metas."""
    ranks: tuple[int, ...]
    p2p: bool
    copies: bool
    """Whether engines copy."""
    reporter: int
    """The rank whose events count: one that receives, and fetches if anybody does."""


CASES = {
    "broadcast, 2 ranks, no load": Case(False, (0, 1), False, False, 1),
    "P2P, 1 rank, no load": Case(False, (1,), True, False, 1),
    "broadcast, 2 ranks": Case(False, (0, 1), False, True, 1),
    "P2P, 1 rank": Case(False, (1,), True, True, 1),
    "P2P, 2 ranks": Case(True, (0, 1), True, True, 0),
}


# --- in the ranks' processes ------------------------------------------------------------------------------------------


class Rank:
    def __init__(self, rank: int, master: str, specs: list[TensorSpec], bucket_megabytes: int) -> None:
        torch.set_num_threads(1)
        os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(bucket_megabytes / 1024)
        self._server = ParameterServer(rank=rank, world_size=2, master=master, timeout_s=TIMEOUT_S)
        self._specs = specs
        self._own: dict[str, torch.Tensor] = {}

    def register(self, dtype: str) -> None:
        source = RowsOfModel(self._specs, 0, 1, dtype)
        tensors = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in self._specs}
        for shard in source.shards():
            source.copy(shard, tensors[shard.name])
        self._server.register_checkpoint(NAME, named_tensors=tensors)

    def gather(self) -> dict[int, Any]:
        self._server.gather_metas(NAME)
        return self._server.get_metas()

    def load(self, metas: dict[int, Any]) -> None:
        self._server.load_metas(metas)

    def update(self, ranks: tuple[int, ...] | None, copies: bool) -> UpdateReport | None:
        return self._server.update(NAME, self._copy if copies else self._look, ranks)

    def _look(self, paths: list[tuple[str, str]]) -> None:
        # No name for a tensor: one that is still held when the next is asked for would be copied.
        deque(receive(dict(paths)[self._server.device_id], "cpu", TIMEOUT_S), maxlen=0)

    def _copy(self, paths: list[tuple[str, str]]) -> None:
        for name, tensor in receive(dict(paths)[self._server.device_id], "cpu", TIMEOUT_S):
            if name not in self._own:
                self._own[name] = torch.zeros_like(tensor)
            self._own[name].copy_(tensor)


# --- in the benchmark's process ---------------------------------------------------------------------------------------


@contextmanager
def two_ranks(specs: list[TensorSpec], bucket_megabytes: int) -> Iterator[Call]:
    """A job: a function that calls a method of some of its ranks, all at once, and returns what each answers."""
    master = f"127.0.0.1:{free_port()}"
    makers = {f"rank-{rank}": partial(Rank, rank, master, specs, bucket_megabytes) for rank in range(2)}
    with members(makers) as ranks:

        def call(of: tuple[int, ...], method: str, *values: Any) -> list[Any]:
            answers = [ranks[rank].submit(method, *values) for rank in of]
            return [answer.result() for answer in answers]

        yield call


def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds."""
    specs = specs_of(settings)
    nbytes = sum(spec.nbytes for spec in specs)
    require_memory(COPIES * nbytes, f"--size-gib {settings.size_gib:g}")
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    buckets = settings.bucket_megabytes
    with two_ranks(specs, buckets) as owner, two_ranks(specs, buckets) as joiners:
        owner((0,), "register", settings.dtype)
        metas = owner((0, 1), "gather")[0]  # and connects
        gather_s = median(timed(lambda: owner((0, 1), "gather")) for _ in range(settings.repeats))
        joiners((0, 1), "load", metas)
        with raw.gloo(nbytes) as gloo, raw.reads("mooncake", nbytes) as mooncake:
            for repeat in range(WARM_UP + settings.repeats):
                for name, case in CASES.items():
                    before = gloo(), mooncake()
                    update = joiners if case.joiners else owner
                    reports = update(case.ranks, "update", case.ranks if case.p2p else None, case.copies)
                    after = gloo(), mooncake()
                    if repeat >= WARM_UP:
                        reports.sort(key=lambda report: report.events[0].rank != case.reporter)
                        speeds = zip(("gloo", "mooncake"), before, after, strict=True)
                        samples[name].append(analyse(reports) | {key: (a + b) / 2 for key, a, b in speeds})
    return {
        "model": {"nbytes": nbytes, "tensors": len(specs)},
        "gather_s": gather_s,
        "samples": samples,
        "summary": {name: summarise(values, nbytes, p2p=CASES[name].p2p) for name, values in samples.items()},
    }


def timed(work: Callable[[], object]) -> float:
    """Its seconds."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def specs_of(settings: Settings) -> list[TensorSpec]:
    """A model whose embedding, a fifth of its bytes, is cut: a bucket has to hold the largest tensor."""
    embedding, *layers = qwen_like_specs(int(settings.size_gib * 2**30), settings.dtype)
    rows, hidden = embedding.shape
    most = max(settings.bucket_megabytes * 2**20 * rows // (4 * embedding.nbytes), 1)
    cuts = [
        TensorSpec(name=f"{embedding.name}.{start}", shape=(min(most, rows - start), hidden), dtype=embedding.dtype)
        for start in range(0, rows, most)
    ]
    return [*cuts, *layers]


def analyse(reports: list[UpdateReport]) -> dict[str, float]:
    """Seconds of one update: in all, in each stage, and of one bucket in all stages, on the mean.

    As the rank of the first report saw them; but a broadcast begins when the last rank is ready for it.
    """
    report, *others = reports
    when = {(event.kind, event.bucket): event.time_s for event in report.events}
    for event in (event for other in others for event in other.events if event.kind == "broadcast-start"):
        when[event.kind, event.bucket] = max(when[event.kind, event.bucket], event.time_s)
    busy = dict.fromkeys(("fetch", "broadcast", "load"), 0.0)
    for stage in busy:
        free = 0.0
        for number in range(report.buckets):
            if (f"{stage}-start", number) in when:
                # An engine that is offered a bucket may still load the one before.
                start = max(when[f"{stage}-start", number], free)
                free = when[f"{stage}-end", number]
                busy[stage] += free - start
    moving = max(when.values()) - min(when.values())
    bucket = sum(busy.values()) / report.buckets
    return {
        "update_s": report.seconds,
        "moving_s": moving,
        **{f"{stage}_s": seconds for stage, seconds in busy.items()},
        "bucket_s": bucket,
        "buckets": report.buckets,
        "of_bound": moving / (OVERLAP * max(busy.values()) + bucket),
    }


def summarise(samples: list[dict[str, float]], nbytes: int, *, p2p: bool) -> dict[str, float | None]:
    """Medians. `fetch_of_raw` counts only where peers' memory is read."""

    def of_raw(stage: str, raw: str) -> float | None:
        rates = [nbytes / sample[f"{stage}_s"] / 1e9 / sample[raw] for sample in samples if sample[f"{stage}_s"] > 0]
        return median(rates) if rates else None

    return {
        **medians(samples),
        "gbytes_per_s": median(nbytes / sample["moving_s"] / 1e9 for sample in samples),
        "fetch_of_raw": of_raw("fetch", "mooncake") if p2p else None,
        "broadcast_of_raw": of_raw("broadcast", "gloo"),
    }


def report(result: dict[str, Any]) -> Report:
    settings = result["settings"]
    title = (
        f"ParameterServer: {result['model']['nbytes'] / 2**30:.2f} GiB {settings['dtype']}, "
        f"buckets of {settings['bucket_megabytes']} MiB"
    )
    stages = ("update", "moving", "fetch", "broadcast", "load")
    columns = {
        f"median of {settings['repeats']}": "{way}",
        **{f"{stage}, s": f"{{{stage}_s:.3f}}" for stage in stages},
        "GB/s": "{gbytes_per_s:.2f}",
        "fetch of raw": "{fetch_of_raw:.0%}",
        "broadcast of raw": "{broadcast_of_raw:.0%}",
        "of bound": "{of_bound:.0%}",
    }
    rows = [{"way": name, **row} for name, row in result["summary"].items()]
    raw = [
        f"raw {library}: {min(rates):.2f} to {max(rates):.2f} GB/s"
        for library in ("gloo", "mooncake")
        if (rates := [row[library] for row in rows])
    ]
    return Report(
        [
            table(title, columns, rows),
            f"gather metas: {result['gather_s']:.3f} s; {'; '.join(raw)}",
            f"targets: each stage at {OF_RAW:.0%} of raw or more without load; moving at 100 % of the bound or less\n"
            f"(bound: {OVERLAP} x the slowest stage, and one bucket in all stages)",
        ]
    )


main = program("parameter_server", __doc__, Settings, measure, report, plots=False, threads=1)
if __name__ == "__main__":
    sys.exit(main())
