"""Work on a loop of its own, waited for or not, and what an interrupt does to it."""

import asyncio
import os
import signal
import threading

import pytest

from verl.checkpoint_engine.support.loop_thread import LoopThread


@pytest.fixture
def loop():
    thread = LoopThread("test")
    yield thread
    thread.close()


async def raise_it(error):
    raise error


def test_what_runs_returns_or_raises(loop):
    assert loop.run(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="bad"):
        loop.run(raise_it(ValueError("bad")))


def test_what_was_started_goes_on_while_something_else_is_waited_for(loop):
    event = asyncio.Event()

    async def waits():
        await event.wait()
        return "first"

    async def sets():
        event.set()

    first = loop.start(waits())
    loop.run(sets())
    assert first.result(20) == "first"


def test_an_interrupt_cancels_what_is_waited_for_and_waits_for_its_end(loop):
    began, ended = threading.Event(), []

    async def careful():
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    def press():
        began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(careful())
    pressing.join()
    assert ended == [True]
    assert loop.run(asyncio.sleep(0, "works")) == "works"


def test_closing_cancels_what_still_runs_and_may_be_repeated(loop):
    left = loop.start(asyncio.sleep(60))
    loop.close()
    loop.close()
    with pytest.raises(asyncio.CancelledError):
        left.result(20)
