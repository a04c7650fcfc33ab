"""What a tool is called, what it takes, and what it answers, under verl's names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _JsonSchema(BaseModel):
    """Keeps the words of JSON schema that have no field."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_JsonSchema):
    """One argument."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_JsonSchema):
    """All arguments."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_JsonSchema):
    """The function behind a tool."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_JsonSchema):
    """What the chat template shows the model."""

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as the model wrote it."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call that can be executed."""

    name: str
    arguments: dict[str, Any]


class OpenAIFunctionToolCall(BaseModel):
    """A call with its number."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool answers. A model that sees gets pictures before the text; videos are an error."""

    text: str | None = None
    image: list[Any] | None = None
    """Pictures: PIL images, encoded bytes, paths, or dicts of them, as data sets have them."""
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video
