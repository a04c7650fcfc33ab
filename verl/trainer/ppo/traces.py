"""Profiler traces of the steps that `global_profiler.steps` names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from verl.trainer.fleet.cluster import Cluster
from verl.workers.config import PPOConfig

logger = logging.getLogger(__name__)


class Traces:
    """Has the processes of a run write traces. Used on the driver."""

    def __init__(self, config: PPOConfig, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster

    @contextmanager
    def of_ranks(self, step: int) -> Iterator[None]:
        """Have the trainer ranks trace the block, which belongs to `step`."""
        profiler = self._config.global_profiler
        if step not in (profiler.steps or ()):
            yield
            return
        self._cluster.actor.start_profile(profiler.tool)
        yield
        self._cluster.actor.stop_profile(self._config.profile_directory, step)
        logger.info("traces of step %d are in %s", step, self._config.profile_directory)

    @contextmanager
    def of_engines(self, step: int) -> Iterator[None]:
        """Have the rollout engines trace the block, likewise."""
        chosen = step in (self._config.global_profiler.steps or ())
        if not (chosen and self._config.actor_rollout_ref.rollout.profiler.enable):
            yield
            return
        self._cluster.profile_rollouts(f"step_{step}")
        yield
        self._cluster.profile_rollouts(None)
