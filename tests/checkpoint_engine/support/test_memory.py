"""Peaks of phases that overlap, of this process and of those below it."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from verl.checkpoint_engine.support.memory import (
    MemoryUse,
    MemoryWatch,
    cuda_nbytes_of,
    most,
    tree_use,
)

MB = 10**6


class Process:
    """Memory as the kernel counts it: one peak, which `reset` begins anew."""

    def __init__(self) -> None:
        self.now = self.peak = 100

    def hold(self, nbytes: int) -> None:
        self.now = nbytes
        self.peak = max(self.peak, nbytes)

    def held(self) -> dict[str, int]:
        return {"VmRSS": self.now, "VmHWM": self.peak, "RssShmem": 7}

    def reset(self) -> None:
        self.peak = self.now


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def watch(process: Process) -> MemoryWatch:
    return MemoryWatch(process.held, process.reset)


def test_a_phase_has_its_own_peak(process: Process, watch: MemoryWatch):
    with watch.during("large"):
        process.hold(900)
        process.hold(200)
    with watch.during("small"):
        process.hold(300)
    assert watch.use_of("trainer-0", "large") == MemoryUse(
        process="trainer-0", phase="large", host_nbytes=200, host_peak_nbytes=900, shared_nbytes=7
    )
    assert watch.use_of("trainer-0", "small").host_peak_nbytes == 300
    assert watch.since_start("trainer-0").host_peak_nbytes == 900


def test_phases_that_overlap_both_learn_the_peak_that_they_share(process: Process, watch: MemoryWatch):
    with watch.during("train"):
        process.hold(500)
        process.hold(100)
        with watch.during("publish"):
            process.hold(400)
        process.hold(150)
    assert watch.use_of("", "publish").host_peak_nbytes == 400
    assert watch.use_of("", "train").host_peak_nbytes == 500
    assert watch.use_of("", "train").host_nbytes == 150


def test_a_phase_that_fails_is_measured(process: Process, watch: MemoryWatch):
    with pytest.raises(ZeroDivisionError), watch.during("train"):
        process.hold(800)
        _ = 1 / 0
    assert watch.use_of("", "train").host_peak_nbytes == 800


def test_a_phase_that_never_ran_held_nothing(watch: MemoryWatch):
    assert watch.use_of("node-0", "stage") == MemoryUse(process="node-0", phase="stage")


def test_a_device_is_measured_where_there_is_one(watch: MemoryWatch):
    peaks = iter([(5, 90), (5, 5), (20, 70), (20, 20), (20, 20)])
    watch.device = lambda: next(peaks)
    with watch.during("train"):
        pass
    use = watch.use_of("", "train")
    assert (use.device_nbytes, use.device_peak_nbytes) == (20, 70)
    assert use.metrics("trainer")["memory/trainer/train/device_peak_gb"] == pytest.approx(70e-9)


PHASES = """
import numpy as np
from verl.checkpoint_engine.support.memory import memory_watch, resident

watch = memory_watch()
with watch.during("large"):
    held = np.ones(200_000_000, np.uint8)
    assert resident()["VmRSS"] > held.nbytes
    del held
with watch.during("small"):
    pass
for phase in ("large", "small"):
    use = watch.use_of("", phase)
    print(use.host_peak_nbytes - use.host_nbytes)
print(watch.since_start("").host_peak_nbytes - watch.use_of("", "large").host_peak_nbytes)
"""
"""Run in a process of its own: the allocator of a long test process may keep what it is given back."""


def test_the_kernel_s_peak_of_a_process_is_that_of_the_phase():
    told = subprocess.run([sys.executable, "-c", PHASES], check=True, capture_output=True, text=True, timeout=60)
    large, small, since_start = map(int, told.stdout.split())
    assert large > 150 * MB
    assert small < 50 * MB
    assert since_start >= 0


TREE = f"""
import subprocess, sys
from {tree_use.__module__} import resident, tree_use

alone = tree_use("replica-0")
code = "held = bytearray(100_000_000); print(flush=True); input()"
with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    both = tree_use("replica-0")
    child.communicate(b"\\n")
print(both.host_nbytes - alone.host_nbytes, resident(child.pid))
"""


def test_a_tree_of_processes_counts_what_each_holds():
    """In a process of its own: here other tests have children, which come and go."""
    done = subprocess.run([sys.executable, "-c", TREE], capture_output=True, text=True, timeout=120, check=True)
    more, gone = done.stdout.split(maxsplit=1)
    assert 90 * MB < int(more) < 200 * MB
    assert gone == "{}\n"


class Nvml(ModuleType):
    """The part of NVML's Python module that is asked for, with two devices."""

    class NVMLError(Exception):
        pass

    def __init__(self, *held: dict[int, int | None]) -> None:
        super().__init__("pynvml")
        self._held, self.open = held, 0

    def nvmlInit(self) -> None:
        if not self._held:
            raise self.NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._held)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in self._held[handle].items()]


@pytest.mark.parametrize(
    ("held", "expected"),
    [([{7: 100, 8: 50}, {7: 20, 9: 1000}], 120), ([{7: None}], 0), ([{9: 1000}], 0), ([], 0)],
)
def test_memory_on_devices_is_that_of_the_processes_asked_for(
    monkeypatch: pytest.MonkeyPatch, held: list[dict[int, int | None]], expected: int
):
    nvml = Nvml(*held)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert (cuda_nbytes_of({7}), nvml.open) == (expected, 0)


def test_the_most_of_a_role_is_the_largest_of_each_kind():
    uses = [
        MemoryUse(process="node-0", phase="stage", host_nbytes=1, host_peak_nbytes=9),
        MemoryUse(process="node-1", phase="stage", host_nbytes=5, host_peak_nbytes=6, shared_nbytes=2),
    ]
    assert most(uses) == MemoryUse(process="node-0", phase="stage", host_nbytes=5, host_peak_nbytes=9, shared_nbytes=2)
    assert most([]) is None


def test_metrics_are_gigabytes_by_role_and_phase():
    use = MemoryUse(process="node-3", phase="stage", host_nbytes=2 * 10**9, host_peak_nbytes=3 * 10**9)
    assert use.metrics("node") == {"memory/node/stage/host_gb": 2.0, "memory/node/stage/host_peak_gb": 3.0}
