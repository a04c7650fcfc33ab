"""verl's module of checks on which roles a configuration needs."""

from verl.trainer.ppo.needs import needs_critic as need_critic
from verl.trainer.ppo.needs import needs_reference as need_reference_policy

__all__ = ["need_critic", "need_reference_policy"]
