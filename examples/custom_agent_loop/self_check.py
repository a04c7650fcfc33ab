"""An agent loop: the policy answers, is asked to check itself, and answers again."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, Response
from verl.workers.rollout.records import SamplingOptions


class SelfCheckLoop(AgentLoopBase):
    """`question` and `rounds` come from the loop's entry in the YAML file."""

    def __init__(self, *, question: str = "Are you sure?", rounds: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.question = question
        self.rounds = rounds

    async def run(self, sampling_params: SamplingOptions, **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.prompt_tokens(kwargs)
        question_ids = await self._question_tokens()
        request_id = uuid4().hex  # one per sample: its turns stay on the server that has their prefix cached
        response = Response(sampling_params.max_tokens)
        started = time.monotonic()
        num_turns = 1
        for turn in range(1 + self.rounds):
            if turn:
                response.add_inserted(question_ids)  # the policy reads these tokens; it is not trained on them
                num_turns += 1
            output = await self.server_manager.generate(
                request_id,
                prompt_ids=[*prompt_ids, *response.token_ids],
                sampling=replace(sampling_params, max_tokens=response.room),
            )
            response.add_generated(output)
            num_turns += 1
            if output.stop_reason != "completed" or len(question_ids) >= response.room:
                break
        metrics = {"generate_s": time.monotonic() - started}
        return response.output(prompt_ids, num_turns=num_turns, stop_reason=output.stop_reason, metrics=metrics)

    async def _question_tokens(self) -> list[int]:
        """What the chat template puts between the policy's message, which has ended itself, and its next one."""
        mark = "\u241f"
        conversation = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": mark},
            {"role": "user", "content": self.question},
        ]
        after = (await self.rendered(conversation)).rpartition(mark)[2]
        return await self.tokens(after.removeprefix(str(self.tokenizer.eos_token)))
