import os
import signal

import pytest

from verl.utils.signals import sigterm_as_ctrl_c, uninterrupted


@pytest.fixture(autouse=True)
def handlers():
    saved = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in saved.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


def test_sigterm_is_a_keyboard_interrupt():
    sigterm_as_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_sigterm_ends_also_what_a_script_runs_in_the_background():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sigterm_as_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_both_wait_while_something_must_not_be_interrupted():
    sigterm_as_ctrl_c()
    with uninterrupted():
        send(signal.SIGINT)
        send(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
