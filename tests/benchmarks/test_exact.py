"""What the proof of exact mode makes out of the files of runs. Whole runs are tested in `tests/e2e`."""

from __future__ import annotations

import json

import pytest

from benchmarks import exact

STEPS = 4


@pytest.fixture
def finished(tmp_path):
    """A run whose first step is slow, and in whose third one a token differs."""
    (tmp_path / "samples").mkdir()
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            record = {
                "step": step,
                "training/rollout_probs_diff_max": 0.25 * (step == 3),
                "training/rollout_probs_diff_mean": 0.01 * (step == 3),
                "actor/ppo_kl": -0.5 * (step == 3),
                "actor/grad_norm": 0.1 * step,
                "critic/score/mean": 0.2 * step,
                "timing_s/step": 9.0 if step == 1 else step,
                **{f"timing_s/{name}": 1.0 for name in ("gen", "old_log_prob", "update_actor")},
            }
            file.write(json.dumps(record) + "\n")
            row = json.dumps({"response_ids": [1, 2, 3]}) + "\n"
            (tmp_path / "samples" / f"{step}.jsonl").write_text(row * 2)
    return tmp_path


def test_a_run_is_complete_with_its_last_step(finished):
    assert exact._complete(finished, STEPS)
    assert not exact._complete(finished, STEPS + 1)
    assert not exact._complete(finished / "elsewhere", 1)


def test_seconds_are_medians_after_the_first_steps_and_a_difference_is_told(finished):
    found = exact._analyse(finished, 1)
    assert (found["steps"], found["tokens"], found["step_s"]) == (STEPS, STEPS * 6, 3.0)
    told = exact._proof("qwen2", "exact", found)
    assert (told["differing"], told["largest `ppo_kl`"]) == ("1 steps", "0.5")


def test_the_report_compares_both_jobs_of_a_family_and_proves_the_exact_one_alone(finished):
    found = exact._analyse(finished, 1)
    measured = {"qwen2": {"default": found, "exact": found | {"step_s": 6.0}}}
    settings = {"steps": STEPS, "warm_up": 1, "prompts": 8, "responses": 2}
    report = exact.report({"settings": settings, "measured": measured, "targets": exact._targets(measured)})
    text = report.text("here")
    assert "2.00" in text
    assert "2.00 (target: at most 1.30): NOT reached" in text
    assert text.count(exact.CASES["exact"].what) == 1
    assert exact.CASES["default"].what not in text
    assert [len(points) for points in report.panels[0].series.values()] == [STEPS, STEPS]


def test_long_prompts_fit_and_share_their_beginnings(tmp_path):
    import pyarrow.parquet as pq

    exact.make_long_prompts(tmp_path / "long.parquet")
    asked = [row[0]["content"] for row in pq.read_table(tmp_path / "long.parquet")["prompt"].to_pylist()]
    assert max(map(len, asked)) + 3 <= exact.LONGEST_PROMPT
    assert len({text[:60] for text in asked}) == 1
    assert sum(len(text) > exact.BLOCK for text in asked) > len(asked) / 3
