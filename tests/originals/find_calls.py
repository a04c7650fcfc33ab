"""The calls of tools that are found in texts.

JSON with `tokenizer`, a directory, `texts`, pairs of a format and a text, and `formats`, null for all, comes in; for
each text a list of names and arguments goes out, and for each format why there is none of this name, or null.

Run as a file, with PyPI's verl or ours in front.
"""

import asyncio
import json
import sys
from typing import Any

from transformers import AutoTokenizer

from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": ""},
                "b": {"type": "string", "description": ""},
            },
            "required": ["a"],
        },
    },
}


async def found(tokenizer: Any, texts: list[list[str]]) -> list[list[Any]]:
    tools = [OpenAIFunctionToolSchema.model_validate(TOOL)]
    calls = []
    for name, text in texts:
        parser = ToolParser.get_tool_parser(name, tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        _, own = await parser.extract_tool_calls(ids, tools)
        calls.append([[one.name, json.loads(one.arguments)] for one in own])
    return calls


def missing(name: str, tokenizer: Any) -> str | None:
    try:
        ToolParser.get_tool_parser(name, tokenizer)
    except ValueError as exc:
        return str(exc)
    return None


if __name__ == "__main__":
    given = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(given["tokenizer"])
    formats = {name: missing(name, tokenizer) for name in given["formats"] or sorted(ToolParser._registry)}
    calls = asyncio.run(found(tokenizer, given["texts"]))
    sys.stdout.write("\n" + json.dumps({"calls": calls, "formats": formats}))
