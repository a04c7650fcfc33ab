"""The soft penalty for responses that are nearly too long, or cut (DAPO, arXiv:2503.14476, section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.utils.config import ConfigError
from verl.workers.config import RewardModelConfig

KEY = "reward_model.reward_kwargs"


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """0 up to `max_length - buffer_length` tokens, then falling by a straight line to -`factor` at `max_length`."""

    max_length: int
    buffer_length: int
    factor: float
    log: bool

    def __call__(self, length: int) -> float:
        """The penalty of a response of `length` tokens; it keeps falling beyond `max_length`."""
        exceeding = length - (self.max_length - self.buffer_length)
        return min(-exceeding / self.buffer_length * self.factor, 0.0)


def overlong_penalty(config: RewardModelConfig, max_response_length: int) -> OverlongPenalty | None:
    """The penalty of the configuration, or None. Raises ConfigError for impossible lengths."""
    given, buffer = config.reward_kwargs, config.reward_kwargs.overlong_buffer_cfg
    if not buffer.enable:
        return None
    if config.reward_manager != "dapo":
        raise ConfigError(
            f"{KEY}.overlong_buffer_cfg.enable=true needs reward_model.reward_manager=dapo, not {config.reward_manager}"
        )
    longest = given.max_resp_len or max_response_length
    if not 0 < buffer.len <= longest:
        key = "data.max_response_length" if given.max_resp_len is None else f"{KEY}.max_resp_len"
        raise ConfigError(f"{KEY}.overlong_buffer_cfg.len={buffer.len} must be above 0 and at most {key}={longest}")
    return OverlongPenalty(max_length=longest, buffer_length=buffer.len, factor=buffer.penalty_factor, log=buffer.log)
