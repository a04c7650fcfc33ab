import logging
import re
import time

import pytest

from verl.utils import profiler
from verl.utils.profiler import simple_timer
from verl.utils.timing import Patience, Span, SpanLog, go_back, marked_timer, read_spans, write_spans


def test_the_same_name_accumulates_within_a_step():
    timings, began = {}, time.perf_counter()
    for _ in range(2):
        with marked_timer("gen", timings):
            time.sleep(0.01)
    assert 0.02 <= timings["gen"] <= time.perf_counter() - began


@pytest.mark.parametrize(("timer", "options"), [(simple_timer, {}), (profiler.marked_timer, {"color": "red"})])
def test_timers_of_verls_names_add_up(timer, options):
    timings = {"gen": 1.0}
    with pytest.raises(KeyError), timer("gen", timings, **options):
        time.sleep(0.01)
        raise KeyError
    assert timings["gen"] >= 1.01


def test_a_phase_that_fails_is_still_timed_and_recorded():
    timings, log = {}, SpanLog("trainer")
    before_s = time.time()
    with pytest.raises(KeyError), marked_timer("gen", timings, log, 7):
        raise KeyError
    (span,) = log.take()
    assert (span.role, span.name, span.version) == ("trainer", "gen", 7)
    assert span.stop_s - span.start_s == pytest.approx(timings["gen"], abs=1e-4)
    assert before_s - 0.1 <= span.start_s <= time.time() + 0.1


def test_a_phase_that_goes_on_is_told_whenever_its_time_has_doubled(caplog):
    caplog.set_level(logging.INFO)
    with Patience(least_s=0.5).during("gen", "step 1: gen"):
        while len(caplog.messages) < 2:
            time.sleep(0.01)
    assert caplog.messages[:2] == ["step 1: gen has taken 0 s so far", "step 1: gen has taken 1 s so far"]


def test_a_phase_is_shown_from_its_beginning_and_told_how_far_it_is(caplog):
    caplog.set_level(logging.INFO)
    shown = []
    patience = Patience(0.05, show=shown.append, progress={"gen": lambda: lambda _: "3/8 answers"}, looks_every_s=0.01)
    with patience.during("gen", "step 1: gen"):
        assert shown[0] == "gen"
        while not caplog.messages:
            time.sleep(0.01)
    assert shown[1] == "gen 3/8 answers"
    assert caplog.messages[0] == "step 1: gen has taken 0 s so far: 3/8 answers"
    with patience.during("update_actor", "step 1: update_actor"):
        pass
    assert shown[-1] == "update_actor"


def test_a_phase_that_was_always_slow_is_told_later(caplog):
    caplog.set_level(logging.INFO)
    patience = Patience(least_s=0.05, times=100)
    with patience.during("gen", "step 1: gen"):
        time.sleep(0.1)
    caplog.clear()
    with patience.during("gen", "step 2: gen"):
        time.sleep(0.1)
    assert not caplog.messages
    with patience.during("update_actor", "step 2: update_actor"):
        while not caplog.messages:
            time.sleep(0.01)


def test_a_phase_that_hangs_is_compared_with_those_before(caplog):
    caplog.set_level(logging.INFO)
    patience, took_s = Patience(least_s=0.05), 0.0
    for step in range(2):
        began = time.perf_counter()
        with pytest.raises(KeyError), patience.during("gen", f"step {step}: gen"):
            time.sleep(0.01)
            raise KeyError
        took_s = max(took_s, time.perf_counter() - began)
    caplog.clear()  # one of them may have taken long, too
    with patience.during("gen", "step 2: gen"):
        while not caplog.messages:
            time.sleep(0.01)
    told = re.fullmatch(r"step 2: gen has taken \d+ s so far, at most (\d+\.\d) s before", caplog.messages[0])
    assert 0.0 <= float(told[1]) <= took_s + 0.05  # it is rounded


def test_requests_that_overlap_are_one_span():
    log = SpanLog("replica-0")
    with log.during("generating"):
        with log.during("generating"):
            pass
        assert len(log.take()) == 1  # what there is of it until now
        with log.during("generating"):
            pass
    with log.during("generating"):
        pass
    cut, alone = log.take()
    assert cut.stop_s <= alone.start_s
    assert log.take() == []


def test_a_span_that_goes_on_is_told_in_parts_without_a_gap():
    log = SpanLog("replica-0")
    log.begin("paused")
    (first,) = log.take()
    log.begin("paused")  # it has begun
    log.end("paused", 3)
    log.end("paused", 4)  # it has ended
    (second,) = log.take()
    assert second.start_s == pytest.approx(first.stop_s, abs=0.05)
    assert (first.version, second.version) == (None, 3)


def test_every_part_of_a_span_has_the_version_with_which_it_began():
    log = SpanLog("replica-0")
    log.begin("loading", 3)
    (first,) = log.take()
    log.end("loading")
    assert [first.version, *(span.version for span in log.take())] == [3, 3]


def test_a_timeline_is_read_as_it_was_written_without_a_line_that_a_kill_cut_short(tmp_path):
    path = tmp_path / "timeline.jsonl"
    spans = [Span(role="sync", name="stage", start_s=1.5, stop_s=2.5, version=step) for step in range(3)]
    write_spans(path, spans[:2])
    write_spans(path, spans[2:])
    path.write_text(path.read_text() + '{"role": "sync", "na')
    assert read_spans(path) == spans


def test_a_line_that_is_no_span_is_named(tmp_path):
    path = tmp_path / "timeline.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="line 1: not a span"):
        read_spans(path)


def a_run(path, first, last, start_s):
    """The timeline of a run that goes on after `first`: sync and, in each step, a span of every role."""
    spans = [("trainer", "update_weights", first), ("sync", "stage", first), ("replica-0", "loading", first)]
    for step in range(first + 1, last + 1):
        spans += [("replica-0", "generating", None), ("trainer", "gen", step), ("trainer", "testing", step)]
        spans += [("trainer", "update_weights", step), ("sync", "stage", step), ("trainer", "step", step)]
        spans += [("replica-0", "loading", step)]
    for index, (role, name, version) in enumerate(spans):
        at_s = start_s + index
        write_spans(path, [Span(role=role, name=name, start_s=at_s, stop_s=at_s + 1, version=version)])


def versions(path, role, name):
    return [span.version for span in read_spans(path) if (span.role, span.name) == (role, name)]


def test_a_resumed_run_has_each_span_of_each_step_once_in_its_timeline(tmp_path):
    path = tmp_path / "timeline.jsonl"
    a_run(path, 0, 4, start_s=100)
    go_back(path, 2, again=("update_weights",))
    a_run(path, 2, 5, start_s=1000)
    for role, name in (("trainer", "update_weights"), ("sync", "stage"), ("replica-0", "loading")):
        assert versions(path, role, name) == [0, 1, 2, 3, 4, 5], name
    for name in ("gen", "testing", "step"):
        assert versions(path, "trainer", name) == [1, 2, 3, 4, 5], name
    assert len(versions(path, "replica-0", "generating")) == 5
    assert versions(tmp_path / "timeline-1.jsonl", "trainer", "step") == [1, 2, 3, 4]


def test_what_is_measured_again_before_training_goes_on_is_there_once(tmp_path):
    path = tmp_path / "timeline.jsonl"
    a_run(path, 0, 3, start_s=100)
    go_back(path, 2, again=("update_weights", "testing"))
    assert versions(path, "trainer", "testing") == [1]


@pytest.mark.parametrize("content", [None, b"", b"rubbish\n", b"[]\n", b'{"step": 1}\n', b"\xff\n", b'{"role": "sy'])
@pytest.mark.parametrize("step", [0, 2])
def test_a_new_timeline_is_begun_in_the_place_of_one_that_is_none(tmp_path, content, step):
    path = tmp_path / "timeline.jsonl"
    if content is not None:
        path.write_bytes(content)
    go_back(path, step, again=())
    a_run(path, step, step + 1, start_s=0)
    assert versions(path, "trainer", "step") == [step + 1]
    kept = tmp_path / "timeline-1.jsonl"
    assert kept.read_bytes() == content if content else not kept.exists()


def test_a_run_from_the_start_begins_a_new_timeline(tmp_path):
    path = tmp_path / "timeline.jsonl"
    for _ in range(2):
        go_back(path, 0, again=("update_weights",))
        a_run(path, 0, 2, start_s=100)
    assert versions(path, "trainer", "step") == [1, 2]
