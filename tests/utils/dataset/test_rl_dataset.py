import json
import logging
import re

import pytest

from verl.utils.config import ConfigError
from verl.utils.dataset import RLHFDataset, build_dataset
from verl.utils.dataset.rl_dataset import truncate
from verl.workers.config import DataConfig
from verl.workers.config.data import CustomClassConfig

OVERHEAD = 3  # <|user|>, <|end|>, <|assistant|>


def test_an_item_has_token_ids_and_everything_else_of_its_row(write, tokenizer):
    path = write(["1+1=", "2+2="], agent_name=["tool_agent", None])
    item = RLHFDataset([path], tokenizer, DataConfig())[1]
    assert tokenizer.decode(item["prompt_ids"]) == "<|user|>2+2=<|end|><|assistant|>"
    assert item == {
        "prompt_ids": item["prompt_ids"],
        "raw_prompt": [{"role": "user", "content": "2+2="}],
        "data_source": "test/source",
        "reward_model": {"style": "rule", "ground_truth": "2+2="},
        "extra_info": {"split": "train", "index": 101},
        "index": 101,
        "tools_kwargs": {},
        "interaction_kwargs": {},
        "agent_name": None,
    }


def test_without_extra_info_the_index_is_the_row(write, tokenizer):
    item = RLHFDataset([write(["a", "b"], extra_info=None)], tokenizer, DataConfig())[1]
    assert (item["extra_info"], item["index"]) == ({}, 1)


def test_several_files_are_one_data_set_also_with_different_extra_columns(write, tokenizer):
    files = [write(["a"], name="a.parquet"), write(["b"], name="b.parquet", ability=["math"])]
    dataset = RLHFDataset(files, tokenizer, DataConfig())
    assert [item["ability"] for item in dataset] == [None, "math"]


def test_fields_that_a_message_lacks_do_not_reach_the_chat_template(write, tokenizer):
    prompt = [[{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "u", "name": "Ada"}]]
    item = RLHFDataset([write(["u"], prompt=prompt)], tokenizer, DataConfig())[0]
    assert item["raw_prompt"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "Ada"}]


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_missing_column_names_the_file_that_lacks_it(write, tokenizer, column):
    files = [write(["a"], name="good.parquet"), write(["b"], name="bad.parquet", **{column: None})]
    with pytest.raises(ConfigError, match=rf"bad.parquet has no column '{column}'"):
        RLHFDataset(files, tokenizer, DataConfig())


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (
            {"question": "1+1?", "answer": "#### 2"},
            "of it: python -m verl.utils.data prepare gsm8k --from",
        ),
        ({"problem": "1+1?", "solution": "2"}, "prepare math --from"),
        (
            {"messages": [{"role": "user", "content": "1+1?"}]},
            "are the prompts: data.prompt_key=messages",
        ),
    ],
)
def test_a_file_of_another_form_says_what_makes_it_usable(tmp_path, tokenizer, row, remedy):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=rf"no column 'prompt'.*{re.escape(remedy)}"):
        RLHFDataset([str(tmp_path / "rows.jsonl")], tokenizer, DataConfig())


def test_a_misspelt_prompt_key_suggests_the_column(write, tokenizer):
    with pytest.raises(ConfigError, match="no column 'promt'. Did you mean 'prompt'"):
        RLHFDataset([write(["a"])], tokenizer, DataConfig(prompt_key="promt"))


def test_a_prompt_that_is_plain_text_is_refused_with_its_row(write, tokenizer):
    with pytest.raises(ConfigError, match="row 0 of .* no list of chat messages .*'plain text'"):
        RLHFDataset([write(["a"], prompt=["plain text"])], tokenizer, DataConfig())


def test_a_file_that_is_no_parquet_is_named(tmp_path, tokenizer):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match="notes.txt cannot be read"):
        RLHFDataset([tmp_path / "notes.txt"], tokenizer, DataConfig())


def test_a_column_of_another_type_names_the_file(write, tokenizer):
    files = [write(["a"], name="a.parquet"), write(["b"], name="b.parquet", reward_model=[7])]
    with pytest.raises(ConfigError, match="row 0 of .*b.parquet: reward_model is 7"):
        RLHFDataset(files, tokenizer, DataConfig())


def test_overlong_prompts_are_an_error_that_counts_them(write, tokenizer):
    path = write(["x" * 5, "x" * 20, "x", "x" * 30])
    expected = rf"2 of 4 train prompts .*length=10 tokens \(longest {30 + OVERHEAD}, first in row 1 of .*data.parquet\)"
    with pytest.raises(ConfigError, match=expected):
        RLHFDataset([path], tokenizer, DataConfig(max_prompt_length=10))


def test_overlong_prompts_are_dropped_and_counted_when_configured(write, tokenizer, caplog):
    config = DataConfig(max_prompt_length=10, filter_overlong_prompts=True)
    with caplog.at_level(logging.WARNING):
        dataset = RLHFDataset([write(["x" * 20, "yy", "x" * 30])], tokenizer, config)
    assert [item["raw_prompt"][0]["content"] for item in dataset] == ["yy"]
    assert "2 of 3 train prompts" in caplog.text


def test_a_data_set_that_is_left_empty_is_an_error(write, tokenizer):
    config = DataConfig(max_prompt_length=10, filter_overlong_prompts=True)
    with pytest.raises(ConfigError, match="no val samples are left of 1"):
        RLHFDataset([write(["x" * 20])], tokenizer, config, split="val")


@pytest.mark.parametrize(("side", "kept"), [("left", [5, 6, 7]), ("right", [0, 1, 2]), ("middle", [0, 6, 7])])
def test_truncation_removes_the_named_side(side, kept):
    assert truncate(list(range(8)), 3, side) == kept


def test_overlong_prompts_are_cut_when_configured(write, tokenizer):
    config = DataConfig(max_prompt_length=6, truncation="left")
    item = RLHFDataset([write(["abcdefgh"])], tokenizer, config)[0]
    assert tokenizer.decode(item["prompt_ids"]) == "efgh<|end|><|assistant|>"


def test_the_number_of_samples_is_limited_per_split(write, tokenizer):
    config = DataConfig(train_max_samples=2, val_max_samples=1)
    path = write(["a", "b", "c"])
    assert [len(RLHFDataset([path], tokenizer, config, split=split)) for split in ("train", "val")] == [2, 1]


def test_a_class_of_the_users_own_is_used_when_configured(write, tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.utils.dataset import RLHFDataset\n\nclass Mine(RLHFDataset):\n    pass\n\n"
        "class Other(list):\n    def __init__(self, *arguments, **keywords):\n        super().__init__()\n"
    )

    def build(name):
        config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name=name))
        return build_dataset([write(["a"])], tokenizer, config)

    assert type(build("Mine")).__name__ == "Mine"
    with pytest.raises(ConfigError, match="'Other' is no subclass of torch.utils.data.Dataset"):
        build("Other")
    with pytest.raises(ConfigError, match="set data.custom_cls.name"):
        build(None)
    with pytest.raises(ConfigError, match="custom_cls.name=Mine is set: set data.custom_cls.path"):
        build_dataset([write(["a"])], tokenizer, DataConfig(custom_cls=CustomClassConfig(name="Mine")))
