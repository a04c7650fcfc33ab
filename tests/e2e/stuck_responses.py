"""For `model.external_lib`: an engine that stops in the middle of a response, and a loop that pays before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, Response, register
from verl.experimental.agent_loop.tool_calls import ToolAnswer
from verl.workers.rollout import RolloutReplicaRegistry
from verl.workers.rollout.hf.engine import HFEngine
from verl.workers.rollout.hf.replica import HFReplica
from verl.workers.rollout.records import SamplingOptions

FIRST_TURN = 8
"""Tokens."""
BEGUN = 10
"""Tokens of the response that is stuck, which is none of a first turn."""


@RolloutReplicaRegistry.register("stuck")
class StuckReplica(HFReplica):
    engine = f"{__name__}:StuckEngine"


class StuckEngine(HFEngine):
    """From version 1 on, while there is no file `gate` in `engine_kwargs.stuck.directory`."""

    def _can_step(self) -> bool:
        gate = Path(self._spec.config.engine_kwargs["stuck"]["directory"]) / "gate"
        begun = any(len(request.tokens) >= BEGUN for request in self._active)
        return super()._can_step() and not (self._version >= 1 and begun and not gate.exists())


@register("pays")
class Pays(AgentLoopBase):
    """Two turns, and a payment between them, which it writes into a file `ledger` there."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        sampling = SamplingOptions.of(sampling_params)
        prompt_ids, response = await self.prompt_tokens(kwargs), Response(sampling.max_tokens)
        directory = Path(self.rollout_config.engine_kwargs["stuck"]["directory"])
        for most in (FIRST_TURN, sampling.max_tokens - FIRST_TURN):
            conversation = [*prompt_ids, *response.token_ids]
            options = {**sampling_params, "max_tokens": most}
            response.add_generated(
                await self.server_manager.generate(uuid4().hex, prompt_ids=conversation, sampling_params=options)
            )
            if most == FIRST_TURN:
                key = await self.tool_calls.key([*prompt_ids, *response.token_ids], 0)

                async def pay(key: str = key) -> ToolAnswer:
                    line = json.dumps({"uid": kwargs["uid"], "key": key})
                    with (directory / "ledger").open("a") as ledger:
                        ledger.write(line + "\n")
                    return ToolAnswer("paid")

                async def outcome() -> ToolAnswer:
                    return ToolAnswer("interrupted")

                await self.tool_calls.answer(key, idempotent=False, execute=pay, outcome=outcome)
        return response.output(prompt_ids, num_turns=2, stop_reason="length", metrics={})
