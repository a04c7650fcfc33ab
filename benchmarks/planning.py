"""How long a plan for a trillion parameters takes, and how much memory, on one core.

    python -m benchmarks.planning

Nothing is moved and no weights exist: the model is names and shapes, its shards are those that trainer ranks would
declare. Each case runs in a process of its own, bound to one core, so that its memory can be told from the others'.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import program
from benchmarks.report import Report, table
from benchmarks.synthetic_model import rows_of
from verl.checkpoint_engine.links.fetch import messages_of
from verl.checkpoint_engine.memory.packed import Packing
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec
from verl.utils.config import ConfigError, option

BLOCK_NBYTES = 2**20
MESSAGE_NBYTES = 64 * 2**20
"""What the one-sided backends ask for at a time."""
TARGET_S = 10.0
TARGET_GIB = 2.0
HIDDEN, EXPERT_WIDTH, VOCABULARY = 7168, 2048, 163_840


@dataclass(frozen=True, kw_only=True)
class Settings:
    layers: int = option(61, "layers, the first one without experts", least=1)
    experts: int = option(384, "experts per layer", least=1)
    trainers: int = option(256, "trainer ranks", least=1)
    replicas: int = option(8, "how often ranks repeat in the replicated case", least=1)

    def __post_init__(self) -> None:
        if self.trainers % self.replicas:
            raise ConfigError(f"--trainers {self.trainers} must be a multiple of --replicas {self.replicas}")


def mixture_of_experts(layers: int, experts: int) -> list[TensorSpec]:
    """Names and shapes of a large mixture of experts with latent attention; its first layer is dense."""

    def matrix(name: str, rows: int, columns: int) -> TensorSpec:
        return TensorSpec(name=name, shape=(rows, columns), dtype="bfloat16")

    def vector(name: str, size: int) -> TensorSpec:
        return TensorSpec(name=name, shape=(size,), dtype="bfloat16")

    def feed_forward(prefix: str, width: int) -> Iterator[TensorSpec]:
        yield matrix(f"{prefix}.gate_proj.weight", width, HIDDEN)
        yield matrix(f"{prefix}.up_proj.weight", width, HIDDEN)
        yield matrix(f"{prefix}.down_proj.weight", HIDDEN, width)

    specs = [matrix("model.embed_tokens.weight", VOCABULARY, HIDDEN)]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        specs += [
            vector(f"{prefix}.input_layernorm.weight", HIDDEN),
            vector(f"{prefix}.post_attention_layernorm.weight", HIDDEN),
            matrix(f"{attention}.q_a_proj.weight", 1536, HIDDEN),
            vector(f"{attention}.q_a_layernorm.weight", 1536),
            matrix(f"{attention}.q_b_proj.weight", 64 * 192, 1536),
            matrix(f"{attention}.kv_a_proj_with_mqa.weight", 576, HIDDEN),
            vector(f"{attention}.kv_a_layernorm.weight", 512),
            matrix(f"{attention}.kv_b_proj.weight", 64 * 256, 512),
            matrix(f"{attention}.o_proj.weight", HIDDEN, 64 * 128),
        ]
        if layer == 0:
            specs += feed_forward(f"{prefix}.mlp", 18_432)
            continue
        specs.append(matrix(f"{prefix}.mlp.gate.weight", experts, HIDDEN))
        specs.append(TensorSpec(name=f"{prefix}.mlp.gate.e_score_correction_bias", shape=(experts,), dtype="float32"))
        specs += feed_forward(f"{prefix}.mlp.shared_experts", EXPERT_WIDTH)
        for expert in range(experts):
            specs += feed_forward(f"{prefix}.mlp.experts.{expert}", EXPERT_WIDTH)
    return [*specs, vector("model.norm.weight", HIDDEN), matrix("lm_head.weight", VOCABULARY, HIDDEN)]


def fully_sharded(specs: list[TensorSpec], rank: int, settings: Settings) -> list[Shard]:
    """Every rank holds some rows of every tensor."""
    shards = (rows_of(spec, rank, settings.trainers) for spec in specs)
    return [shard for shard in shards if shard.box.numel]


def expert_parallel(specs: list[TensorSpec], rank: int, settings: Settings) -> list[Shard]:
    """Replicas of groups of ranks. Inside of one, whole experts are dealt to ranks, and other tensors cut into rows."""
    group = settings.trainers // settings.replicas
    mine = rank % group
    shards = []
    for spec in specs:
        _, _, expert = spec.name.partition(".experts.")
        if expert and int(expert.split(".")[0]) % group == mine:
            shards.append(Shard(spec.name, Box.whole(spec.shape)))
        elif not expert:
            shards.append(rows_of(spec, mine, group))
    return [shard for shard in shards if shard.box.numel]


STEPS = {
    "describe": "a trainer rank: table of its shards, encoded",
    "plan": "driver: tables decoded, plan made",
    "encode_plan": "driver: plan encoded",
    "pack": "a trainer rank: plan decoded, own pieces packed",
    "list": "a trainer rank, each version: own pieces listed",
    "buckets": "a node: plan decoded, buckets of all owners",
}

Case = Callable[[list[TensorSpec], int, Settings], list[Shard]]
CASES: dict[str, Case] = {"fsdp2": fully_sharded, "expert_parallel_replicated": expert_parallel}


class Steps:
    """Seconds of processor time, and GiB by which the process grew at its largest, per step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_growth_gib: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier steps have freed does not count as there
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, start_s = _memory("VmRSS"), time.process_time()
        yield
        self.seconds[name] = time.process_time() - start_s
        self.peak_growth_gib[name] = (_memory("VmHWM") - before) / 2**30


def _memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not tell {key}")


def measure(case: str, settings: Settings) -> dict[str, Any]:
    """One case. Called in a process of its own."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    specs = mixture_of_experts(settings.layers, settings.experts)
    layout = Layout.of(specs)
    steps = Steps()

    shards = CASES[case](specs, 1, settings)
    with steps.step("describe"):
        encoded = ShardTable.of(layout, shards).encode()
    table_nbytes, num_shards = len(encoded), 0
    tables_at_rest = []
    for rank in range(settings.trainers):
        tables_at_rest.append(ShardTable.of(layout, CASES[case](specs, rank, settings)).encode())
        num_shards += len(ShardTable.decode(tables_at_rest[-1]))

    with steps.step("plan"):
        held = [ShardTable.decode(data) for data in tables_at_rest]
        plan = make_plan(layout, held, block_nbytes=BLOCK_NBYTES)
        del held
    with steps.step("encode_plan"):
        encoded_plan = plan.encode()
    owned = np.array(plan.owner_nbytes)
    pieces = len(plan)
    del plan, tables_at_rest

    with steps.step("pack"):
        plan = SyncPlan.decode(encoded_plan)
        Packing.of(plan, 1)
    with steps.step("list"):
        plan.shards_of(1)
    del plan
    with steps.step("buckets"):
        plan = SyncPlan.decode(encoded_plan)
        buckets = sum(len(messages_of(plan, owner, MESSAGE_NBYTES)) for owner in range(plan.num_owners))
    return {
        "case": case,
        "parameters": sum(spec.numel for spec in specs),
        "tensors": len(specs),
        "shards": num_shards,
        "pieces": pieces,
        "buckets_per_node": buckets,
        "table_nbytes_per_rank": table_nbytes,
        "plan_nbytes": len(encoded_plan),
        "owner_nbytes": {"least": int(owned.min()), "most": int(owned.max())},
        "seconds": steps.seconds,
        "peak_growth_gib": steps.peak_growth_gib,
        "target_reached": steps.seconds["plan"] < TARGET_S and steps.peak_growth_gib["plan"] < TARGET_GIB,
    }


def measure_all(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds."""
    results = []
    for case in CASES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            results.append(pool.submit(measure, case, settings).result())
    return {"cases": results}


def report(measured: dict[str, Any]) -> Report:
    parts = []
    for result in measured["cases"]:
        title = (
            f"{result['case']}: {result['parameters'] / 1e12:.2f} T parameters, {result['tensors']} tensors, "
            f"{measured['settings']['trainers']} ranks, {result['shards']} shards, {result['pieces']} pieces"
        )
        steps = [
            {"step": label, "seconds": result["seconds"][key], "gib": result["peak_growth_gib"][key]}
            for key, label in STEPS.items()
        ]
        parts.append(table(title, {"one core": "{step}", "seconds": "{seconds:.2f}", "GiB": "{gib:.2f}"}, steps))
        least, most = result["owner_nbytes"]["least"], result["owner_nbytes"]["most"]
        verdict = "reached" if result["target_reached"] else "NOT reached"
        parts.append(
            f"a rank's table: {result['table_nbytes_per_rank'] / 1e3:.1f} kB, "
            f"the plan: {result['plan_nbytes'] / 1e6:.1f} MB, buckets of a node: {result['buckets_per_node']}\n"
            f"a rank sends {least / 1e9:.3f} to {most / 1e9:.3f} GB\n"
            f"target ({TARGET_S:.0f} s and {TARGET_GIB:.0f} GiB for the plan): {verdict}"
        )
    return Report(parts)


main = program("planning", __doc__, Settings, measure_all, report, plots=False)
if __name__ == "__main__":
    sys.exit(main())
