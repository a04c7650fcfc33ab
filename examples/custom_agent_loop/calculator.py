"""A tool: exact arithmetic."""

from __future__ import annotations

import operator
from typing import Any

from verl.experimental.agent_loop import BaseTool

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


class Calculator(BaseTool):
    schema = {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Applies an operation to two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "left": {"type": "number"},
                    "operation": {"type": "string", "enum": list(OPERATIONS)},
                    "right": {"type": "number"},
                },
                "required": ["left", "operation", "right"],
            },
        },
    }
    default_config = {"digits": 12}
    idempotent = True

    async def execute(self, arguments: dict[str, Any]) -> str:
        """Whatever goes wrong here (an unknown operation, a division by zero) is told to the model."""
        result = OPERATIONS[arguments["operation"]](arguments["left"], arguments["right"])
        return f"{result:.{self.config['digits']}g}"
