"""Before any process starts, a run knows whether the checkpoint that it would go on from is of its models."""

import re

import pytest
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from verl.trainer.config.loader import load_config
from verl.trainer.ppo.requirements import require_model_of_run
from verl.utils import builtin
from verl.utils.config import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODEL = "builtin:tiny-qwen2"


def checkpoint(directory, model, part="actor"):
    """As torch writes one of `model`."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=directory / part, no_dist=True)
    return directory


def policy():
    return AutoModelForCausalLM.from_pretrained(builtin.builtin_model(MODEL))


def other(**sizes):
    return Qwen2ForCausalLM(Qwen2Config(**{**policy().config.to_dict(), "layer_types": None, **sizes}))


def adapted():
    return get_peft_model(policy(), LoraConfig(r=4, target_modules=["q_proj"]))


def test_a_checkpoint_of_the_same_model_fits(tmp_path):
    require_model_of_run(load_config([]), checkpoint(tmp_path, policy()))


def test_adapters_are_left_to_the_ranks(tmp_path):
    require_model_of_run(load_config(["actor_rollout_ref.model.lora_rank=8"]), checkpoint(tmp_path, adapted()))


def test_one_that_has_no_training_state_is_left_to_the_ranks(tmp_path):
    require_model_of_run(load_config([]), tmp_path)


@pytest.mark.parametrize(
    ("model", "overrides", "said"),
    [
        (
            lambda: other(intermediate_size=1024),
            [],
            "mlp.gate_proj.weight is [1024, 128] there, [512, 128] here (and 11",
        ),
        (lambda: other(num_hidden_layers=5), [], "model.layers.4.self_attn.q_proj.weight is not here"),
        (lambda: other(num_hidden_layers=3), [], "model.layers.3.self_attn.q_proj.weight is not there"),
        (policy, ["actor_rollout_ref.model.lora_rank=8"], "has no adapters: actor_rollout_ref.model.lora_rank=8 does"),
        (adapted, [], "has adapters: actor_rollout_ref.model.lora_rank=0 does not fit"),
    ],
    ids=["wider", "deeper", "shallower", "no adapters", "adapters"],
)
def test_one_of_another_model_is_refused_with_the_remedy(tmp_path, model, overrides, said):
    found = checkpoint(tmp_path, model())
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        require_model_of_run(load_config(overrides), found)
    assert "trainer.resume_mode=disable" in str(refused.value)


def test_a_critics_is_compared_too(tmp_path):
    checkpoint(checkpoint(tmp_path, policy()), other(intermediate_size=1024), part="critic")
    require_model_of_run(load_config([]), tmp_path)  # without a critic
    with pytest.raises(ConfigError, match=r"critic, from which .* is not of critic\.model\.path"):
        require_model_of_run(load_config(["algorithm.adv_estimator=gae"]), tmp_path)
