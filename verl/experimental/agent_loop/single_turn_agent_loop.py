"""verl's place for the loop of one turn."""

from verl.experimental.agent_loop.single_turn import SingleTurnAgentLoop

__all__ = ["SingleTurnAgentLoop"]
