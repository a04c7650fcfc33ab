"""Samples of a validation against PyPI's verl: which are shown, and under which names services get them."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

from tests.originals.original import VERL, computed
from verl.trainer.ppo.samples import chosen
from verl.utils.tracking_services import SAMPLES, Sample, SwanlabTracker, TrackioTracker, WandbTracker


def drawn(seed: int, count: int) -> list[list[object]]:
    """Prompts may occur several times, with other answers."""
    draw = Random(seed)
    return [[f"prompt {draw.randrange(9)}", f"answer {number}", draw.random()] for number in range(count)]


def test_the_samples_are_those_that_verl_chooses(tmp_path):
    given = [
        {"samples": drawn(seed, size), "count": count, "services": []}
        for seed, (size, count) in enumerate([(1, 1), (12, 4), (40, 40), (7, 20), (300, 8)])
    ]
    for each, (expected, _) in zip(given, computed("choose_samples.py", given, VERL), strict=True):
        assert [list(one) for one in chosen([Sample(*one) for one in each["samples"]], each["count"])] == expected


class Recorded:
    """A package that remembers what was logged and made."""

    def __init__(self):
        self.calls = []

    def log(self, values, step):
        self.calls.append((values, step))

    def __getattr__(self, name):
        def make(*arguments, **named):
            self.calls.append((name, arguments, named))
            return self

        return make


def test_wandb_swanlab_and_trackio_get_them_under_verls_names(tmp_path):
    samples = drawn(3, 2)
    given = {"samples": samples, "count": 2, "services": ["wandb", "swanlab", "trackio"]}
    ((expected, calls),) = computed("choose_samples.py", [given], VERL)
    ours = [Sample(*each) for each in expected]
    for service in calls.values():
        assert [name for call in service for name in (call[1][0] if call[0].endswith(".log") else [])] == [SAMPLES]

    package = Recorded()
    tracker = WandbTracker.__new__(WandbTracker)
    tracker._wandb, tracker._run, tracker._rows = package, package, []
    tracker.log_samples(ours, 7)
    (_, _, table), _ = package.calls
    filled = next(arguments for name, arguments, _ in calls["wandb"] if name.endswith("add_data"))
    assert table["columns"] == calls["wandb"][0][2]["columns"]
    assert table["data"] == [filled]

    package = Recorded()
    tracker = SwanlabTracker.__new__(SwanlabTracker)
    tracker._swanlab = SimpleNamespace(echarts=package, log=package.log)
    tracker.log_samples(ours, 7)
    _, (_, (headers, rows), _), _ = package.calls
    added = next(named for name, _, named in calls["swanlab"] if name.endswith("add"))
    assert (headers, rows) == (added["headers"], added["rows"])

    package = Recorded()
    tracker = TrackioTracker.__new__(TrackioTracker)
    tracker._trackio = package
    tracker.log_samples(ours, 7)
    traces = [named for name, *_, named in calls["trackio"] if name.endswith("Trace")]
    assert [each[2] for each in package.calls if each[0] == "Trace"] == traces
