"""Whoever answers the policy between its messages: a user who corrects it, an environment, a judge."""

from verl.interactions.base import BaseInteraction

__all__ = ["BaseInteraction"]
