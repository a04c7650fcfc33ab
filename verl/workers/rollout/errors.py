"""The exceptions of rollout replicas.

RolloutError
├── NoWeights        a request before any weights were activated, or after an activation failed
├── NotFinite        the policy's weights give logits that are not finite
├── ReplicaDied      the server process, or the engine behind it, is gone
└── ReplicaTimeout   no answer within the deadline

A version that could not be loaded is `verl.checkpoint_engine.errors.ActivationError`.
"""

from __future__ import annotations


class RolloutError(Exception):
    """Base of the tree. One message that begins with the replica's name, so that it survives Ray's pickling."""


class NoWeights(RolloutError):
    pass


class NotFinite(RolloutError):
    pass


class ReplicaDied(RolloutError):
    pass


class ReplicaTimeout(RolloutError):
    pass
