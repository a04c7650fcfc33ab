import os
import signal
import sys

import pytest

from verl.utils.signals import sigterm_as_ctrl_c, sigterm_handler_kept, uninterrupted


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


def test_a_library_that_takes_sigterm_over_gives_it_back():
    sigterm_as_ctrl_c()
    with sigterm_handler_kept():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_its_exit_is_a_keyboard_interrupt_too():
    with pytest.raises(KeyboardInterrupt), sigterm_handler_kept():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        send(signal.SIGTERM)
