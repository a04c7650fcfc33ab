"""verl's import path of the loop with one turn."""

from verl.experimental.agent_loop.single_turn import SingleTurnAgentLoop

__all__ = ["SingleTurnAgentLoop"]
