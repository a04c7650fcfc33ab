"""`OpenAIAgentLoop`: the conversation of an agent that knows OpenAI's client alone."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from verl.experimental.agent_loop.agent_program import MOST_OUTPUT, program, run_once, words
from verl.experimental.agent_loop.base import AgentLoopBase
from verl.experimental.agent_loop.errors import AgentCodeError, AgentSetupError
from verl.experimental.agent_loop.openai_endpoint import ModelAccess, endpoint
from verl.experimental.agent_loop.openai_session import Session
from verl.experimental.agent_loop.output import AgentLoopOutput
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.loading import load_function
from verl.utils.plain import as_float, plain
from verl.workers.rollout.records import SamplingOptions

Agent = Callable[[ModelAccess, Mapping[str, Any]], Any]

CONVERSATIONS = ("one", "last")
ON_FAILURE = ("raise", "zero")

logger = logging.getLogger(__name__)
_threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="agent")


class OpenAIAgentLoop(AgentLoopBase):
    """Runs a function or a program for each sample, and answers its requests with the policy.

    The tokens of its conversation are those that the engine sampled, with their log-probs and versions. Messages of
    others have `response_mask` 0.
    """

    def __init__(
        self,
        *,
        agent: str | None = None,
        command: str | None = None,
        server: str | None = None,
        timeout_s: float = 600.0,
        conversations: str = "one",
        on_failure: str = "raise",
        **kwargs: Any,
    ) -> None:
        """`agent` is "module:function" or "file.py:function", called as `function(access, sample)`; it may be async.
        `command` is a program instead, and `server` one for all samples of a worker (see `AgentProgram`). The others
        are explained in docs/how-to/train-any-agent.md."""
        super().__init__(**kwargs)
        self.agent = agent
        self.command = command
        self.server = server
        self.timeout_s = timeout_s
        self.conversations = conversations
        self.on_failure = on_failure

    @classmethod
    def check_options(cls, where: str, **options: Any) -> None:
        known = [*inspect.signature(_check).parameters][1:]
        for name in options:
            if name not in known:
                raise ConfigError(f"{where}: unknown {name!r}.{did_you_mean(name, known)}")
        _check(where, **options)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        sampling = SamplingOptions.of(sampling_params)
        session = Session(self, sampling, last_alone=self.conversations == "last")
        sample = {name: plain(value) for name, value in kwargs.items()}
        sample["messages"] = sample.get("raw_prompt")
        started = time.monotonic()
        result, failure = None, None
        async with endpoint().opened(session) as access:
            try:
                async with asyncio.timeout(self.timeout_s):
                    result = await self._work(access, sample)
            except AgentCodeError as exc:
                failure = exc
            except (Exception, SystemExit) as exc:  # noqa: BLE001 - an agent raises what it likes
                late = isinstance(exc, TimeoutError) and time.monotonic() - started >= self.timeout_s
                why = f"it did not end within timeout_s={self.timeout_s:g}" if late else f"{type(exc).__name__}: {exc}"
                failure = AgentCodeError(f"the agent failed: {why}").with_traceback(exc.__traceback__)
        if session.fault is not None:
            raise session.fault
        if session.is_full:  # whatever the agent made of that
            failure = None
        if session.last is None:
            failure = failure or AgentCodeError("the agent ended without an answer of the model")
        if failure is not None:
            self._raise_unless_zero(failure)
        seconds = time.monotonic() - started
        metrics = {"generate_s": session.generate_s, "agent_s": seconds - session.generate_s}
        metrics |= {"agent_calls": float(session.num_calls), "agent_failed": float(failure is not None)}
        last = session.last or session.begun(await self.prompt_tokens(kwargs))
        output = last.response.output(
            last.prompt_ids,
            num_turns=last.num_turns,
            stop_reason="length" if session.is_full else last.stop_reason,
            metrics=metrics,
        )
        if failure is None:
            try:
                return self._scored(output, result)
            except AgentCodeError as exc:
                failure = exc
        self._raise_unless_zero(failure)
        logger.warning("its conversation gets the reward 0: %s", failure)
        return replace(output, reward_score=0.0, metrics={**output.numbers, "agent_failed": 1.0})

    def _raise_unless_zero(self, failure: AgentCodeError) -> None:
        if self.on_failure == "raise" or isinstance(failure, AgentSetupError):
            raise failure

    def _scored(self, output: AgentLoopOutput, result: Any) -> AgentLoopOutput:
        """With what `_work` returned. Raises AgentCodeError."""
        return _scored(output, result)

    async def _work(self, access: ModelAccess, sample: Mapping[str, Any]) -> Any:
        if self.command is not None:
            return await run_once(self.command, access, sample)
        if self.server is not None:
            return await program(self.server).result(access, sample)
        assert self.agent is not None
        agent = _function(self.agent, "agent")
        if inspect.iscoroutinefunction(agent):
            return await agent(access, sample)
        result = await asyncio.get_running_loop().run_in_executor(_threads, agent, access, sample)
        return await result if isinstance(result, Awaitable) else result


def _function(target: str, where: str) -> Agent:
    """Raises ConfigError unless it can be called with (access, sample)."""
    found: Agent = load_function(target, where)
    try:
        inspect.signature(found).bind(None, {})
    except TypeError as exc:
        raise ConfigError(f"{where}: {target}{inspect.signature(found)} cannot take (access, sample): {exc}") from exc
    return found


def _require_program(command: Any, where: str) -> None:
    """Raises ConfigError unless it can be started here; workers are on other hosts, perhaps, with the same files."""
    try:
        found = words(command) if isinstance(command, str) else []
    except ValueError as exc:
        raise ConfigError(f"{where}={command!r} is not a command line: {exc}") from exc
    if not found:
        raise ConfigError(f"{where}={command!r} is not a command line")
    if shutil.which(found[0]) is None:
        raise ConfigError(f"{where}={command!r}: there is no program {found[0]}")


def _scored(output: AgentLoopOutput, result: Any) -> AgentLoopOutput:
    """With what the agent returned: a reward, or something for the reward function. Raises AgentCodeError."""
    if result is None:
        return output
    if isinstance(result, Mapping):
        rest = {str(name): plain(value) for name, value in result.items() if name != "score"}
        scored = _scored(output, result.get("score"))
        return replace(scored, extra_fields={**scored.extra_fields, **rest})
    score = as_float(result)
    if score is None:
        return replace(output, extra_fields={"agent_output": str(result)[-MOST_OUTPUT:]})
    if not math.isfinite(score):
        raise AgentCodeError(f"the agent returned the reward {score}")
    return replace(output, reward_score=score)


def _check(
    where: str,
    *,
    agent: Any = None,
    command: Any = None,
    server: Any = None,
    timeout_s: Any = 600.0,
    conversations: Any = "one",
    on_failure: Any = "raise",
) -> None:
    """Raises ConfigError for options that `OpenAIAgentLoop.run` could not use."""
    given = {"agent": agent, "command": command, "server": server}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise ConfigError(f"{where} needs one of agent (a function), command and server (programs), not {chosen}")
    if agent is not None:
        _function(str(agent), where)
    else:
        _require_program(given[chosen[0]], f"{where}: {chosen[0]}")
    if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool) or not 0 < timeout_s < math.inf:
        raise ConfigError(f"{where}: timeout_s={timeout_s!r} is not a positive number of seconds")
    for name, value, known in (
        ("conversations", conversations, CONVERSATIONS),
        ("on_failure", on_failure, ON_FAILURE),
    ):
        if value not in known:
            raise ConfigError(f"{where}: {name}={value!r} is none of {', '.join(known)}")
