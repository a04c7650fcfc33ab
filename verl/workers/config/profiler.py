"""The `global_profiler` and `actor_rollout_ref.actor.profiler` sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.utils.config import ConfigError, option

DEVICES_OF_TOOL = {"torch": ("cpu", "cuda"), "torch_memory": ("cuda",), "nsys": ("cuda",), "npu": ("npu",)}


@dataclass(frozen=True, kw_only=True)
class GlobalProfilerConfig:
    """Which training steps are traced, and with what."""

    tool: str | None = option(
        None,
        "torch: a trace of CPU and CUDA; torch_memory: a snapshot of CUDA's memory; nsys: Nsight Systems; npu: "
        "torch_npu's profiler; null: nothing is traced",
        choices=(None, *DEVICES_OF_TOOL),
    )
    steps: list[int] | None = option(None, "training steps to trace, the first is 1; null: none", least=1)
    save_path: str | None = option(
        None, "where each rank's machine has the traces; null: profile in the output directory (verl: outputs/profile)"
    )
    nsys_options: dict[str, Any] = option(
        {
            "trace": "cuda,nvtx,cublas,ucx",
            "cuda-memory-usage": "true",
            "cuda-graph-trace": "graph",
            "capture-range": "cudaProfilerApi",
            "kill": "none",
        },
        "options of `nsys profile`, which trainer ranks run under with tool=nsys; it ends after the last of the steps",
    )

    def nsight(self, directory: str) -> dict[str, str] | None:
        """The nsys options with which Ray starts the trainer ranks, with reports in `directory`; None without nsys."""
        if self.tool != "nsys" or not self.steps:
            return None
        options = {"capture-range-end": f"repeat-shutdown:{len(self.steps)}", "o": f"{directory}/process_%p"}
        given = self.nsys_options
        return options | {name: str(value) for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """Which trainer ranks are traced in the steps of `global_profiler`."""

    enable: bool = option(False, "trace trainer ranks")
    all_ranks: bool = option(False, "all of them")
    ranks: list[int] = option([], "these of them", least=0)

    def __post_init__(self) -> None:
        if self.all_ranks and self.ranks:
            raise ConfigError(f"all_ranks=true and ranks={self.ranks}: set one of them")

    def traces(self, rank: int) -> bool:
        return self.enable and (self.all_ranks or rank in self.ranks)
