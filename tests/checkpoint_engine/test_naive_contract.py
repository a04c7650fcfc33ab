"""What every backend must do, run against `naive`: every kind of model arrives bit-equal, three versions in a row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint_engine.fakes import Fleet, arenas_in

BLOCK_KB = 4
BLOCK = BLOCK_KB * 1024


def tensors_of(case: str, round_: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(round_)
    cases = {
        "empty model": dict,
        "zero-byte tensor": lambda: {"a": torch.randn(0, 4), "b": torch.randn(3)},
        "scalar": lambda: {"scale": torch.randn(()), "w": torch.randn(5, 2)},
        "larger than a block": lambda: {"w": torch.randn(700, 3)},
        "one row larger than two blocks": lambda: {"w": torch.randn(3, BLOCK)},
        "exact fit": lambda: {"w": torch.randn(BLOCK // 16, 4), "v": torch.randn(BLOCK // 4)},
        "odd sizes": lambda: {"w": torch.randn(17, 13, 3), "v": torch.randn(1)},
        "mixed dtypes": lambda: {
            "bf16": torch.randn(9, 5).bfloat16(),
            "fp32": torch.randn(9, 5),
            "int8": torch.randint(-100, 100, (31,), dtype=torch.int8),
            "fp8": torch.randn(8, 16).to(torch.float8_e4m3fn),
        },
        "non-contiguous source": lambda: {"w": torch.randn(40, 60).t()},
        "1,000 tiny tensors": lambda: {f"t{index}": torch.randn(3) for index in range(1000)},
    }
    return cases[case]()


@pytest.mark.parametrize(
    "case",
    [
        "empty model",
        "zero-byte tensor",
        "scalar",
        "larger than a block",
        "one row larger than two blocks",
        "exact fit",
        "odd sizes",
        "mixed dtypes",
        "non-contiguous source",
        "1,000 tiny tensors",
    ],
)
async def test_three_versions_arrive_bit_equal(case: str, tmp_path: Path) -> None:
    async with Fleet(tensors_of(case, 0), tmp_path, trainers=3, replicas=2, block_kilobytes=BLOCK_KB) as fleet:
        for version in range(3):
            expected = tensors_of(case, version)
            fleet.set_weights(expected)
            report = await fleet.manager.update_weights(version)
            for replica in fleet.replicas:
                assert replica.version == version
                assert replica.weights.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert replica.weights[name].dtype == tensor.dtype
                    assert torch.equal(
                        replica.weights[name].view(torch.uint8) if tensor.dim() else replica.weights[name],
                        tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor,
                    )
            needed = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
            assert report.nbytes_needed == report.nbytes_moved == needed


@pytest.mark.parametrize("trainers", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 2, 3])
async def test_any_number_of_trainers_reaches_any_number_of_nodes(trainers: int, nodes: int, tmp_path: Path) -> None:
    tensors = {"w": torch.randn(7, 5), "norm": torch.randn(3)}
    async with Fleet(tensors, tmp_path, trainers=trainers, nodes=nodes, replicas=nodes) as fleet:
        report = await fleet.manager.update_weights(1)
        assert report.nbytes_moved == nodes * (7 * 5 + 3) * 4
        for replica in fleet.replicas:
            assert torch.equal(replica.weights["w"], tensors["w"])


async def test_weights_are_cast_to_the_rollout_dtype(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(33, 8)}
    async with Fleet(tensors, tmp_path, dtype="bfloat16") as fleet:
        await fleet.manager.update_weights(0)
        assert torch.equal(fleet.replicas[0].weights["w"], tensors["w"].bfloat16())


async def test_the_phases_of_a_report_add_up_to_its_total(tmp_path: Path) -> None:
    async with Fleet({"w": torch.randn(64, 64)}, tmp_path, report_path=tmp_path / "reports.jsonl") as fleet:
        report = await fleet.manager.update_weights(5)
    assert report.total_s == pytest.approx(sum(report.phase_s.values()))
    assert 0 < report.trainer_blocked_s <= report.phase_s["publish"]
    assert 0 < report.paused_s["replica-0"] <= report.phase_s["activate"] + report.phase_s["resume"] + 0.01
    assert '"version":5' in (tmp_path / "reports.jsonl").read_text()


async def test_nothing_is_left_behind_when_the_manager_closes(tmp_path: Path) -> None:
    async with Fleet({"w": torch.randn(64, 64)}, tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        assert arenas_in(tmp_path)
    assert not arenas_in(tmp_path)


async def test_two_jobs_on_one_host_do_not_meet(tmp_path: Path) -> None:
    async with (
        Fleet({"w": torch.zeros(8, 8)}, tmp_path, job="one") as first,
        Fleet({"w": torch.ones(8, 8)}, tmp_path, job="two") as second,
    ):
        await first.manager.update_weights(1)
        await second.manager.update_weights(1)
        assert first.replicas[0].weights["w"].sum() == 0
        assert second.replicas[0].weights["w"].sum() == 64
