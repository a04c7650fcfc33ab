import json
import math
import os
import sys

import pytest

from verl.utils.config import ConfigError
from verl.utils.tracking import Tracking, read_metrics
from verl.utils.tracking_services import SERVICES, Histogram, Sample, mlflow_name


def track(tmp_path, *backends, **options):
    return Tracking("project", "experiment", backends, tmp_path / "out", {"actor": {"lr": 1e-6}}, **options)


def log_steps(tmp_path, *steps, resume_step=0, value=0.5):
    with track(tmp_path, "jsonl", resume_step=resume_step) as tracking:
        for step in steps:
            tracking.log({"critic/score/mean": value}, step)


def test_jsonl_has_one_object_per_step_on_disk_as_soon_as_it_is_logged(tmp_path):
    path = tmp_path / "out" / "metrics.jsonl"
    with track(tmp_path, "jsonl") as tracking:
        tracking.log({"a": 1, "b/c": 0.25}, 1)
        assert read_metrics(path) == [{"step": 1, "a": 1.0, "b/c": 0.25}]
        tracking.log({"a": math.nan, "b/c": math.inf}, 2)
    assert path.read_text().splitlines()[1] == '{"step": 2, "a": null, "b/c": null}'


def test_a_resumed_run_repeats_no_step_and_loses_no_record(tmp_path):
    log_steps(tmp_path, 1, 2, 3, value=0.1)
    log_steps(tmp_path, 3, 4, resume_step=2, value=0.9)
    out = tmp_path / "out"
    got = [(record["step"], record["critic/score/mean"]) for record in read_metrics(out / "metrics.jsonl")]
    assert got == [(1, 0.1), (2, 0.1), (3, 0.9), (4, 0.9)]
    assert [record["step"] for record in read_metrics(out / "metrics-1.jsonl")] == [1, 2, 3]


def test_a_run_that_goes_back_repeats_no_step_and_loses_no_record(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    with track(tmp_path, "jsonl", "tensorboard") as tracking:
        for step, value in ((1, 0.25), (2, 0.25), (3, 0.25)):
            tracking.log({"a": value}, step)
        tracking.go_back(1)
        for step, value in ((2, 0.5), (3, 0.5)):
            tracking.log({"a": value}, step)
    again = [(1, 0.25), (2, 0.5), (3, 0.5)]
    assert [(record["step"], record["a"]) for record in read_metrics(out / "metrics.jsonl")] == again
    assert [record["step"] for record in read_metrics(out / "metrics-1.jsonl")] == [1, 2, 3]
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == again


def test_a_run_from_the_start_keeps_the_records_of_the_one_before(tmp_path):
    for value in (0.1, 0.2, 0.3):
        log_steps(tmp_path, 0, 1, value=value)
    files = ("metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl")
    assert [read_metrics(tmp_path / "out" / file)[0]["critic/score/mean"] for file in files] == [0.1, 0.2, 0.3]


def test_a_line_cut_short_by_a_kill_does_not_spoil_the_file(tmp_path):
    log_steps(tmp_path, 1)
    path = tmp_path / "out" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "a"')
    assert [record["step"] for record in read_metrics(path)] == [1]
    log_steps(tmp_path, 2, resume_step=2)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2: not a record"):
        read_metrics(path)


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with track(tmp_path, "tensorboard") as tracking:
        tracking.log({"actor/pg_loss": 0.5}, 1)
        tracking.log({"actor/pg_loss": 0.25}, 2)
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/pg_loss")] == [(1, 0.5), (2, 0.25)]
    assert "config/text_summary" in events.Tags()["tensors"]


def test_tensorboard_draws_histograms_and_others_do_without(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with track(tmp_path, "tensorboard", "jsonl") as tracking:
        tracking.log({"a": 1}, 1, {"changed": Histogram((1e-3, 0.1, 1.0), (5, 0, 2))})
    (event,) = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload().Histograms("changed")
    drawn = event.histogram_value
    assert (event.step, drawn.num, drawn.bucket_limit, drawn.bucket) == (1, 7, [1e-3, 0.1, 1.0], [5, 0, 2])
    assert read_metrics(tmp_path / "out" / "metrics.jsonl") == [{"step": 1, "a": 1.0}]


def test_tensorboard_writes_where_verls_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "elsewhere"))
    with track(tmp_path, "tensorboard") as tracking:
        tracking.log({"a": 1.0}, 1)
    assert [*(tmp_path / "elsewhere").glob("events.out.tfevents.*")]
    assert not (tmp_path / "out" / "tensorboard").exists()


def test_several_backends_get_the_same_step(tmp_path, capsys):
    with track(tmp_path, "console", "jsonl", total_steps=7) as tracking:
        tracking.log({"critic/score/mean": 0.5}, 3)
    assert capsys.readouterr().out == "step 3/7 | reward 0.500\n"
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text()) == {"step": 3, "critic/score/mean": 0.5}


def test_a_missing_package_is_an_error_before_work_starts_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import fails, installed or not
    with pytest.raises(ConfigError, match=r"needs the package 'wandb': pip install 'verl-sync\[wandb\]'"):
        track(tmp_path, "jsonl", "wandb")


def test_a_service_that_fails_later_is_told_and_the_others_get_the_step(tmp_path, monkeypatch, caplog):
    (tmp_path / "trackio.py").write_text(
        "def init(**_): pass\ndef finish(): pass\ndef log(*_, **__): raise ValueError('no such name')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with track(tmp_path, "trackio", "jsonl") as tracking:
        tracking.log({"a": 1}, 5)
    del sys.modules["trackio"]
    assert "metrics of step 5 are not with TrackioTracker: ValueError: no such name" in caplog.text
    assert read_metrics(tmp_path / "out" / "metrics.jsonl") == [{"step": 5, "a": 1.0}]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("val-core/openai/gsm8k/acc/mean@4", "val-core/openai/gsm8k/acc/mean_at_4"),
        ("val-core//data/math (v2)/reward", "val-core/data/math _v2_/reward"),
        ("val-core/../数学/acc", "val-core/数学/acc"),
    ],
)
def test_mlflow_gets_names_that_it_takes(name, taken):
    assert mlflow_name(name) == taken


def test_tensorboard_shows_samples_of_the_validation(tmp_path):
    with track(tmp_path, "console", "tensorboard") as tracking:
        tracking.log_samples([Sample("1+1=", "2", 1.0)], 4)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    (shown,) = events.Tensors("val/generations/text_summary")
    assert (shown.step, shown.tensor_proto.string_val[0].decode()) == (4, "1: 1+1=\n\n2")


def test_a_service_that_cannot_start_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text("def init(**_): raise RuntimeError('no login\\nread https://example.org')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="^trainer.logger=trackio cannot start: RuntimeError: no login$"):
        track(tmp_path, "trackio")
    del sys.modules["trackio"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_without_its_package_is_told_before_work_starts(tmp_path, monkeypatch, service):
    monkeypatch.setitem(sys.modules, service, None)
    with pytest.raises(ConfigError, match=rf"trainer.logger={service} needs .*: pip install 'verl-sync\[{service}\]'"):
        track(tmp_path, "jsonl", service)


def test_an_unknown_backend_is_named_with_the_nearest_known_one(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        track(tmp_path, "tensorbord")
    assert not (tmp_path / "out").exists()


def test_an_output_directory_that_cannot_be_made_is_an_error_before_work_starts(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match=r"output directory .*out cannot be made"):
        track(tmp_path, "jsonl")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_directory_without_write_permission_is_an_error_before_work_starts(tmp_path):
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="is not writable"):
        track(tmp_path, "jsonl")
