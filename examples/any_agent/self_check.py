"""An agent of the OpenAI client: it asks for an answer, and asks the model to check it."""

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from verl.experimental.agent_loop.openai_endpoint import ModelAccess


async def solve(access: ModelAccess, sample: Mapping[str, Any]) -> None:
    """`sample` has the columns of the data set, and `messages`, its prompt. Returns no reward: the run's function
    scores the whole conversation."""
    messages = [*sample["messages"]]
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        for question in ("Check your answer and give it again.", None):
            answer = await client.chat.completions.create(model=access.model, messages=messages, max_tokens=48)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            if question is not None:
                messages.append({"role": "user", "content": question})
