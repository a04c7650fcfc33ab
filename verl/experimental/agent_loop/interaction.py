"""The conversation of one sample with an interaction, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from verl.experimental.agent_loop.errors import AgentCodeError, AgentLoopError
from verl.experimental.agent_loop.tool_answers import ToolThread
from verl.experimental.agent_loop.tools import AgentData
from verl.interactions import BaseInteraction
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.utils.config import did_you_mean
from verl.workers.config import PPOConfig

T = TypeVar("T")
DEFAULT_NAME = "gsm8k"
"""verl's default for samples without a name of an interaction."""


def interactions_of(config: PPOConfig) -> dict[str, BaseInteraction]:
    """The interactions of a file, by name. Raises ConfigError if one cannot be loaded."""
    path = config.actor_rollout_ref.rollout.multi_turn.interaction_config_path
    return initialize_interactions_from_config(path) if path else {}


class Partner:
    """The interaction of one conversation, which answers the policy. Raises AgentCodeError for its errors."""

    def __init__(
        self, interaction: BaseInteraction, options: Mapping[str, Any], thread: ToolThread, timeout_s: float
    ) -> None:
        """`options` are the sample's `interaction_kwargs`."""
        self.turn_scores: list[float] = []
        self._interaction, self._options = interaction, dict(options)
        self._thread, self._timeout_s = thread, timeout_s
        self._instance_id = ""

    async def start(self, request_id: str) -> None:
        started = await self._run("start_interaction", request_id, **self._options)
        self._instance_id = started if isinstance(started, str) else request_id

    async def reply(self, agent_data: AgentData) -> str | None:
        """The reply to the last of `agent_data.messages`; None if the conversation is over."""
        messages = [dict(message) for message in agent_data.messages]
        answer = await self._run("generate_response", self._instance_id, messages, **self._options)
        try:
            over, text, score, _ = answer
            self.turn_scores.append(float(score))
        except (TypeError, ValueError) as exc:
            raise AgentCodeError(
                f"interaction {self._interaction.name}: generate_response returns (over, text, score, metadata), "
                f"not {answer!r}"
            ) from exc
        return None if over else str(text)

    async def end(self) -> None:
        await self._run("finalize_interaction", self._instance_id)

    async def _run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        what = f"interaction {self._interaction.name}: {method}"
        work: Coroutine[Any, Any, Any] = _called(getattr(self._interaction, method), *args, **kwargs)
        try:
            return await self._thread.run(work, what, timeout_s=self._timeout_s)
        except Exception as exc:
            raise AgentCodeError(f"{what}: {type(exc).__name__}: {exc}") from exc


async def _called(method: Any, *args: Any, **kwargs: Any) -> Any:
    """On the tools' thread, where what a method does before it first waits belongs, too."""
    return await method(*args, **kwargs)


@asynccontextmanager
async def conversation(
    interactions: Mapping[str, BaseInteraction],
    sample: Mapping[str, Any],
    request_id: str,
    thread: ToolThread,
    timeout_s: float,
) -> AsyncIterator[Partner | None]:
    """The partner that `sample` names in its `interaction_kwargs`; None without these or without `interactions`.

    Raises AgentLoopError for a name that is not among `interactions`.
    """
    options = sample.get("interaction_kwargs") or (sample.get("extra_info") or {}).get("interaction_kwargs")
    if not interactions or not options:
        yield None
        return
    name = options.get("name") or (next(iter(interactions)) if len(interactions) == 1 else DEFAULT_NAME)
    if name not in interactions:
        raise AgentLoopError(f"there is no interaction {name!r}.{did_you_mean(name, interactions)}")
    partner = Partner(interactions[name], options, thread, timeout_s)
    await partner.start(request_id)
    try:
        yield partner
    except BaseException:
        await _ended_quietly(partner)
        raise
    await partner.end()


async def _ended_quietly(partner: Partner) -> None:
    """What went wrong before is what is told."""
    with suppress(AgentLoopError, asyncio.CancelledError):
        await asyncio.shield(partner.end())
