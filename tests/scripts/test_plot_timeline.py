import subprocess
import sys
from pathlib import Path

import pytest

from scripts.plot_timeline import parsed, waits_within_syncs, window
from verl.utils.timing import Span, read_spans, write_spans

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_timeline.py"


@pytest.fixture
def run_dir(tmp_path):
    spans = []
    for step in (1, 2, 3):
        start_s = 1000.0 + 10 * step
        spans += [
            Span(role="trainer", name=name, start_s=start_s + first, stop_s=start_s + last, version=step)
            for name, first, last in (("gen", 0, 4), ("update_actor", 4, 8), ("update_weights", 8, 10), ("step", 0, 10))
        ]
        spans.append(Span(role="replica-0", name="generating", start_s=start_s, stop_s=start_s + 4))
        spans.append(Span(role="sync", name="publish", start_s=start_s + 8, stop_s=start_s + 9, version=step))
    write_spans(tmp_path / "timeline.jsonl", spans)
    return tmp_path


def plot(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def test_a_picture_of_some_steps_is_drawn(run_dir):
    done = plot(run_dir, "--steps", "2:3")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes().startswith(b"\x89PNG")


def test_the_picture_begins_and_ends_with_the_chosen_steps(run_dir):
    spans = read_spans(run_dir / "timeline.jsonl")
    assert window(spans, None) == (1010.0, 1040.0)
    assert window(spans, parsed("2")) == (1020.0, 1030.0)
    with pytest.raises(ValueError, match="none of these steps"):
        window(spans, (7, 9))


def test_a_trainer_that_waits_for_a_sync_that_waits_for_generation_waits_for_samples():
    spans = [
        Span(role="sync", name="wait", start_s=11, stop_s=14, version=1),
        Span(role="trainer", name="update_weights", start_s=10, stop_s=15, version=1),
        Span(role="trainer", name="update_weights", start_s=20, stop_s=21, version=2),
    ]
    assert waits_within_syncs(spans) == [Span(role="trainer", name="gen", start_s=11, stop_s=14)]


def test_what_is_missing_is_named(tmp_path, run_dir):
    assert "every run writes one" in plot(tmp_path / "nowhere").stderr
    assert "like 3:8, not 'a:b'" in plot(run_dir, "--steps", "a:b").stderr
