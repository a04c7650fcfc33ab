"""What every backend must do: every kind of model arrives bit-equal on every node, three versions in a row."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoint_engine.backends import BACKENDS, EXAMPLE, QUICK, SLOW, nbytes_moved, using
from tests.checkpoint_engine.fakes import (
    ColumnShardedSource,
    Fleet,
    RowShardedSource,
    arenas_in,
    assert_bit_equal,
    later,
)

BLOCK_KB = 4
BLOCK = BLOCK_KB * 1024
BUCKET = 2**20
"""The smallest that can be configured."""

CASES = {
    "empty model": dict,
    "only zero-byte tensors": lambda: {"a": torch.randn(0), "b": torch.randn(5, 0)},
    "zero-byte tensor": lambda: {"a": torch.randn(0, 4), "b": torch.randn(3)},
    "scalar": lambda: {"scale": torch.randn(()), "w": torch.randn(5, 2)},
    "larger than a block": lambda: {"w": torch.randn(700, 3)},
    "one row larger than two blocks": lambda: {"w": torch.randn(3, BLOCK)},
    "exactly a block": lambda: {"w": torch.randn(BLOCK // 16, 4), "v": torch.randn(BLOCK // 4)},
    "larger than a bucket": lambda: {"v": torch.randn(3), "w": torch.randn(3 * 450_000 // 9, 9), "u": torch.randn(7)},
    "larger than two buckets": lambda: {"w": torch.randn(2_500_001)},
    "exactly a bucket": lambda: {"w": torch.randn(3, BUCKET // 4), "v": torch.randn(BUCKET // 4)},
    "one row larger than two buckets": lambda: {"w": torch.randn(3, BUCKET // 2 + 1)},
    "odd sizes": lambda: {"w": torch.randn(17, 13, 3), "v": torch.randn(1)},
    "mixed dtypes": lambda: {
        "bf16": torch.randn(9, 5).bfloat16(),
        "fp32": torch.randn(9, 5),
        "int8": torch.randint(-100, 100, (31,), dtype=torch.int8),
        "fp8": torch.randn(8, 16).to(torch.float8_e4m3fn),
        "bool": torch.randn(7, 3) > 0,
        "int64": torch.randint(-(2**62), 2**62, (5,)),
    },
    "non-contiguous source": lambda: {"w": torch.randn(40, 60).t()},
    "large and small in turn": lambda: {
        f"{kind}{layer}": torch.randn(size) for layer in range(6) for kind, size in (("w", 300_000), ("norm", 33))
    },
    "1,000 tiny tensors": lambda: {f"t{index}": torch.randn(3) for index in range(1000)},
    "all of these in one": lambda: {
        f"{case}.{name}": tensor
        for case in CASES
        if case != "all of these in one"
        for name, tensor in CASES[case]().items()
    },
}
LONG_CASE = "1,000 tiny tensors"
"""Alone it shows nothing that the last does not."""
FEW_CASES = ("empty model", "only zero-byte tensors", "all of these in one")
ALIKE = ("gloo", "nixl", EXAMPLE)
"""Two are wires as `tcp` is one: what is read, and where to, is the same code's choice for all three. What `gloo` sends
in which message is arithmetic, which test_messages.py looks at."""
WIRE_CASES = (*FEW_CASES, "larger than a bucket", "one row larger than two buckets", "large and small in turn")
"""That choice as reads of every kind: one, several, parts of a row, and what is packed."""


def tensors_of(case: str, round_: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(round_)
    return CASES[case]()


@pytest.mark.parametrize(
    ("backend", "case"),
    [using(backend, case) for backend in QUICK if backend not in ALIKE for case in CASES if case != LONG_CASE]
    + [using(backend, case) for backend in ALIKE for case in WIRE_CASES]
    + [using(backend, case) for backend in SLOW for case in FEW_CASES],
)
async def test_three_versions_arrive_bit_equal(backend: str, case: str, tmp_path: Path) -> None:
    async with Fleet(
        tensors_of(case, 0),
        tmp_path,
        trainers=3,
        replicas=2,
        backend=backend,
        block_kilobytes=BLOCK_KB,
        update_weights_bucket_megabytes=1,
        retries=0,
    ) as fleet:
        async for expected, report in fleet.three_versions(partial(tensors_of, case)):
            needed = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
            assert report.nbytes_needed == needed
            assert report.nbytes_moved == nbytes_moved(backend, needed, nodes=1)


SOURCES = (RowShardedSource, ColumnShardedSource)
SIZES = [(trainers, nodes) for trainers in (1, 2, 4) for nodes in (1, 2, 3)]
FEW_SIZES = [(2, 3), (4, 2)]
"""With one kind of source each: which one decides on the plan, and backends see the plan alone."""


@pytest.mark.parametrize(
    ("backend", "source", "trainers", "nodes"),
    [using("naive", source, *size) for source in SOURCES for size in SIZES]
    + [using(backend, RowShardedSource, *size) for backend in ("gloo", "tcp") for size in SIZES]
    + [using(backend, ColumnShardedSource, 4, 3) for backend in ("gloo", "tcp")]
    + [
        using(backend, source, *size)
        for backend in ("nixl", EXAMPLE, *SLOW)
        for source, size in zip(SOURCES, FEW_SIZES, strict=True)
    ],
)
async def test_any_number_of_trainers_reaches_any_number_of_nodes(
    backend: str, source: type[RowShardedSource], trainers: int, nodes: int, tmp_path: Path
) -> None:
    """Neither 2 nor 4 divides 7 rows or 5 columns; of 5 rows, rank 3 of 4 has none."""
    tensors = {
        "w": torch.randn(7, 5),
        "large": torch.randn(1001, 515),
        "norm": torch.randn(3),
        "five": torch.randn(5, 2),
        "scale": torch.randn(()),
    }
    async with Fleet(
        tensors,
        tmp_path,
        trainers=trainers,
        nodes=nodes,
        replicas=nodes,
        source=source,
        backend=backend,
        update_weights_bucket_megabytes=1,
        retries=0,
    ) as fleet:
        async for _, report in fleet.three_versions(later(tensors)):
            assert report.nbytes_needed == nodes * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("backend", BACKENDS)
async def test_weights_are_cast_to_the_rollout_dtype(backend: str, tmp_path: Path) -> None:
    tensors = {"w": torch.randn(33, 8)}
    async with Fleet(tensors, tmp_path, dtype="bfloat16", backend=backend) as fleet:
        await fleet.manager.update_weights(0)
        assert torch.equal(fleet.replicas[0].weights["w"], tensors["w"].bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_trainer_may_change_its_weights_as_soon_as_it_has_published(backend: str, tmp_path: Path) -> None:
    tensors = {"w": torch.randn(300_000, 3)}
    async with Fleet(tensors, tmp_path, backend=backend, retries=0) as fleet:
        published = {name: tensor.clone() for name, tensor in tensors.items()}

        def train_on() -> None:
            tensors["w"].fill_(float("nan"))

        fleet.nodes[0].before["stage"] = train_on
        await fleet.manager.update_weights(1)
        assert tensors["w"].isnan().all()
        assert_bit_equal(fleet.replicas[0], 1, published)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_phases_of_a_report_add_up_to_its_total(backend: str, tmp_path: Path) -> None:
    async with Fleet(
        {"w": torch.randn(64, 64)}, tmp_path, report_path=tmp_path / "reports.jsonl", backend=backend
    ) as fleet:
        report = await fleet.manager.update_weights(5)
    assert report.total_s == pytest.approx(sum(report.phase_s.values()))
    assert 0 < report.trainer_blocked_s <= report.phase_s["publish"]
    assert 0 < report.paused_s["replica-0"] <= report.phase_s["activate"] + report.phase_s["resume"] + 0.01
    assert '"version":5' in (tmp_path / "reports.jsonl").read_text()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_nothing_is_left_behind_when_the_manager_closes(backend: str, tmp_path: Path) -> None:
    async with Fleet({"w": torch.randn(64, 64)}, tmp_path, backend=backend) as fleet:
        await fleet.manager.update_weights(1)
        assert arenas_in(tmp_path)
    assert not arenas_in(tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_two_jobs_on_one_host_do_not_meet(backend: str, tmp_path: Path) -> None:
    async with (
        Fleet({"w": torch.zeros(8, 8)}, tmp_path, job="one", backend=backend) as first,
        Fleet({"w": torch.ones(8, 8)}, tmp_path, job="two", backend=backend) as second,
    ):
        await first.manager.update_weights(1)
        await second.manager.update_weights(1)
        assert first.replicas[0].weights["w"].sum() == 0
        assert second.replicas[0].weights["w"].sum() == 64
