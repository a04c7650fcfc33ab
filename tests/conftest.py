"""What several packages of tests share: a Ray, and turns for tests that need the machine for themselves."""

import contextlib
import copy
import fcntl
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests import forked
from tests.warm_workers import ENVIRONMENT, lighten_ray, warm_base, warm_workers

pytest_plugins = ["tests.tiers", "tests.cells", "tests.scheduling", "pytester"]

WARM = pytest.StashKey[str]()
TURNS = pytest.StashKey[tempfile.TemporaryDirectory]()
LONG = (
    "tests/weight_sync/",
    "tests/e2e/test_interrupts.py",
    "tests/e2e/test_lost_trainer_hosts.py",
    "tests/e2e/",
    "tests/distributions/",
    "tests/workers/reward_model/",
    "tests/workers/engine/",
    "tests/checkpoint_engine/test_contract.py",
    "tests/models/test_trainer_models.py",
    "tests/trainer/config/test_launches.py",
)
"""What takes minutes and is done by one test process, one test after the other: begun first, in this order, so that the
end is short files, of which no test process has many left when another has none."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a shell's script, and inherited by every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray's own: the processes of a Ray that starts, which has 30 seconds, come before the workers of all others.
os.environ.setdefault("RAY_worker_niceness", "15")


def pytest_collection_modifyitems(items):
    """Files that take minutes first, those of `make check` last: they fill what is left of the others' time."""
    jobs = {item.path for item in items if item.get_closest_marker("job")}

    def place(item):
        long = (number for number, begin in enumerate(LONG) if item.nodeid.startswith(begin))
        return next(long, len(LONG)) if item.path in jobs else len(LONG) + 1

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Called for each of several test processes, in the one that started them: they take turns in a directory."""
    if TURNS not in node.config.stash:
        node.config.stash[TURNS] = tempfile.TemporaryDirectory(prefix="verl-tests-")
        node.config.add_cleanup(node.config.stash[TURNS].cleanup)
    node.workerinput["turns"] = node.config.stash[TURNS].name
    if WARM not in node.config.stash:
        stack = contextlib.ExitStack()
        node.config.stash[WARM] = stack.enter_context(warm_base())
        node.config.add_cleanup(stack.close)
    node.workerinput["warm"] = node.config.stash[WARM]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """A test marked `alone` waits until no other runs, and others wait for it: it measures what a user waits for."""
    turns = getattr(item.config, "workerinput", {}).get("turns")
    if turns is None:
        return (yield)
    # Locks of this process, which its forked children do not hold (as they would flock's): one that outlives a test
    # process which a time limit has ended would keep all others waiting.
    with Path(turns, "queue").open("w+") as queue, Path(turns, "machine").open("w+") as machine:
        fcntl.lockf(queue, fcntl.LOCK_EX)  # so that one that wants to be alone is not overtaken for ever
        fcntl.lockf(machine, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.lockf(queue, fcntl.LOCK_UN)
        return (yield)


def pytest_runtest_logreport(report):
    """Says at once what failed: the end may be far away, or never come."""
    if report.failed and os.environ.get("CI") and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n--- {report.nodeid}: {report.when} failed\n{report.longreprtext}\n", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """A test that calls a program's main here also has its watch: another test's signal would end this process."""
    assert "ends-within" not in [thread.name for thread in threading.enumerate()], "this test has called `end_within`"


@pytest.fixture(scope="session", autouse=True)
def _configuration_files_are_read_once():
    """Two fifths of the time in which Hydra composes a configuration: it reads and parses every file each time."""
    if "hydra" not in sys.modules:  # which tests that compose any have imported
        yield
        return
    from hydra.core.plugins import Plugins

    Plugins.instance()  # imports what it finds afresh
    from hydra._internal.core_plugins.file_config_source import FileConfigSource

    read, known = FileConfigSource.load_config, {}

    def load_config(source, config_path):
        file = Path(source.path, source._normalize_file_name(config_path))
        if not file.exists():
            return read(source, config_path)
        stat = file.stat()
        key = file.resolve(), source.path, source.provider, stat.st_mtime_ns, stat.st_size, stat.st_ino
        if key not in known:
            known[key] = read(source, config_path)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileConfigSource, "load_config", load_config)
        yield


@pytest.fixture(scope="module")
def one_rank():
    """torch's default process group, with this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def forkserver():
    """For tests of code that forks from multiprocessing's server: it has imported what others need as well."""
    forked.start_server()


@pytest.fixture(scope="session")
def warm(request):
    """Forks Ray's workers."""
    with contextlib.ExitStack() as stack:
        base = getattr(request.config, "workerinput", {}).get("warm") or stack.enter_context(warm_base())
        yield stack.enter_context(warm_workers(base))


@pytest.fixture(scope="session")
def ray_cluster(warm):
    """A Ray of this test session alone. CPUs are logical: 16, however many the machine has."""
    from verl.trainer.fleet.session import RaySession

    tests = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        # Ray's processes inherit these; they import the worker classes that test modules define.
        environment.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path.startswith(tests)))
        lighten_ray()
        session = RaySession()  # patient: on a busy machine Ray may need longer than it gives itself
        session.start({"num_cpus": 16, "object_store_memory": 2**30, "runtime_env": warm.runtime_env})
        yield
        session.close()
