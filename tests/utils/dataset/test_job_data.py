"""Prompts of a job are read and counted before it starts."""

import json

import pytest

from verl.trainer.config.loader import load_config
from verl.trainer.ppo.data import build_dataloaders
from verl.utils.config import ConfigError
from verl.utils.model import load_tokenizer
from verl.workers.config import HFModelConfig


def test_batches_of_no_prompts_are_an_error_in_a_sentence(tiny_model_dir):
    config = load_config(["data.train_batch_size=0"])
    tokenizer = load_tokenizer(HFModelConfig(path=str(tiny_model_dir)))
    with pytest.raises(ConfigError, match=r"data.train_batch_size=0 is for fully_async_main alone"):
        build_dataloaders(config, tokenizer, None)


def test_sums_do_not_validate_training_on_data_of_the_users_own(tiny_model_dir, tmp_path):
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+1="}]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row | {"reward_model": {"ground_truth": "2"}}) + "\n")
    config = load_config([f"data.train_files={tmp_path}/mine.jsonl", "data.train_batch_size=1"])
    tokenizer = load_tokenizer(HFModelConfig(path=str(tiny_model_dir)))
    with pytest.raises(ConfigError, match=r"^data.val_files is not set: give parquet or JSON Lines files"):
        build_dataloaders(config, tokenizer, None)
