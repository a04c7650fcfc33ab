"""How members of a collective meet."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tests.checkpoint_engine.fakes import soon
from verl.checkpoint_engine.links.attempt import Attempt


class Group:
    """Whoever lets go of a real one last may have to wait for it."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """So that what refers to itself stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("awaited", [True, False], ids=["its error is raised", "nobody waits for it any more"])
def test_an_attempt_that_failed_keeps_nothing_that_its_work_had(awaited: bool):
    groups: list[weakref.ref[Group]] = []

    def work() -> None:
        group = Group()
        groups.append(weakref.ref(group))
        raise RuntimeError("connection refused")

    attempt = Attempt(work)
    assert attempt.done.wait(60)
    if awaited:
        try:
            attempt.result()
        except RuntimeError as exc:
            assert str(exc) == "connection refused"  # pytest.raises would keep it
        else:
            pytest.fail("it did not raise")
    else:
        del attempt
    assert soon(lambda: groups[0]() is None)  # its thread may be about to end


def test_an_attempt_has_a_result():
    attempt = Attempt(lambda: 7)
    assert attempt.done.wait(60)
    assert attempt.result() == 7
