"""Agents with packages of their own: one process for all samples of a worker, which knows nothing of verl."""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI


async def solve(asked: dict[str, Any]) -> dict[str, Any]:
    async with AsyncOpenAI(base_url=asked["base_url"], api_key=asked["api_key"]) as client:
        answer = await client.chat.completions.create(model=asked["model"], messages=asked["sample"]["messages"])
    return {"agent_output": answer.choices[0].message.content}


async def answer(asked: dict[str, Any]) -> None:
    try:
        said = {"id": asked["id"], "result": await solve(asked)}
    except Exception as exc:  # noqa: BLE001 - an agent raises what it likes
        said = {"id": asked["id"], "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(said), flush=True)


async def main() -> None:
    lines = asyncio.StreamReader(limit=2**26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running: dict[int, asyncio.Task[None]] = {}
    while line := await lines.readline():
        asked = json.loads(line)
        number = asked["id"]
        if not asked.get("cancel"):
            running[number] = asyncio.create_task(answer(asked))
            running[number].add_done_callback(lambda _, number=number: running.pop(number))
        elif number in running:  # it may have ended meanwhile
            running[number].cancel()


asyncio.run(main())
