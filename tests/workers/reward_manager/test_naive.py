import asyncio
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from verl.protocol import DataProto
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError
from verl.utils.reward_score import NoNumber, Scored, default_compute_score, load_reward_function
from verl.utils.reward_score.process import SHOWN_CHARACTERS, call
from verl.workers.config import CustomRewardFunctionConfig
from verl.workers.reward_manager import NaiveRewardManager, RewardError

TOKENIZER = build_tokenizer()
PROMPT_LENGTH, RESPONSE_LENGTH = 4, 5


def make_batch(responses, truths=None):
    """Responses as the rollout engine returns them: text, end token, padding."""
    rows = [[*TOKENIZER.encode(text), TOKENIZER.eos_token_id][:RESPONSE_LENGTH] if text else [] for text in responses]
    padded = [row + [TOKENIZER.pad_token_id] * (RESPONSE_LENGTH - len(row)) for row in rows]
    mask = [[1] * (PROMPT_LENGTH + len(row)) + [0] * (RESPONSE_LENGTH - len(row)) for row in rows]
    return DataProto.from_dict(
        tensors={"responses": torch.tensor(padded), "attention_mask": torch.tensor(mask)},
        non_tensors={
            "uid": [f"uid-{index}" for index in range(len(rows))],
            "data_source": ["builtin/arithmetic"] * len(rows),
            "reward_model": [{"ground_truth": truth} for truth in truths or responses],
            "extra_info": [{"index": index} for index in range(len(rows))],
        },
    )


def test_the_score_stands_on_the_last_valid_token_and_nowhere_else():
    batch = make_batch(["82", "7", "12345"], truths=["82", "8", "12345"])
    output = NaiveRewardManager(TOKENIZER, default_compute_score)(batch)
    assert output.reward_tensor.dtype == torch.float32
    assert output.reward_tensor.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert output.responses == ["82", "7", "12345"]
    assert output.extra_info == {"acc": output.reward_tensor.sum(-1).tolist()}


def test_an_empty_response_is_scored_but_has_no_token_to_carry_it():
    output = NaiveRewardManager(TOKENIZER, lambda **sample: {"score": 1.0, "seen": sample["solution_str"]})(
        make_batch(["", "8"])
    )
    assert output.extra_info == {"seen": ["", "8"]}
    assert output.reward_tensor.tolist() == [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]


def test_further_entries_of_a_dict_are_kept_per_sample():
    def compute_score(*, solution_str, extra_info, **_):
        return {"score": 0.5, "length": len(solution_str)} | ({"first": True} if extra_info["index"] == 0 else {})

    output = NaiveRewardManager(TOKENIZER, compute_score)(make_batch(["1", "22"]))
    assert output.extra_info == {"length": [1, 2], "first": [True, None]}
    assert output.reward_tensor.sum(-1).tolist() == [0.5, 0.5]


NUMBERS = [
    1,
    True,
    0.25,
    Fraction(1, 4),
    Decimal("0.25"),
    torch.tensor(0.25),
    torch.tensor([1]),
    torch.tensor(0.25, dtype=torch.bfloat16),
    torch.tensor(True),
    np.float64(0.25),
    np.float32(0.25),
    np.float16(0.25),
    np.int64(3),
    np.uint8(3),
    np.bool_(True),
    np.array(0.25),
    np.array(True),
    np.array([3]),
    np.array(0.25, dtype=object),
]


@pytest.mark.parametrize("score", NUMBERS, ids=lambda value: f"{type(value).__name__}-{value}")
def test_any_finite_number_is_a_score(score):
    with asyncio.Runner() as runner:
        assert call(lambda: score, {}, runner) == Scored(float(score), {"acc": float(score)})
        assert call(lambda: {"score": score, "other": score}, {}, runner).score == float(score)


NO_NUMBERS = [
    float("nan"),
    float("inf"),
    None,
    "1.0",
    1j,
    [1.0],
    np.array([1.0, 2.0]),
    np.str_("1.0"),
    np.datetime64("2026-01-01"),
    np.float32("nan"),
    1e39,
    10**400,
    Decimal("sNaN"),
    {"points": 1.0},
    {"score": float("nan")},
]


@pytest.mark.parametrize("score", NO_NUMBERS, ids=lambda value: f"{value}"[:30])
def test_a_result_that_is_no_finite_number_is_no_score(score):
    with asyncio.Runner() as runner:
        assert call(lambda: score, {}, runner) == NoNumber(str(score)[:SHOWN_CHARACTERS])


def test_a_result_that_is_no_finite_number_names_the_sample():
    manager = NaiveRewardManager(TOKENIZER, lambda *, extra_info, **_: "1" if extra_info["index"] == 1 else 0.0)
    expected = r"returned 1 instead of a finite number.* sample 1 \(uid uid-1, data_source .*, response '22'\)"
    with pytest.raises(RewardError, match=expected):
        manager(make_batch(["1", "22"]))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_reward_function_that_raises_names_the_sample_and_is_the_cause(num_workers):
    def compute_score(*, solution_str, **_):
        return 1 / (len(solution_str) - 2)

    with pytest.raises(RewardError, match=r"raised ZeroDivisionError: .* on sample 1 \(uid uid-1.*'22'") as info:
        NaiveRewardManager(TOKENIZER, compute_score, num_workers)(make_batch(["1", "22", "333"]))
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_a_data_source_without_a_rule_is_the_users_to_fix():
    batch = make_batch(["1"])
    batch.non_tensor_batch["data_source"][0] = "my/data"
    with pytest.raises(ConfigError, match="my/data"):
        NaiveRewardManager(TOKENIZER, default_compute_score)(batch)


def test_processes_score_at_once_and_keep_the_order(tmp_path):
    def compute_score(*, solution_str, **_):
        (tmp_path / solution_str).touch()
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"score": float(solution_str), "together": len(list(tmp_path.iterdir())) == 3}

    with NaiveRewardManager(TOKENIZER, compute_score, num_workers=3) as manager:
        output = manager(make_batch(["3", "1", "2"]))
    assert output.reward_tensor.sum(-1).tolist() == [3.0, 1.0, 2.0]
    assert output.extra_info["together"] == [True] * 3


HANGING = """
import asyncio, os, signal, subprocess, sys, time

def sleeps(): time.sleep(600)
def never_lets_go_of_the_lock(): 9 ** 9 ** 9 ** 9
def ignores_signals():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: pass
async def awaits_for_ever(): await asyncio.Event().wait()
def waits_for_a_process(): subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])
def dies(): os.kill(os.getpid(), signal.SIGKILL)
def exits(): os._exit(3)

def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, how, begun):
    if solution_str != "22":
        return {"score": 1.0, "acc": True, "process": os.getpid()}
    open(begun, "w").close()
    return globals()[how]()
"""


class Clock:
    """An hour passes at each look while all that is not done are `hanging` samples, and `begun()`."""

    def __init__(self, begun, *hanging):
        self._begun, self._hanging, self._hours, self.manager = begun, hanging, 0, None

    def __call__(self):
        workers = self.manager._pool._workers if self.manager else []
        doing = [position for worker in workers for position in worker.positions]
        if doing and set(doing) <= set(self._hanging) and all(worker.ready for worker in workers):
            self._hours += bool(self._begun())
        return time.monotonic() + 3600 * self._hours


@pytest.mark.parametrize(
    ("how", "why", "num_workers"),
    [
        ("sleeps", "longer than reward_model.timeout_s=30", 2),
        ("never_lets_go_of_the_lock", "longer than reward_model.timeout_s=30", 1),
        ("ignores_signals", "longer than reward_model.timeout_s=30", 2),
        ("awaits_for_ever", "longer than reward_model.timeout_s=30", 1),
        ("waits_for_a_process", "longer than reward_model.timeout_s=30", 2),
        ("dies", "its process was killed by signal 9", 1),
        ("dies", "its process was killed by signal 9", 2),
        ("exits", "its process ended with exit code 3", 1),
    ],
)
def test_a_response_whose_scoring_does_not_end_is_named_and_gets_0(tmp_path, caplog, num_workers, how, why):
    (tmp_path / "reward.py").write_text(HANGING)
    begun = tmp_path / "begun"
    given = {"how": how, "begun": str(begun)}
    config = CustomRewardFunctionConfig(path=str(tmp_path / "reward.py"), reward_kwargs=given)
    clock = Clock(begun.exists, *([1] if "timeout_s" in why else []))
    with NaiveRewardManager(TOKENIZER, load_reward_function(config), num_workers, clock=clock) as manager:
        clock.manager = manager
        output = manager(make_batch(["1", "22", "333", "4"]))
    assert output.reward_tensor.sum(-1).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert output.abandoned == [1]
    assert output.extra_info["acc"] == [True, 0.0, True, True]
    assert output.first_failure.startswith("sample 1 (")
    assert why in output.first_failure
    [record] = [record for record in caplog.records if record.name.startswith("verl.")]
    assert "sample 1 (uid uid-1, data_source builtin/arithmetic, response '22')" in record.message
    assert why in record.message


def test_samples_that_hang_are_told_of_one_by_one_and_scoring_ends_when_there_are_too_many(tmp_path):
    seen = tmp_path / "seen"

    def compute_score(solution_str, **_):
        with seen.open("a") as file:
            file.write(solution_str)
        time.sleep(600)

    told = []
    clock = Clock(lambda: seen.exists() and len(seen.read_text()) > len(told), 0, 1)

    def given_up(failure):
        told.append(failure)
        if len(told) == 2:
            raise RewardError("enough")

    with (
        NaiveRewardManager(TOKENIZER, compute_score, clock=clock) as manager,
        pytest.raises(RewardError, match="enough"),
    ):
        clock.manager = manager
        manager(make_batch(["1", "2", "3", "4"]), given_up)
    assert seen.read_text() == "12"
    assert [failure.split(" (")[0] for failure in told] == ["sample 0", "sample 1"]


def test_what_a_hanging_function_has_started_ends_with_it(tmp_path):
    file = tmp_path / "pid"

    def compute_score(**_):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        file.write_text(str(child.pid))
        child.wait()

    clock = Clock(lambda: file.exists() and file.read_text(), 0)
    with NaiveRewardManager(TOKENIZER, compute_score, clock=clock) as manager:
        clock.manager = manager
        assert manager(make_batch(["1"])).abandoned == [0]
    deadline = time.monotonic() + 60
    while (runs := _runs(int(file.read_text()))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_power_tower_of_a_response_does_not_hang_the_math_rule(num_workers):
    batch = make_batch(["1", "22"])
    batch.non_tensor_batch["data_source"][:] = "numina_cn_k12"
    manager = NaiveRewardManager(TOKENIZER, default_compute_score, num_workers, timeout_s=20)
    manager._texts = lambda _: [r"$\\boxed{9^{9^{9^{9}}}}$", "$22$"]  # longer than the batch's tokens
    with manager:
        output = manager(batch)
    assert output.reward_tensor.sum(-1).tolist() == [0.0, 1.0]


def test_coroutines_are_awaited_on_one_loop():
    async def compute_score(*, solution_str, **_):
        await asyncio.sleep(0)
        return {"score": float(solution_str), "loop": id(asyncio.get_running_loop())}

    output = NaiveRewardManager(TOKENIZER, compute_score)(make_batch(["1", "22"]))
    assert output.reward_tensor.sum(-1).tolist() == [1.0, 22.0]
    assert len(set(output.extra_info["loop"])) == 1


def test_what_cannot_be_pickled_works_by_the_name_of_its_file(tmp_path):
    (tmp_path / "reward.py").write_text(
        "import threading\n"
        "class Scorer:\n"
        "    lock = threading.Lock()\n"
        "    async def __call__(self, **sample): return len(sample['solution_str'])\n"
        "compute_score = Scorer()\n"
    )
    function = load_reward_function(CustomRewardFunctionConfig(path=str(tmp_path / "reward.py")))
    assert NaiveRewardManager(TOKENIZER, function)(make_batch(["1", "22"])).reward_tensor.sum(-1).tolist() == [1, 2]


def test_a_function_that_no_process_can_have_is_refused_with_the_remedy():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="name its file in custom_reward_function.path"):
        NaiveRewardManager(TOKENIZER, lambda **_: lock.locked())


def test_a_file_that_only_loads_on_the_driver_is_an_error_not_a_score(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(**_): return 1.0\n")
    function = load_reward_function(CustomRewardFunctionConfig(path=str(path)))
    path.unlink()
    with pytest.raises(RewardError, match="cannot be loaded: ConfigError: .*no such file"):
        NaiveRewardManager(TOKENIZER, function)(make_batch(["1"]))


def test_further_entries_are_plain_whatever_they_were():
    def compute_score(**_):
        return {"score": 1, "a": np.float32(0.5), "b": np.bool_(True), "c": np.array([1, 2]), "d": object, "e": None}

    output = NaiveRewardManager(TOKENIZER, compute_score)(make_batch(["1"]))
    expected = {"a": [0.5], "b": [True], "c": [[1, 2]], "d": [str(object)], "e": [None]}
    assert output.extra_info == expected
    assert output.extra_info["b"][0] is True


def test_the_function_sees_special_tokens_if_asked_for_but_not_the_end():
    special = AddedToken("<think>", special=True)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    think, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "</tool_call>"))
    ids = torch.tensor([[think, *tokenizer.encode("7"), tokenizer.eos_token_id]])
    batch = make_batch(["1"])
    batch.batch["responses"] = torch.nn.functional.pad(ids, (0, RESPONSE_LENGTH - ids.shape[1]))
    batch.batch["attention_mask"] = torch.tensor([[1] * (PROMPT_LENGTH + 3) + [0] * (RESPONSE_LENGTH - 3)])
    for keep, expected in ((False, "7"), (True, "<think>7")):
        assert NaiveRewardManager(tokenizer, lambda **_: 1, keep_special_tokens=keep)(batch).responses == [expected]
        batch.batch["responses"][0, 2] = end  # of the model, which the tokenizer does not know as one
        found = NaiveRewardManager(tokenizer, lambda **_: 1, keep_special_tokens=keep, end_token_ids=[end])(batch)
        assert found.responses == [expected]
        batch.batch["responses"][0, 2] = tokenizer.eos_token_id
