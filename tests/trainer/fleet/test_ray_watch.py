import queue
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
import ray

from tests.checkpoint_engine.fakes import soon
from verl.trainer.fleet import last_words
from verl.trainer.fleet.ray_watch import RayLost, RayWatch, gcs_of, raylet_of
from verl.trainer.fleet.recovery import BATCH, REPLICAS, Recovery
from verl.trainer.fleet.session import RaySession


@pytest.fixture
def raylet(tmp_path):
    """A process that looks like one."""
    with started(tmp_path, "raylet", f"--raylet_socket_name={tmp_path}/socket") as process:
        yield process


@pytest.fixture
def gcs(tmp_path):
    with started(tmp_path, "gcs_server", f"--session-dir={tmp_path}/session") as process:
        yield process


@contextmanager
def started(directory, name, word):
    (directory / name).symlink_to("/bin/sh")
    with subprocess.Popen([directory / name, "-c", "read line", word], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def session(tmp_path, monkeypatch):
    about = {"raylet_socket_name": f"{tmp_path}/socket", "session_dir": f"{tmp_path}/session"}
    (tmp_path / "session").mkdir()
    monkeypatch.setattr("verl.trainer.fleet.session.LEAVES_WITHIN_S", 600.0)  # then it ends this process
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: SimpleNamespace(address_info=about))
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("without the others it takes half a minute, or for ever"))
    session = RaySession()
    session.start({})
    return session


def watch(process, **options):
    lost: queue.Queue[str] = queue.Queue()
    return RayWatch(psutil.Process(process.pid), lost.put, looks_every_s=0.01, **options), lost


def test_the_processes_of_a_ray_are_found_by_what_it_says_of_itself(raylet, gcs, tmp_path):
    assert raylet_of({"raylet_socket_name": f"{tmp_path}/socket"}) == psutil.Process(raylet.pid)
    assert gcs_of({"session_dir": f"{tmp_path}/session"}) == psutil.Process(gcs.pid)
    assert raylet_of({"raylet_socket_name": f"{tmp_path}/socket2"}) is gcs_of({"session_dir": "elsewhere"}) is None
    assert raylet_of({}) is gcs_of({}) is None


def test_a_raylet_that_is_killed_is_told_whether_or_not_somebody_waits_for_it(raylet):
    _, lost = watch(raylet)
    raylet.kill()
    assert f"(pid {raylet.pid}) is gone" in str(lost.get(timeout=60))


def test_a_raylet_that_is_stopped_is_told_after_a_while(raylet):
    psutil.Process(raylet.pid).suspend()
    _, lost = watch(raylet, stopped_s=0.1)
    assert "has been stopped for 0.1 s" in str(lost.get(timeout=60))


def test_a_raylet_that_goes_on_is_not_lost(raylet):
    _, lost = watch(raylet, stopped_s=600.0)
    psutil.Process(raylet.pid).suspend()
    psutil.Process(raylet.pid).resume()
    raylet.kill()
    assert "is gone" in str(lost.get(timeout=60))


def test_nothing_is_told_of_a_raylet_after_the_end_of_its_run(raylet):
    watched, lost = watch(raylet)
    watched.close()
    raylet.kill()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.2)


def test_a_driver_that_loses_its_raylet_is_interrupted_and_knows_why(raylet, session):
    raylet.kill()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(60)
    session.close()
    assert f"the raylet of this host (pid {raylet.pid}) is gone" in str(session.lost)


def test_a_run_without_gcs_goes_on_until_something_has_to_be_started(raylet, gcs, session, caplog):
    assert session.is_whole
    gcs.kill()
    assert soon(lambda: not session.is_whole)
    assert session.lost is None
    assert soon(lambda: f"Ray's GCS (pid {gcs.pid}) is gone: the run goes on" in caplog.text)
    recovery = Recovery(max_restarts=1, around=session.needing_gcs)
    recovery.watch(REPLICAS, lambda: pytest.fail("it would wait for the GCS"))
    with pytest.raises(RayLost, match=rf"Ray's GCS \(pid {gcs.pid}\) is gone: no process of the run that died can be"):
        recovery.attempt(BATCH, lambda: 1 / 0, failures=(ZeroDivisionError,), again=lambda _: 2)
    session.close()
    assert raylet.wait(60) == -signal.SIGKILL


def test_a_gcs_that_is_gone_while_something_is_started_interrupts_that(gcs, session):
    with pytest.raises(KeyboardInterrupt), session.needing_gcs():
        gcs.kill()
        time.sleep(60)
    session.close()
    assert "no process of the run that died can be started again" in str(session.lost)


@pytest.mark.parametrize(
    ("name", "ending", "said"),
    [
        ("python-core-driver-0100_42.log", last_words.ENDED_BY_RAY, True),
        ("python-core-driver-0100_42.log", b"", False),
        ("python-core-driver-0100_142.log", last_words.ENDED_BY_RAY, False),
        ("python-core-worker-0100_42.log", last_words.ENDED_BY_RAY, False),
    ],
)
def test_the_reason_is_said_for_a_driver_if_ray_itself_has_ended_that_driver(tmp_path, capsys, name, ending, said):
    (tmp_path / name).write_bytes(b"x" * 100_000 + ending + b" Status: IOError: Broken pipe\n")
    last_words.main([str(tmp_path), "42"], ["error: the raylet is gone"])
    assert capsys.readouterr().err == "error: the raylet is gone\n" * said


NEEDS_AN_OBJECT_OF_A_RAYLET_THAT_IS_GONE = """
import functools, psutil, ray
from verl.trainer.fleet import session

session.RayWatch = functools.partial(session.RayWatch, looks_every_s=600.0)  # Ray is first
session.RaySession().start({})
(raylet,) = [child for child in psutil.Process().children() if child.name() == "raylet"]
raylet.kill()
while True:
    ray.get(ray.put(bytes(1 << 20)))
"""


@pytest.mark.job
def test_a_driver_that_ray_ends_at_once_has_said_why():
    driver = subprocess.run(
        [sys.executable, "-c", NEEDS_AN_OBJECT_OF_A_RAYLET_THAT_IS_GONE],
        stdin=subprocess.DEVNULL,
        capture_output=True,  # until the process that speaks for the driver has ended, too
        text=True,
        timeout=600,
        check=False,
    )
    assert driver.returncode == 1
    assert "error: the raylet of this host (pid " in driver.stderr
