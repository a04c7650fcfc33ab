"""Checks on the driver, before a run, whether loops use the interactions that configuration and samples name."""

from __future__ import annotations

from collections.abc import Mapping

from verl.experimental.agent_loop.registry import LoopEntry, loop_class
from verl.experimental.agent_loop.single_turn import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_loop import ToolAgentLoop
from verl.experimental.agent_loop.worker import default_loop
from verl.utils.config import ConfigError
from verl.utils.dataset.rl_dataset import Partners
from verl.workers.config import PPOConfig

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
KEY = f"{MULTI_TURN}.interaction_config_path"


def unheard(config: PPOConfig, samples: Mapping[str | None, Partners], loops: Mapping[str, LoopEntry]) -> list[str]:
    """Warnings about unused interactions. `samples` are those of each agent; the key None is for samples without one.

    Custom loops are not checked: they may use `interaction_kwargs` in any way. Raises ConfigError for samples that name
    an interaction of the file but would be generated without it.
    """
    path = config.actor_rollout_ref.rollout.multi_turn.interaction_config_path
    names = {agent: agent or default_loop(config) for agent in samples}
    classes = {agent: loop_class(name, loops) for agent, name in names.items()}
    asking = {agent: found for agent, found in samples.items() if found.count}
    if path is None:
        count = sum(
            found.count
            for agent, found in asking.items()
            if issubclass(classes[agent], (SingleTurnAgentLoop, ToolAgentLoop))
        )
        warning = f"no interaction answers {count} samples that have interaction_kwargs: {KEY} names no file"
        return [warning] if count else []
    for agent, found in asking.items():
        if issubclass(classes[agent], SingleTurnAgentLoop):
            remedy = "agent_name=tool_agent" if agent else f"{MULTI_TURN}.enable=true"
            raise ConfigError(
                f"{found.first}: no interaction would answer the {found.count} samples of agent loop {names[agent]!r} "
                f"that have interaction_kwargs, though {KEY}={path}: tool_agent has interactions ({remedy}); or remove "
                "one of the two"
            )
    if samples and not any(issubclass(found, ToolAgentLoop) for found in classes.values()):
        used = ", ".join(sorted(set(names.values())))
        return [
            f"{KEY}={path} is not read: only tool_agent, and loops derived from it, have interactions, and samples' "
            f"loop is {used} ({MULTI_TURN}.enable=true makes tool_agent the default)"
        ]
    return []
