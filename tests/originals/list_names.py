"""What PyPI's verl has registered under names that a configuration may say: nothing comes in, lists by kind go out."""

import json
import sys

from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY

from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

REGISTRIES = {
    "estimators": ADV_ESTIMATOR_REGISTRY,
    "losses": POLICY_LOSS_REGISTRY,
    "distillation losses": DISTILLATION_LOSS_REGISTRY,
    "reward managers": REWARD_MANAGER | REWARD_MANAGER_REGISTRY,
    "agent loops": _agent_loop_registry,
    "formats of tool calls": ToolParser._registry,
    "rollouts": RolloutReplicaRegistry._registry,
}

if __name__ == "__main__":
    json.load(sys.stdin)
    sys.stdout.write("\n" + json.dumps({kind: sorted(map(str, names)) for kind, names in REGISTRIES.items()}))
