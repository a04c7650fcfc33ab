"""verl's place for what a configuration needs."""

from verl.trainer.ppo.experience import needs_critic as need_critic
from verl.trainer.ppo.experience import needs_reference as need_reference_policy
from verl.trainer.ppo.verl_names import refused

__all__ = ["need_critic", "need_reference_policy"]

__getattr__ = refused(__name__)
