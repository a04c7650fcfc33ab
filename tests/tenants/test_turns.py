"""In which order the work of several queues is done, on the thread and beside it."""

import threading

import pytest

from verl.tenants.turns import Turns

DEADLINE_S = 60


@pytest.fixture
def turns():
    made = Turns()
    yield made
    made.close()


class Held:
    """Work that begins, and ends when it is told to."""

    def __init__(self):
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, *_):
        self.begun.set()
        assert self.goes_on.wait(DEADLINE_S)


def test_what_has_waited_longest_comes_first_of_whatever_queue(turns):
    done, first = [], Held()
    waited = [turns.submit("busy", first)]
    first.begun.wait(DEADLINE_S)
    for name, *write in (("a",), ("b",), ("c", lambda _: None)):
        waited.append(turns.submit(name, lambda name=name: done.append(name), *write))
    waited.append(turns.submit("a", lambda: done.append("a's copy"), lambda _: None))
    first.goes_on.set()
    for each in waited:
        each.result(DEADLINE_S)
    assert done == ["a", "b", "c", "a's copy"]


def test_a_queue_goes_on_when_its_copy_is_written_and_others_go_on_meanwhile(turns):
    done, write = [], Held()
    saved = turns.submit("a", lambda: "copied", lambda copied: (write(), done.append(copied), "written")[-1])
    write.begun.wait(DEADLINE_S)
    after = turns.submit("a", lambda: done.append("after"))
    turns.submit("b", lambda: done.append("other")).result(DEADLINE_S)
    assert (done, saved.done(), after.done()) == (["other"], False, False)
    write.goes_on.set()
    after.result(DEADLINE_S)
    assert (done, saved.result(DEADLINE_S)) == (["other", "copied", "after"], "written")


def test_work_that_fails_is_told_to_who_waits_and_its_queue_goes_on(turns):
    def fails(*_):
        raise OSError("no room")

    failed = [turns.submit("a", fails), turns.submit("a", fails, len), turns.submit("a", str, fails)]
    assert turns.submit("a", lambda: "after").result(DEADLINE_S) == "after"
    assert [str(each.exception(DEADLINE_S)) for each in failed] == ["no room"] * 3


def test_closed_turns_end_what_is_under_way_and_cancel_the_rest():
    turns, write = Turns(), Held()
    saved = turns.submit("a", str, write)
    rest = [turns.submit("a", str) for _ in range(3)]
    write.begun.wait(DEADLINE_S)
    closing = threading.Thread(target=turns.close)
    closing.start()
    write.goes_on.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert saved.result(DEADLINE_S) is None
    assert all(each.cancelled() for each in rest)
