"""The `global_profiler` and `actor_rollout_ref.actor.profiler` sections."""

from __future__ import annotations

from dataclasses import dataclass

from verl.utils.config import ConfigError, option


@dataclass(frozen=True, kw_only=True)
class GlobalProfilerConfig:
    """Which training steps are traced, and with what."""

    tool: str | None = option(None, "torch, or null: nothing is traced", choices=(None, "torch"))
    steps: list[int] | None = option(None, "training steps to trace, the first is 1; null: none", least=1)
    save_path: str | None = option(
        None, "where each rank's machine has the traces; null: profile in the output directory (verl: outputs/profile)"
    )


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
