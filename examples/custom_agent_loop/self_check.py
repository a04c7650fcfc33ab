"""An agent loop: the policy answers, is asked to check itself, and answers again."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, Response


class SelfCheckLoop(AgentLoopBase):
    """`question` and `rounds` come from the loop's entry in the YAML file."""

    def __init__(self, *, question: str = "Are you sure?", rounds: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.question = question
        self.rounds = rounds

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.prompt_tokens(kwargs)
        question = [{"role": "user", "content": self.question}]
        request_id = uuid4().hex  # one per sample: its turns stay on the server that has their prefix cached
        response = Response(sampling_params["max_tokens"])
        started = time.monotonic()
        num_turns = 1
        for round_number in range(1 + self.rounds):
            output = await self.server_manager.generate(
                request_id,
                prompt_ids=[*prompt_ids, *response.token_ids],
                sampling_params={**sampling_params, "max_tokens": response.room},
            )
            response.add_generated(output)
            num_turns += 1
            question_ids = await self.reply_tokens(question, output.token_ids)
            ended = output.stop_reason != "completed" or round_number == self.rounds
            if ended or len(question_ids) >= response.room:
                break
            response.add_inserted(question_ids)  # the policy reads these tokens; it is not trained on them
            num_turns += 1
        metrics = {"generate_s": time.monotonic() - started}
        return response.output(prompt_ids, num_turns=num_turns, stop_reason=output.stop_reason, metrics=metrics)
