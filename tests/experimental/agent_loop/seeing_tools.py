"""Tools written for verl that answer with pictures."""

from typing import Any

import yaml

from tests.pictures import noise
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

SCHEMA = {
    "type": "function",
    "function": {"name": "look", "description": "Looks closer.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
SHOWN = noise(7, 56, 112)
"""What `Looks` shows beside a part of the last picture."""


def part_of(picture: Any) -> Any:
    return picture.crop((0, 0, 56, 28))


class Looks(BaseTool):
    """Answers with what its configuration names: a part of the last picture and another one, in two forms."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        last = kwargs["agent_data"].image_data[-1:]
        shown: dict[str, Any] = {
            "pictures": {"text": "closer <|image_pad|>", "image": [*map(part_of, last), SHOWN]},
            "one": {"image": [SHOWN]},
            "a damaged one": {"text": "closer", "image": [{"bytes": b"no picture"}]},
            "one of another machine": {"text": "closer", "image": ["https://example.org/x.png"]},
            "a video": {"text": "closer", "video": [b"x"]},
        }
        return ToolResponse(**shown[self.config["shows"]]), 0.5, {}


def tool_file(directory: Any, shows: str) -> Any:
    path = directory / "tools.yaml"
    entry = {"class_name": f"{__name__}.Looks", "config": {"type": "native", "shows": shows}, "tool_schema": SCHEMA}
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return path
