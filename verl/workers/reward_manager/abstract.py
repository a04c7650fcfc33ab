"""`AbstractRewardManager`: the base that verl gives reward managers of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from verl.protocol import DataProto


class AbstractRewardManager(ABC):
    """An optional base: `register` recognises a class by its arguments. An instance is made once, on the driver."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str = "data_source", **kwargs: Any
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Rewards [B, R], or with `return_dict` {"reward_tensor": those, "reward_extra_info": {name: B values}}."""
