"""Scores responses by the built-in rules, or a user's function."""

from verl.utils.reward_score.default import default_compute_score, known_sources
from verl.utils.reward_score.loading import RewardFunction, load_reward_function
from verl.utils.reward_score.pool import Abandoned, ScoringError, ScoringPool
from verl.utils.reward_score.process import NoNumber, Raised, Scored

__all__ = [
    "Abandoned",
    "NoNumber",
    "Raised",
    "RewardFunction",
    "Scored",
    "ScoringError",
    "ScoringPool",
    "default_compute_score",
    "known_sources",
    "load_reward_function",
]
