from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.models.architectures import ARCHITECTURES
from verl.utils.config import ConfigError
from verl.workers.config import FSDPConfig, HFModelConfig
from verl.workers.engine.fsdp.checks import check_job
from verl.workers.hf.attention import attention_implementation


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("llama", None, None),
        ("llama", "eager", "eager"),
        ("gemma2", None, "eager"),
        ("gemma2", "flash_attention_2", "flash_attention_2"),
        ("falcon-alibi", None, "eager"),
    ],
)
def test_the_implementation_is_one_that_computes_the_scores_of_the_config(name, asked, expected):
    assert attention_implementation(ARCHITECTURES[name].make_config(), asked) == expected


@pytest.mark.parametrize(
    ("name", "asked", "text"),
    [
        ("gemma2", "sdpa", "attn_logit_softcapping="),
        ("falcon-alibi", "sdpa", "alibi=True"),
        ("falcon-alibi", "flash_attention_2", "alibi=True"),
        ("llama", "sdpaa", "there are sdpa, eager"),
    ],
)
def test_one_that_would_change_the_numbers_is_refused(name, asked, text):
    with pytest.raises(ConfigError, match=text):
        attention_implementation(ARCHITECTURES[name].make_config(), asked)


@pytest.mark.parametrize(
    ("asked", "device", "why"),
    [
        ("flash_attention_2", "cpu", "is not trained on CPUs"),
        ("flex_attention", "cpu", "is not trained on CPUs"),
        ("flash_attention_2", "cuda", "needs the package 'flash_attn', which is not installed"),
        ("flash_attention_3", "cuda", "needs the package 'flash_attn_interface', which is not installed"),
    ],
)
def test_one_that_a_trainer_has_not_is_refused_on_the_driver(asked, device, why):
    if any(map(find_spec, ("flash_attn", "flash_attn_interface", "kernels"))):
        pytest.skip("one of the packages is installed")
    model = HFModelConfig(path=".", override_config={"attn_implementation": asked})
    with pytest.raises(ConfigError, match=f"attn_implementation={asked} {why}: leave the key out"):
        check_job(FSDPConfig(), model, 1, device, 0)
