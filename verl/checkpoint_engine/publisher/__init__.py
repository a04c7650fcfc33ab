"""Push weights of any training loop into running vLLM and SGLang servers; `WeightPublisher`, also for TRL."""

from .publisher import PendingPush, WeightPublisher
from .trl import TRLWeightTransfer

__all__ = ["PendingPush", "TRLWeightTransfer", "WeightPublisher"]
