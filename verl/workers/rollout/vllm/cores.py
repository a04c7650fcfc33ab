"""Which CPU cores which vLLM worker computes on. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def assign_cores(cores: Sequence[int], *, replicas: int, ranks: int, replica: int) -> list[list[int]]:
    """Cores of each tensor-parallel rank of `replica`, one of `replicas` on a machine with `cores`.

    Every rank gets an equal run of neighbouring cores; with more ranks than cores they take turns on single cores.
    """
    share = len(cores) // (replicas * ranks)
    first = replica * ranks
    if share == 0:
        return [[cores[rank % len(cores)]] for rank in range(first, first + ranks)]
    return [list(cores[rank * share : (rank + 1) * share]) for rank in range(first, first + ranks)]


def omp_threads_bind(assigned: Sequence[Sequence[int]]) -> str:
    """The assignment in the syntax of `VLLM_CPU_OMP_THREADS_BIND`: `0,1|2,3`."""
    return "|".join(",".join(str(core) for core in cores) for cores in assigned)
