from __future__ import annotations

import pytest

from tests.models.architectures import ARCHITECTURES
from verl.utils.config import ConfigError
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
