"""Objects in processes of their own answer as they would here; whoever waits for one that is gone is told."""

from __future__ import annotations

import os
import threading

import pytest

from benchmarks.processes import Member, members
from verl.checkpoint_engine.errors import TransportError


class Trainer:
    def __init__(self) -> None:
        self._goes_on = threading.Event()

    def train(self) -> str:
        self._goes_on.wait()
        return "trained"

    async def release(self) -> None:
        self._goes_on.set()

    def fail(self) -> None:
        raise ValueError("no such step")

    async def die(self) -> None:
        os._exit(3)


@pytest.fixture
def trainer():
    with members({"trainer": Trainer}) as (member,):
        yield member


def test_coroutines_are_answered_while_a_method_is_busy(trainer: Member):
    training = trainer.submit("train")
    trainer.call("release")
    assert training.result() == "trained"


def test_what_a_method_raises_is_raised_here(trainer: Member):
    with pytest.raises(ValueError, match="no such step"):
        trainer.call("fail")


async def test_whoever_waits_for_a_process_that_is_gone_is_told_and_another_can_take_its_place(trainer: Member):
    waiting = trainer.submit("train")
    with pytest.raises(TransportError, match="its process is gone"):
        await trainer.die()
    with pytest.raises(TransportError, match="its process is gone"):
        waiting.result()
    trainer.replace()
    await trainer.release()
    assert await trainer.train() == "trained"
