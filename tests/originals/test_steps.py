"""A step against PyPI's verl: what metrics say of a batch, how lengths are divided, what a reward manager gives."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from tests.originals.original import VERL, computed, differences
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughput_metrics, compute_timing_metrics
from verl.utils.builtin.tokenizer import END, build_tokenizer
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.workers.engine.micro_batches import MicroBatchLimits, partition
from verl.workers.reward_manager import NaiveRewardManager, OverlongPenalty

LENGTHS = ((3, 7), (1, 2), (4, 8), (2, 1), (4, 5))
WIDTH = 40
TEXTS = (f"answer 7{END}", "answer 7", f"a{END}b{END}", f"<tool_call>x</tool_call>y{END}", "x" * 30, "x" * 40, END)
BUFFER = {"len": 16, "penalty_factor": 0.5, "log": True}


def step(seed: int, *, critic: bool, empty: bool = False) -> dict[str, Any]:
    """Five sequences with prompts of up to 4 and responses of up to 8 tokens, a tool's answer in one of them."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [*LENGTHS[:-1], (4, 0)] if empty else LENGTHS
    attention = [[0] * (4 - prompt) + [1] * prompt + [1] * said + [0] * (8 - said) for prompt, said in lengths]
    mask = torch.tensor(attention)[:, 4:]
    mask[0, 2:4] = 0
    values = {name: torch.randn(5, 8, generator=draw) for name in ("advantages", "returns", "values")}
    scores = torch.randn(5, 8, generator=draw) * mask
    tensors = {
        "prompts": torch.ones(5, 4).long(),
        "responses": torch.ones(5, 8).long(),
        "attention_mask": torch.tensor(attention),
        "response_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores - 0.25 * mask,
        **(values if critic else {name: values[name] for name in ("advantages", "returns")}),
    }
    timings = {
        "gen": 2.0,
        "ref": 0.5,
        "values": 0.25,
        "adv": 0.125,
        "update_actor": 3.0,
        "update_critic": 1.0,
        "step": 8.0,
    }
    return {
        "tensors": {name: rows.tolist() for name, rows in tensors.items()},
        "turns": [2, 4, 2, 6, 2],
        "timings": timings,
        "critic": critic,
    }


STEPS = [
    step(0, critic=False),
    step(1, critic=True),
    step(2, critic=False, empty=True),
    step(3, critic=True, empty=True),
]


def partitions() -> list[dict[str, Any]]:
    draw = Random(0)
    found = []
    for count, parts in ((6, 2), (16, 4), (64, 8), (7, 3), (3, 3), (2, 3), (0, 1), (12, 1)):
        lengths = [draw.randint(1, 4096) for _ in range(count)]
        found += [{"lengths": lengths, "parts": parts, "equal_size": equal} for equal in (True, False)]
    for _ in range(150):
        parts = draw.randint(1, 9)
        count = parts * draw.randint(1, 12)
        longest = draw.choice((1, 16, 4096))
        lengths = draw.choice(
            ([draw.randint(0, longest) for _ in range(count)], [7] * count, [4096, *[1] * (count - 1)])
        )
        found.append({"lengths": lengths, "parts": parts, "equal_size": draw.random() < 0.5})
    return [
        *found,
        {"lengths": [5] * 8, "parts": 4, "equal_size": True},
        {"lengths": [9, 1, 1], "parts": 2, "equal_size": False},
    ]


def divided() -> list[dict[str, Any]]:
    draw = Random(0)
    return [
        {"lengths": [draw.randint(1, 100) for _ in range(draw.randint(2, 40))], "budget": draw.choice((100, 250, 5000))}
        for _ in range(100)
    ]


UNBALANCES = [
    [[5, 1, 7, 3], [[0, 3], [1, 2]]],
    [[5, 1, 7, 3, 9, 2], [[4], [2, 1], [0, 3, 5]]],
    [[5, 1, 7, 3], [[0, 1, 2, 3]]],
]
REWARDS = [
    {"scores": scores, "buffer": {"enable": enable, **BUFFER}}
    for enable in (False, True)
    for scores in (
        [0.5] * len(TEXTS),
        [{"score": 1.0, "acc": True, "pred": "x"}] * len(TEXTS),
        [{"score": 1.0}] * len(TEXTS),
    )
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(4096)


@pytest.fixture(scope="module")
def verls(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("steps")
    tokenizer.save_pretrained(folder)
    rewards = [{**each, "tokenizer": str(folder), "texts": TEXTS, "width": WIDTH} for each in REWARDS]
    found: dict[str, Any] = computed(
        "describe.py",
        {
            "steps": STEPS,
            "partitions": partitions(),
            "micro-batches": divided(),
            "unbalances": UNBALANCES,
            "rewards": rewards,
        },
        VERL,
    )
    return found


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_the_metrics_of_a_batch_have_verls_names_and_values(verls: dict[str, Any], number: int) -> None:
    given, theirs = STEPS[number], verls["steps"][number]
    tensors = {name: torch.tensor(rows) for name, rows in given["tensors"].items()}
    batch = DataProto.from_dict(tensors, {"__num_turns__": given["turns"]})
    ours = compute_data_metrics(batch) | compute_timing_metrics(batch, given["timings"])
    ours |= compute_throughput_metrics(batch, given["timings"], num_ranks=2)
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_lengths_are_divided_as_evenly_as_verl_divides_them(verls: dict[str, Any]) -> None:
    """Not into the same parts: the algorithm is another one."""
    ratios = []
    for given, theirs in zip(partitions(), verls["partitions"], strict=True):
        lengths = given["lengths"]
        try:
            ours = get_seqlen_balanced_partitions(lengths, given["parts"], given["equal_size"])
        except ValueError:
            assert theirs == {"error": "AssertionError"}, given
            continue
        assert sorted(index for part in ours for index in part) == [*range(len(lengths))]
        assert all(ours)
        if given["equal_size"]:
            assert len({*map(len, ours)}) == 1
        largest = [max(sum(lengths[index] for index in part) for part in parts) for parts in (ours, theirs)]
        ratios.append(largest[0] / max(largest[1], 1))
        assert ratios[-1] <= 1.05, given
    assert sum(ratios) <= 1.005 * len(ratios)
    assert differences()["parts of `get_seqlen_balanced_partitions`"]["why"]


def test_micro_batches_are_within_the_budget_and_about_as_many_as_verls(verls: dict[str, Any]) -> None:
    """Which sequences share one changes nothing that is learned."""
    counts = []
    for given, theirs in zip(divided(), verls["micro-batches"], strict=True):
        lengths, budget = given["lengths"], given["budget"]
        ours = partition([(0, length) for length in lengths], MicroBatchLimits(max_tokens=budget), packed=True)
        assert sorted(index for group in ours for index in group) == [*range(len(lengths))]
        assert all(sum(lengths[index] for index in group) <= budget for group in [*ours, *theirs])
        counts.append((len(ours), len(theirs)))
    assert sum(ours for ours, _ in counts) <= 1.01 * sum(theirs for _, theirs in counts)
    assert max(ours - theirs for ours, theirs in counts) <= 1


def test_how_many_tokens_the_ranks_have_is_told_as_verl_tells_it(verls: dict[str, Any]) -> None:
    for (lengths, parts), theirs in zip(UNBALANCES, verls["unbalances"], strict=True):
        assert log_seqlen_unbalance(lengths, parts, "global_seqlen") == theirs


@pytest.mark.parametrize("number", range(len(REWARDS)))
def test_a_reward_manager_gives_verls_scores_and_sees_its_texts(
    verls: dict[str, Any], tokenizer: Any, number: int
) -> None:
    given, theirs = REWARDS[number], verls["rewards"][number]
    rows = [tokenizer.encode(text) for text in TEXTS]
    padded = [[*row, *[tokenizer.pad_token_id] * (WIDTH - len(row))] for row in rows]
    data = DataProto.from_dict(
        {
            "responses": torch.tensor(padded),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (WIDTH - len(row)) for row in rows]),
        },
        {
            "data_source": ["s"] * len(rows),
            "reward_model": [{"ground_truth": "7"}] * len(rows),
            "extra_info": [{"index": 0}] * len(rows),
        },
    )
    score = given["scores"][0]
    buffer = given["buffer"]
    penalty = OverlongPenalty(max_length=WIDTH, buffer_length=buffer["len"], factor=buffer["penalty_factor"], log=True)

    def compute_score(**_: Any) -> Any:
        return score

    with NaiveRewardManager(tokenizer, compute_score, penalty=penalty if buffer["enable"] else None) as manager:
        output = manager(data)
    assert output.reward_tensor.sum(-1).tolist() == pytest.approx([one["score"] for one in theirs])
    assert output.responses == [one["text"] for one in theirs]
    for name in ("acc", "pred", "overlong_reward", "overlong"):
        if name in theirs[0]["extra"]:
            assert output.extra_info[name] == pytest.approx([one["extra"][name] for one in theirs]), name
    assert "score" not in output.extra_info
    assert differences()["`val-aux/<data source>/score/*`"]["why"]
