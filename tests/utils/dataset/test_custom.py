"""Classes of the user's own, made for verl's constructor or for ours."""

import pytest

from verl.utils.config import ConfigError
from verl.utils.dataset import build_dataset
from verl.workers.config import DataConfig
from verl.workers.config.data import CustomClassConfig

SAMPLE = '{"raw_prompt": [{"role": "user", "content": "x"}], "data_source": "s", "reward_model": {}}'
HEAD = "import torch\nfrom verl.utils.dataset.rl_dataset import RLHFDataset\n"
OWN = HEAD + "class Mine(torch.utils.data.Dataset):\n    def __len__(self): return 3\n"
ITEM = f"    def __getitem__(self, index): return {SAMPLE}\n"


@pytest.fixture
def build(tmp_path, tokenizer, write):
    def built(code, split="train", questions=("a", "b", "c"), shown_tools=None, columns=None, **data):
        (tmp_path / "mine.py").write_text(code)
        config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Mine"), **data)
        return build_dataset(
            [write(list(questions), **columns or {})], tokenizer, config, split, shown_tools=shown_tools
        )

    return built


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        (
            "data_files, tokenizer, config, processor, max_samples=-1",
            ["config", "data_files", "max_samples", "processor"],
        ),
        ("data_files, tokenizer, config, processor=None", ["config", "data_files", "processor"]),
        ("data_files, tokenizer, config, is_train=None", ["config", "data_files", "is_train"]),
        ("files, tokenizer, config, split", ["config", "files", "split"]),
        ("files, tokenizer, config, split, shown_tools", ["config", "files", "shown_tools", "split"]),
        ("**keywords", ["config", "data_files", "max_samples", "processor"]),
    ],
)
def test_a_class_of_the_users_own_is_given_the_arguments_that_it_has_names_for(build, parameters, given):
    body = f"    def __init__(self, {parameters}):\n        self.given = dict(locals())\n" + ITEM
    dataset = build(OWN + body, "val")
    found = dataset.given.get("keywords", dataset.given)
    assert sorted(set(found) - {"self", "tokenizer", "keywords"}) == given
    assert found["tokenizer"] is not None
    if "data_files" in found:
        assert [type(path) for path in found["data_files"]] == [str]
    assert found.get("split", "val") == "val"
    assert not found.get("is_train")


def test_a_constructor_that_wants_more_is_an_error_that_names_it(build):
    with pytest.raises(ConfigError, match="'Mine': its constructor requires colour, which it is not given. Known: d"):
        build(OWN + "    def __init__(self, data_files, colour): pass\n" + ITEM)


def test_a_subclass_with_verls_constructor_knows_its_split_its_limit_and_the_tools(build, tokenizer):
    code = HEAD + (
        "class Mine(RLHFDataset):\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):\n"
        "        super().__init__(data_files=data_files, tokenizer=tokenizer, config=config, processor=processor,"
        " max_samples=max_samples)\n"
    )
    dataset = build(code, "val", val_max_samples=2, max_prompt_length=9999, shown_tools=lambda agent: [{"name": "add"}])
    assert len(dataset) == 2
    assert '{"name": "add"}' in tokenizer.decode(dataset[0]["prompt_ids"])
    with pytest.raises(ConfigError, match=r"data.val_files: row 0 of .*: data_source is ' '"):
        build(code, "val", columns={"data_source": [" "] * 3})


def test_a_subclass_reads_files_and_builds_messages_as_with_verl(build, tokenizer):
    code = HEAD + (
        "import datasets\n"
        "class Mine(RLHFDataset):\n"
        "    def _read_files_and_tokenize(self):\n"
        "        parts = [datasets.Dataset.from_parquet(path) for path in self.data_files]\n"
        "        whole = datasets.concatenate_datasets(parts)\n"
        "        self.dataframe = self.maybe_filter_out_long_prompts(whole)\n"
        "    def _build_messages(self, example, key):\n"
        "        return [{'role': 'system', 'content': 's'}, *example.pop(key)]\n"
        "    def __getitem__(self, index):\n"
        "        return {'own': self.dataframe[index]['prompt'][0]['content'], **super().__getitem__(index)}\n"
    )
    dataset = build(code, questions=("a", "x" * 90, "c"), filter_overlong_prompts=True)
    assert [item["own"] for item in map(dataset.__getitem__, range(len(dataset)))] == ["a", "c"]
    assert tokenizer.decode(dataset[1]["prompt_ids"]) == "<|system|>s<|end|><|user|>c<|end|><|assistant|>"
    assert dataset[1]["raw_prompt"][0] == {"role": "system", "content": "s"}


@pytest.mark.parametrize("method", ["on_batch_end", "process_vision_info", "_download"])
def test_a_method_that_verl_calls_and_nobody_calls_here_is_refused_by_name(build, method):
    with pytest.raises(ConfigError, match=f"'Mine' has a method {method}, which is not called here"):
        build(HEAD + f"class Mine(RLHFDataset):\n    def {method}(self, *_, **__): pass\n")


def test_rows_that_are_no_data_set_are_refused(build):
    read = "    def _read_files_and_tokenize(self): self.dataframe = [1]\n"
    with pytest.raises(ConfigError, match=r"Mine._read_files_and_tokenize sets dataframe to a builtins.list"):
        build(HEAD + "class Mine(RLHFDataset):\n" + read)


def test_a_limit_that_a_class_of_the_users_own_ignores_is_an_error(build):
    with pytest.raises(ConfigError, match=r"'Mine' has 3 samples of train, data.train_max_samples is 2"):
        build(
            OWN + "    def __init__(self, data_files, tokenizer, config, processor): pass\n" + ITEM, train_max_samples=2
        )


def test_a_class_may_be_in_an_installed_module(tokenizer, write):
    place = CustomClassConfig(path="pkg://verl.utils.dataset.rl_dataset", name="RLHFDataset")
    assert len(build_dataset([write(["a"])], tokenizer, DataConfig(custom_cls=place))) == 1
    nowhere = CustomClassConfig(path="pkg://no.such.module", name="Mine")
    with pytest.raises(ConfigError, match=r"custom_cls.path='pkg://no.such.module' cannot be imported"):
        build_dataset([write(["a"])], tokenizer, DataConfig(custom_cls=nowhere))
