"""How a run starts its Ray. Mostly with a stand-in: what Ray does on a machine that is busy cannot be had at will."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private import auto_init_hook, services
from ray._private.node import Node

from tests.checkpoint_engine.fakes import soon
from tests.processes import is_alive
from verl.compat import ray as compat
from verl.compat.ray import agents_not_awaited
from verl.trainer.fleet.session import MARK, RaySession, RayTooSlow, check_arguments, starts_locally
from verl.utils.config import ConfigError

SLOW = Exception("The current node timed out during startup. This could happen because some of the raylet failed to")


NICENESS = "RAY_worker_niceness"
STARTS = {name: getattr(Node, name) for name in ("start_monitor", "start_log_monitor", "start_api_server")}


class Starting:
    """Stands for `ray.init`: fails as often as it is told to, and leaves a process behind then."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.session_dir = None
        self.left = []
        self.calls = 0
        self.started = set()

    def __call__(self, **arguments):
        self.calls += 1
        self.arguments = arguments
        self.started = {name for name, start in STARTS.items() if getattr(Node, name) is start}
        self.niceness = os.environ.get(NICENESS)
        if self.errors:
            self.left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
            raise self.errors.pop(0)
        return SimpleNamespace(address_info={"session_dir": self.session_dir})

    def close(self):
        for process in self.left:
            process.kill()
            process.wait()


@pytest.fixture
def starting(monkeypatch):
    made = []

    def fail_with(*errors):
        made.append(Starting(*errors))
        monkeypatch.setattr(ray, "init", made[-1])
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "shutdown", lambda: None)  # the Ray that other tests share goes on
        return made[-1]

    yield fail_with
    for one in made:
        one.close()


def test_a_ray_that_was_too_slow_is_ended_and_started_again(starting):
    init = starting(SLOW, SLOW)
    RaySession().start({})
    assert init.calls == 3
    for left in init.left:
        assert left.wait(60) != 0
        assert not psutil.pid_exists(left.pid)


def test_a_machine_that_is_too_busy_for_a_ray_is_named(starting):
    init = starting(*[SLOW] * 7)
    with pytest.raises(RayTooSlow, match=r"did not start in 6 attempts: the machine is too busy \(load average \d+"):
        RaySession().start({})
    assert init.calls == 6


def test_a_call_that_comes_after_the_end_starts_no_other_ray(starting, monkeypatch):
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    init = starting()
    session = RaySession()
    session.start({})
    session.close()
    auto_init_hook.wrap_auto_init(lambda: None)()  # as Ray wraps `ray.wait` and others
    assert init.calls == 1


AGENT = """
import time
from ray._raylet import setproctitle  # as its agents do
setproctitle("ray::DashboardAgent")
print("has taken its title", flush=True)
time.sleep(600)
"""
ORPHAN = f"""
import subprocess, sys
agent = subprocess.Popen([sys.executable, "-c", {AGENT!r}], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
assert agent.stdout.readline()
print(agent.pid)
"""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SLOW], ids=["an interrupt", "a Ray that is too slow"])
def test_what_ends_a_start_of_ray_ends_also_what_has_lost_its_parent(monkeypatch, tmp_path, error):
    orphans = []

    def init(**arguments):
        if orphans:  # the next attempt
            return SimpleNamespace(address_info={"session_dir": str(tmp_path)})
        said = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True).stdout
        orphans.append(psutil.Process(int(said)))
        assert is_alive(orphans[0])
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # the Ray that other tests share goes on
    session = RaySession()
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        session.start({})
    try:
        assert soon(lambda: not is_alive(orphans[0]))
    finally:
        orphans[0].kill()
    assert MARK not in os.environ
    session.close()


@pytest.mark.parametrize(("error", "arguments"), [(SLOW, {"address": "auto"}), (ValueError("no such argument"), {})])
def test_what_would_not_help_is_not_tried(starting, error, arguments):
    init = starting(error)
    with pytest.raises(type(error), match=str(error)[:20]):
        RaySession().start(arguments)
    assert init.calls == 1


@pytest.mark.parametrize(("address", "told"), [("10.0.0.1:6379", True), ("local", False)])
def test_a_ray_that_cannot_be_joined_may_want_a_token(starting, address, told):
    starting(ConnectionError("Failed to connect"))
    with pytest.raises(ConfigError, match="Failed to connect") as raised:
        RaySession().start({"address": address})
    assert ("RAY_AUTH_TOKEN" in str(raised.value)) == told


@pytest.mark.parametrize(
    ("variable", "arguments", "expected"),
    [
        (None, {}, "local"),
        ("", {}, "local"),
        ("10.0.0.1:6379", {}, "10.0.0.1:6379"),
        ("10.0.0.1:6379", {"address": None, "num_gpus": 2}, "10.0.0.1:6379"),
        ("10.0.0.1:6379", {"address": "local"}, "local"),
        ("10.0.0.1:6379", {"address": "10.0.0.2:6379"}, "10.0.0.2:6379"),
    ],
)
def test_the_ray_of_the_environment_is_joined_unless_the_run_names_one(
    monkeypatch, caplog, starting, variable, arguments, expected
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    ray_init = starting()
    assert starts_locally(arguments) == (expected == "local")
    with caplog.at_level("INFO", logger="verl"):
        session = RaySession()
        session.start(arguments)
        session.close()
    assert ray_init.arguments["address"] == expected
    said = expected in caplog.text and ("RAY_ADDRESS" in caplog.text) == (not arguments.get("address"))
    assert said == (expected != "local")


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (
            "127.0.0.1:1",
            "^RAY_ADDRESS=127.0.0.1:1: no Ray can be reached there: .*set ray_kwargs.ray_init.address=local",
        ),
        ("http://127.0.0.1:8265", "^RAY_ADDRESS=http://127.0.0.1:8265 is the address for job submission; .*host:port"),
    ],
)
def test_a_ray_of_the_environment_that_cannot_be_joined_is_told_before_anything_starts(monkeypatch, variable, message):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(ConfigError, match=message):
        check_arguments({})
    check_arguments({"address": "local"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_cpu": 2}, "ray_kwargs.ray_init.num_cpu: ray.init has no such argument. Did you mean 'num_cpus'?"),
        ({"kwargs": 2}, "ray_kwargs.ray_init.kwargs: ray.init has no such argument"),
        ({"address": "127.0.0.1:1"}, "ray_init.address=127.0.0.1:1: no Ray can be reached there: .*refused"),
        ({"address": "ray://127.0.0.1:1"}, "ray_init.address=ray://127.0.0.1:1: no Ray can be reached there"),
    ],
)
def test_what_ray_would_refuse_or_wait_for_is_told_at_once(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_arguments(arguments)


def test_what_ray_takes_is_let_through():
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        check_arguments({"num_cpus": 2, "_temp_dir": "/tmp/ray", "address": f"127.0.0.1:{somebody.getsockname()[1]}"})
    check_arguments({"address": "auto"})


@pytest.mark.parametrize("unfit", ["a" * 40, "ö"], ids=["long", "not ASCII"])
def test_rays_sockets_are_elsewhere_if_tmpdir_leaves_no_room_for_them(starting, monkeypatch, tmp_path, unfit):
    (tmp_path / unfit).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / unfit))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    init = starting()
    RaySession().start({})
    assert init.arguments["_temp_dir"] == "/tmp/ray"


@pytest.mark.parametrize(
    ("arguments", "variable", "message"),
    [
        ({"_temp_dir": f"/{'a' * 90}"}, "/tmp", r"^ray_kwargs.ray_init._temp_dir=/a+: the paths of Ray's sockets"),
        ({}, "/ö", "^RAY_TMPDIR=/ö: the paths of Ray's sockets below it would not be ASCII of at most 107 bytes"),
    ],
)
def test_a_directory_that_somebody_chose_for_rays_sockets_is_refused_if_it_leaves_no_room(
    monkeypatch, arguments, variable, message
):
    monkeypatch.setenv("RAY_TMPDIR", variable)
    with pytest.raises(ConfigError, match=message):
        check_arguments({"address": "local"} | arguments)


@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        ({}, set()),
        ({"include_dashboard": True}, {"start_api_server"}),
        ({"log_to_driver": True}, {"start_log_monitor"}),
        ({"address": "auto"}, set(STARTS)),
    ],
)
def test_only_those_processes_of_ray_are_started_that_somebody_uses(starting, arguments, started):
    init = starting()
    RaySession().start(arguments)
    assert init.started == started
    assert {name: getattr(Node, name) for name in STARTS} == STARTS


def test_a_ray_of_the_run_waits_for_no_agent(ray_cluster):
    """Their ports are known before they start, and nobody asked for what the dashboard's serves."""
    (node,) = ray.nodes()
    assert node["RuntimeEnvAgentPort"] > 0
    assert [node[port] for port in ("MetricsAgentPort", "MetricsExportPort", "DashboardAgentListenPort")] == [-1] * 3


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [({}, True), ({"include_dashboard": True}, False), ({"_metrics_export_port": 9090}, False)],
)
def test_the_agent_of_the_dashboard_is_there_for_those_who_ask_for_it(monkeypatch, arguments, changed):
    monkeypatch.setattr(services, "start_ray_process", lambda command, kind: command)
    command = ["--metrics-agent-port=0", "--dashboard_agent_command=python agent.py"]
    with agents_not_awaited({"address": "local", "include_dashboard": False} | arguments, 6000):
        started = services.start_ray_process(command, "raylet")
    assert (started != command) == changed
    assert services.start_ray_process(command, "raylet") == command


@pytest.mark.parametrize(("said", "niceness"), [(None, "0"), ("7", "7")])
def test_workers_have_the_priority_of_their_driver_unless_the_environment_says_another(
    starting, monkeypatch, said, niceness
):
    monkeypatch.delenv(NICENESS) if said is None else monkeypatch.setenv(NICENESS, said)
    init = starting()
    RaySession().start({})
    assert init.niceness == niceness
    assert os.environ.get(NICENESS) == said


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray's agents are left to Ray")
@pytest.mark.parametrize("has_taken_its_title", [False, True])
def test_the_agents_of_a_ray_end_with_it_also_while_they_start(starting, tmp_path, has_taken_its_title):
    init = starting()
    init.session_dir = str(tmp_path / "session_1")
    (tmp_path / "session_1").mkdir()
    with (tmp_path / "session_1" / "log").open("w") as log:
        title = ["ray::Agent"] if has_taken_its_title else ["agent", f"--session-dir={init.session_dir}"]
        program = [title[0], "-c", "input()", *title[1:]]
        agent = subprocess.Popen(program, executable=sys.executable, stdin=subprocess.PIPE, stdout=log)
    init.left.append(agent)
    session = RaySession()
    session.start({})
    session.close()
    agent.communicate(timeout=60)
    assert agent.returncode == -signal.SIGKILL


def test_a_ray_of_one_machine_has_nothing_beside_its_two_servers_and_their_agents(ray_cluster):
    own = ray._private.worker._global_node.get_session_dir_path()
    commands = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # one of another test, which has ended
            commands.append(" ".join(child.cmdline()))
    commands = [command for command in commands if own in command]  # other tests have processes, too
    assert any("raylet" in command for command in commands)
    assert not [command for command in commands if "monitor.py" in command or "dashboard.py" in command]


def test_of_a_raylets_messages_only_that_a_worker_died_is_left_out(monkeypatch):
    printed = []
    monkeypatch.setattr(compat.worker, "print_to_stdstream", lambda data, **_: printed.append(data))
    compat.deaths_left_to_callers()
    compat.deaths_left_to_callers()
    died = {"pid": "raylet", "lines": [f"{compat.DEATH} a task by an unexpected system error."]}
    others = [{"pid": "raylet", "lines": ["out of disk"]}, {"pid": 7, "lines": died["lines"]}]
    for data in (died, *others):
        compat.worker.print_to_stdstream(data, ignore_prefix=False)
    assert printed == others
