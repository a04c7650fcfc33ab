"""Interactions answer the policy between its messages: a correcting user, an environment, a judge."""

from verl.interactions.base import BaseInteraction

__all__ = ["BaseInteraction"]
