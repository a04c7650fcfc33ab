"""The calls of tools that verl's hermes format finds in texts: a JSON list comes in, the number in each goes out.

Run as a file with PyPI's verl in front.
"""

import asyncio
import json
import sys
from typing import Any

from verl.experimental.agent_loop.tool_parser import ToolParser


class Characters:
    """A tokenizer whose tokens are characters."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(map(chr, token_ids))


async def found(texts: list[str]) -> list[int]:
    tokenizer: Any = Characters()
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    return [len((await parser.extract_tool_calls([*map(ord, text)], []))[1]) for text in texts]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(found(json.load(sys.stdin)))))
