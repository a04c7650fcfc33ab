"""`single_turn_agent`: one prompt, one response."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.base import AgentLoopBase
from verl.experimental.agent_loop.output import AgentLoopOutput, Response
from verl.utils.pictures import MULTI_MODAL_DATA, data_of


class SingleTurnAgentLoop(AgentLoopBase):
    """Generates one message of the policy."""

    sees = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.prompt_tokens(kwargs)
        response = Response(sampling_params["max_tokens"])
        started = time.monotonic()
        seen = data_of(kwargs.get(MULTI_MODAL_DATA))
        output = await self.server_manager.generate(
            uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params, **seen
        )
        response.add_generated(output)
        metrics = {"generate_s": time.monotonic() - started}
        return response.output(prompt_ids, num_turns=2, stop_reason=output.stop_reason, metrics=metrics)
