import os
import signal
import subprocess
import sys
import time

import pytest

from verl.checkpoint_engine.support import signals
from verl.checkpoint_engine.support.signals import end_when_told, ending_at_once, uninterrupted


@pytest.fixture(autouse=True)
def handlers():
    saved = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    hook = sys.unraisablehook
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in saved.items():
        signal.signal(number, handler)
    sys.unraisablehook = hook


def send(number):
    os.kill(os.getpid(), number)


def test_sigterm_is_a_keyboard_interrupt():
    end_when_told()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_sigterm_ends_also_what_a_script_runs_in_the_background():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_when_told()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_both_wait_while_something_must_not_be_interrupted():
    end_when_told()
    with uninterrupted():
        send(signal.SIGINT)
        send(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_python_ignores_in_a_finalizer_comes_again(number, capfd):
    class Finalized:
        def __del__(self):
            send(number)
            time.sleep(1)

    end_when_told()
    held = [Finalized()]
    with pytest.raises(KeyboardInterrupt):
        held.clear()
        time.sleep(30)
    assert capfd.readouterr().err == ""


def test_an_interrupt_that_python_ignores_around_a_fork_comes_again():
    """As it came in the middle of `ray.init`, which starts processes."""
    program = """
import os, signal, subprocess, time
from verl.checkpoint_engine.support.signals import end_when_told
end_when_told()
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
try:
    subprocess.run(["true"], preexec_fn=lambda: None)
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("interrupted\n", "")


def test_whatever_else_python_ignores_is_reported_as_ever(capfd):
    class Finalized:
        def __del__(self):
            raise ValueError("of a finalizer")

    end_when_told()
    held = [Finalized()]
    held.clear()
    assert "ValueError: of a finalizer" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_library_that_goes_on_after_an_interrupt_is_ended_at_once(number):
    program = f"""
import os, signal, time
from verl.checkpoint_engine.support.signals import end_when_told, ending_at_once
end_when_told()
with ending_at_once(lambda: os._exit(7)):
    try:
        os.kill(os.getpid(), {int(number)})
        time.sleep(30)
    except KeyboardInterrupt:
        print("interrupted")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")


def test_a_script_in_the_background_does_not_hear_ctrl_c_there_either():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ending_at_once(lambda: pytest.fail("ended")):
        send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


HANGS = {
    "a call of C": """
import ctypes
c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
c.pthread_mutex_lock(mutex)
while True:
    try:
        print("ready", flush=True)
        c.pthread_mutex_lock(mutex)
    except KeyboardInterrupt:  # just before that call
        pass
""",
    "an ending that is not to be interrupted": """
with uninterrupted():
    print("ready", flush=True)
    time.sleep(600)
""",
    "a library that goes on": """
while True:
    try:
        print("ready", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        pass
""",
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("hangs", HANGS)
def test_a_process_ends_in_time_whatever_it_waits_for(hangs, number):
    program = f"""
import os, time
from verl.checkpoint_engine.support.signals import end_when_told, end_within, uninterrupted
end_when_told()
end_within(0.1, lambda: os._exit(7))
{HANGS[hangs]}
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(60) == 7


def test_what_ends_a_fork_does_not_end_its_parent():
    program = """
import os, signal, time
from verl.checkpoint_engine.support.signals import end_when_told, end_within
end_when_told()
end_within(0.0, lambda: os._exit(7))
told, tells = os.pipe()
if (pid := os.fork()) == 0:
    try:
        os.write(tells, b"x")
        while True:
            time.sleep(0.1)  # a signal just before a sleep begins is handled after it
    except KeyboardInterrupt:
        os._exit(3)
os.read(told, 1)
os.kill(pid, signal.SIGTERM)
_, status = os.waitpid(pid, 0)
time.sleep(0.5)
print(os.waitstatus_to_exitcode(status))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "3\n"


def test_a_process_that_interrupts_itself_knows_why(monkeypatch):
    monkeypatch.setattr(signals, "_why_interrupted", "")
    with pytest.raises(KeyboardInterrupt):
        signals.interrupt_main_thread("Ray is gone")
        time.sleep(60)
    assert signals.why_interrupted() == "Ray is gone"
