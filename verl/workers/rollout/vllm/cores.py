"""Assign CPU cores to vLLM workers."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence


def assign_cores(cores: Sequence[int], *, replicas: int, ranks: int, replica: int) -> list[list[int]]:
    """Cores of each tensor-parallel rank of `replica`, one of `replicas` on a machine with `cores`.

    Every rank gets an equal run of neighbouring cores and leaves the first of several to the rest: the engine core, the
    server, agent loops. Compute threads are pinned and spin, so one that shares its core with them holds up all the
    others (two threads on two busy cores were three times slower than one). With more ranks than cores they take turns
    on single cores.
    """
    share = len(cores) // (replicas * ranks)
    mine = range(replica * ranks, (replica + 1) * ranks)
    if share <= 1:
        return [[cores[rank % len(cores)]] for rank in mine]
    return [list(cores[rank * share + 1 : (rank + 1) * share]) for rank in mine]


def omp_threads_bind(assigned: Sequence[Sequence[int]]) -> str:
    """The assignment in the syntax of `VLLM_CPU_OMP_THREADS_BIND`: `0,1|2,3`."""
    return "|".join(",".join(str(core) for core in cores) for cores in assigned)


def bind_single_worker(environment: MutableMapping[str, str], cores: Sequence[int]) -> None:
    """Have the only worker of an engine, which needs no process beside the engine core's, compute on `cores`.

    The core takes its threads from the environment. vLLM would give the worker a process, unless told otherwise,
    because it cannot know that this environment is in time.
    """
    environment["VLLM_CPU_OMP_THREADS_BIND"] = omp_threads_bind([cores])
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment["OMP_NUM_THREADS"] = str(len(cores))
    environment["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))
