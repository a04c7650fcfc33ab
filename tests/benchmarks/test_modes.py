"""What the comparison of the modes makes out of the files of a run. Whole runs are tested in `tests/e2e`."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import command, modes
from benchmarks.modes_analysis import analyse, complement, intersection, seconds, union, working
from benchmarks.report import target
from verl.utils.config import ConfigError
from verl.utils.timing import Span, write_spans

STEPS = 4
WARM_UP = 1
COOL_DOWN = 1


def span(role, name, start_s, stop_s, version=None):
    return Span(role=role, name=name, start_s=start_s, stop_s=stop_s, version=version)


def test_points_of_overlapping_intervals_count_once():
    merged = union([(5, 7), (1, 3), (2, 4), (7, 8)])
    assert merged == [(1, 4), (5, 8)]
    assert seconds(merged) == 6
    assert intersection(merged, [(0, 2), (3, 6)]) == [(1, 2), (3, 4), (5, 6)]
    assert intersection(merged, complement([(2, 6)])) == [(1, 2), (6, 8)]


def test_an_engine_that_has_requests_and_is_paused_does_not_work():
    spans = [
        span("replica-0", "generating", 0, 10),
        span("replica-0", "paused", 4, 6),
        span("replica-1", "generating", 4, 6),
    ]
    assert working(spans, "replica-0") == [(0, 4), (6, 10)]


@pytest.fixture
def finished(tmp_path):
    """Ten seconds a step: 4 of waiting, 5 of work, 1 of syncing, in which staging takes half a second."""
    spans, records, reports = [], [{"step": 0, "val-core/sums/reward/mean@1": 0.25}], []
    for step in range(1, STEPS + 1):
        at = 1000.0 + 10 * step
        spans += [
            span("trainer", "gen", at, at + 4, step),
            span("trainer", "update_weights", at + 9, at + 10, step),
            span("trainer", "step", at, at + (13 if step == STEPS else 10), step),
            span("replica-0", "generating", at, at + 4),
            span("sync", "stage", at + 9.2, at + 9.7, step),
            span("replica-0", "generating", at + 9.2, at + 9.6),
            span("replica-0", "paused", at + 9.5, at + 10, step),
            span("replica-0", "loading", at + 9.6, at + 9.9, step),
        ]
        records.append(
            {
                "step": step,
                "timing_s/gen": 4.0,
                "timing_s/step": 10.0,
                "timing_s/update_weights": 1.0,
                "perf/total_num_tokens": 500,
                "training/staleness/mean": 0.5,
                "training/staleness/max": step,
                "critic/score/mean": 0.1 * step,
            }
        )
        reports.append(
            {
                "version": step,
                "outcome": "committed",
                "nbytes_needed": 8,
                "trainer_blocked_s": 0.2,
                "total_s": 0.9,
                "paused_s": {"replica-0": 0.6},
            }
        )
    spans.append(span("trainer", "testing", at + 10, at + 13, STEPS))
    records[-1] |= {"timing_s/testing": 3.0, "timing_s/step": 13.0, "val-core/sums/reward/mean@1": 0.75}
    write_spans(tmp_path / "timeline.jsonl", spans)
    for name, lines in (("metrics", records), ("sync_reports", reports)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_run_is_summed_up_without_its_first_and_last_steps_and_without_validation(finished):
    found = analyse(finished, WARM_UP, COOL_DOWN)
    assert found["steps"] == STEPS - WARM_UP - COOL_DOWN
    assert found["tokens_per_s"] == pytest.approx(50)
    assert found["trainer_idle_ratio"] == pytest.approx(0.4)
    assert found["sync_ratio"] == pytest.approx(0.1)
    assert found["rollout_idle_ratio"] == pytest.approx(1 - 4.3 / 10)
    assert (found["staleness_mean"], found["staleness_max"]) == (0.5, STEPS - COOL_DOWN)
    assert (found["reward_before"], found["reward_after"]) == (0.25, 0.75)
    assert (found["sync_seen_s"], found["paused_s"]) == (1.0, 0.6)
    assert found["load_s"] == pytest.approx(0.3)
    assert found["paused_of_load"] == pytest.approx(2)
    assert found["generating_while_staging"] == pytest.approx(0.3 / 0.5)


def test_a_run_of_which_no_step_counts_is_refused(finished):
    with pytest.raises(ValueError, match=r"has 4 steps, no more than the 3 \+ 1 that do not count"):
        analyse(finished, 3, 1)


def test_verdicts_follow_from_the_numbers(finished):
    found = analyse(finished, WARM_UP, COOL_DOWN)
    busier = {**found, "trainer_idle_ratio": 0.1, "paused_of_load": 1.1}
    targets = modes.targets({"hybrid": found, "fully_async_policy": busier}, vanilla_s=30.0)
    assert targets["trainer_idle_ratio"] == target(0.1, found["trainer_idle_ratio"], "below")
    assert targets["sync_shorter_by"] == target(30.0, 20.0, "at least")
    assert targets["sync_shorter_by"]["reached"]
    assert targets["pause_of_load"]["reached"]
    targets = modes.targets({"hybrid": busier, "fully_async_policy": found}, vanilla_s=10.0)
    assert [name for name, row in targets.items() if row["reached"]] == ["generating_while_staging"]
    assert modes.targets({"hybrid": found}, vanilla_s=1.0) == {}


def test_table_and_plot_are_made_of_what_was_measured(finished, tmp_path):
    found = {mode: analyse(finished, WARM_UP, COOL_DOWN) for mode in modes.MODES}
    result = {
        "settings": vars(modes.Settings()),
        "model": {"nbytes": 2**20},
        "modes": found,
        "vanilla_s": 0.5,
        "targets": modes.targets(found, 0.5),
    }
    assert modes.report(result).write(tmp_path, "this machine") == ["tables.md", "plot.png"]
    written = (tmp_path / "tables.md").read_text()
    assert "fully asynchronous" in written
    assert "this machine" in written
    assert written.count("reached") == len(result["targets"]) == 4
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_job_is_the_same_in_every_mode(tmp_path):
    arguments = ["--output", str(tmp_path), "trainer.seed=7"]
    settings, output = command.parse("modes", "", modes.Settings, arguments)
    assert output == tmp_path
    hybrid, one_step, fully = (settings.arguments(mode, tmp_path) for mode in modes.MODES)
    assert hybrid == one_step
    assert [word for word in fully if word not in hybrid] == [
        "async_training.trigger_parameter_sync_step=2",
        "async_training.staleness_threshold=0.5",
    ]
    assert fully[-1] == "trainer.seed=7"


def test_steps_among_which_no_sync_is_measured_are_refused():
    with pytest.raises(ConfigError, match="--steps 9 leaves no sync between --warm-up 4 and --cool-down 4"):
        modes.Settings(steps=9)


@pytest.mark.cells(3)
def test_a_run_that_fails_ends_the_benchmark_with_its_last_words(tmp_path, capsys):
    code = modes.main(["data.train_batchsize=3", "--output", str(tmp_path), "--modes", "hybrid"])
    assert code == 2
    error = capsys.readouterr().err
    assert "hybrid ended with exit code 2" in error
    assert "Did you mean 'data.train_batch_size'?" in error


def test_a_run_that_takes_too_long_is_told_to_stop():
    with modes.started([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.5) as process:
        assert process.wait(60) == 124


def test_results_of_an_earlier_run_are_not_mixed_with_new_ones(finished, tmp_path):
    settings = modes.Settings(modes=["hybrid"])
    (tmp_path / "old").mkdir()
    (finished / "timeline.jsonl").rename(tmp_path / "old" / "timeline.jsonl")
    (tmp_path / "old").rename(tmp_path / "hybrid")
    with pytest.raises(ConfigError, match="choose another --output"):
        modes.measure(settings, tmp_path)
