"""Two tiers: `make check` runs what is quick and needs no engine, no Ray, no several processes; `make test` all.

What needs more gets the marker `job` here: from its fixtures, its markers, or its place. With `-m "not job"` the rest
has to keep to a budget of processor time, which other work on the machine does not use up: a test that takes its file
beyond it fails, and so does one that connects to Ray.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter

import pytest

FIXTURES = {"ray_cluster", "warm", "ranks"}
MARKERS = ("vllm", "sglang", "e2e", "alone", "gpu", "npu")
PLACES = (
    "tests/benchmarks/",
    "tests/distributions/",
    "tests/e2e/",
    "tests/models/",
    "tests/originals/",
    "tests/weight_sync/",
    "tests/checkpoint_engine/parameter_server/test_failures.py",
    "tests/checkpoint_engine/parameter_server/test_server.py",
    "tests/checkpoint_engine/test_chain.py",
    "tests/checkpoint_engine/test_collective.py",
    "tests/checkpoint_engine/test_contract.py",
    "tests/checkpoint_engine/test_deltas.py",
    "tests/checkpoint_engine/test_failures.py",
    "tests/checkpoint_engine/test_kimi_ckpt_engine.py",
    "tests/checkpoint_engine/test_late_nodes.py",
    "tests/checkpoint_engine/test_leaving_nodes.py",
    "tests/checkpoint_engine/test_naive_hosts.py",
    "tests/checkpoint_engine/test_namespaces.py",
    "tests/checkpoint_engine/test_strangers.py",
    "tests/docs/test_parameter_server_example.py",
    "tests/trainer/fleet/test_session.py",
    "tests/workers/rollout/test_leftovers.py",
)
"""They start members, ranks or runs as processes, or are long."""
FILE_CPU_S = 60.0
"""Of all tests of a file together, in this process and in those that it has waited for."""


@pytest.hookimpl(tryfirst=True)  # before pytest itself looks at markers
def pytest_collection_modifyitems(items):
    for item in items:
        marked = any(item.get_closest_marker(name) for name in MARKERS)
        if marked or FIXTURES & set(item.fixturenames) or item.nodeid.startswith(PLACES):
            item.add_marker(pytest.mark.job)


def pytest_configure(config):
    if "not job" in config.getoption("markexpr"):
        config.pluginmanager.register(Budget(FILE_CPU_S), "budget")


class Budget:
    def __init__(self, file_cpu_s: float) -> None:
        self._file_cpu_s = file_cpu_s
        self._used: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = processor_time_s()
        result = yield
        file = item.nodeid.split("::")[0]
        self._used[file] += processor_time_s() - before
        if self._used[file] > self._file_cpu_s:
            pytest.fail(
                f"the tests of {file} took {self._used[file]:.0f} s of processor time, up to this one; `make check` "
                f"gives a file {self._file_cpu_s:.0f}. Mark its long tests with pytest.mark.job, or add it to PLACES",
                pytrace=False,
            )
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            pytest.fail("it has connected to Ray without the marker `job`: use the fixture ray_cluster", pytrace=False)
        return result


def processor_time_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
