"""`VerifiersAgentLoop`: environments of `verifiers`, in the interpreter that has them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from verl.experimental.agent_loop.environment_agent import EnvironmentAgentLoop
from verl.experimental.agent_loop.errors import AgentCodeError, AgentSetupError
from verl.experimental.agent_loop.openai_endpoint import ModelAccess
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.environments.source import Source

OF_THE_SOURCE = tuple(inspect.signature(Source.of).parameters)[1:]
OF_THE_LOOP = ("timeout_s", "conversations", "on_failure")


class VerifiersAgentLoop(EnvironmentAgentLoop):
    """Runs the environment's rollout of each sample, and takes its reward and metrics.

    Samples come from `python -m verl.utils.data prepare verifiers`.
    """

    def __init__(
        self,
        *,
        environment: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        python: str | None = None,
        on_failure: str = "zero",
        **kwargs: Any,
    ) -> None:
        """`environment` and `arguments` are those of `verifiers.load_environment`, `python` is the interpreter that has
        them (None: this one). The others are those of `OpenAIAgentLoop`."""
        source = Source.of("verifiers", environment=environment, arguments=arguments, python=python)
        super().__init__(server=source.command, on_failure=on_failure, **kwargs)

    @classmethod
    def check_options(cls, where: str, **options: Any) -> None:
        known = (*OF_THE_SOURCE, *OF_THE_LOOP)
        for name in options:
            if name not in known:
                raise ConfigError(f"{where}: unknown {name!r}.{did_you_mean(name, known)}")
        source = Source.of(where, **{name: options.pop(name) for name in OF_THE_SOURCE if name in options})
        source.check(where)
        super().check_options(where, **options, server=source.command)

    async def _work(self, access: ModelAccess, sample: Mapping[str, Any]) -> Any:
        result = await super()._work(access, sample)
        if "fault" in result:
            raise AgentSetupError(result["fault"])
        if "error" in result:
            raise AgentCodeError(f"the environment failed: {result['error']}")
        return result
