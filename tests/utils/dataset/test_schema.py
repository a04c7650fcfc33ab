"""What no sample can be is refused with file, row and key; what can be read as one is, from every kind of file."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.utils.config import ConfigError
from verl.utils.dataset import RLHFDataset, build_dataset
from verl.utils.dataset.schema import RowError, is_empty_truth, sample, without_nulls
from verl.workers.config import DataConfig
from verl.workers.config.data import CustomClassConfig

USER = {"role": "user", "content": "1+1="}


def row(**columns):
    return {"data_source": "test/source", "prompt": [USER], "reward_model": {"ground_truth": "2"}} | columns


BAD = [
    ({"prompt": [{"from": "human", "value": "1+1="}]}, r"prompt\[0\] has \['from', 'value'\]: ShareGPT"),
    ({"prompt": [{"content": "1+1="}]}, r"prompt\[0\].role is null"),
    ({"prompt": [{"role": "", "content": "1+1="}]}, r"prompt\[0\].role is ''"),
    ({"prompt": [{"role": 7, "content": "1+1="}]}, r"prompt\[0\].role is 7"),
    ({"prompt": [{"role": "user"}]}, r"prompt\[0\].content is null"),
    ({"prompt": [USER, {"role": "user", "content": None}]}, r"prompt\[1\].content is null"),
    ({"prompt": [{"role": "assistant", "content": None, "tool_calls": []}]}, r"prompt\[0\].content is null"),
    ({"prompt": [{"role": "user", "content": 7}]}, r"prompt\[0\].content is 7, neither text nor a list of parts"),
    ({"prompt": [{"role": "user", "content": []}]}, r"prompt\[0\].content is \[\]"),
    ({"prompt": [{"role": "user", "content": ["1+1="]}]}, r"prompt\[0\].content is \['1\+1='\]"),
    ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\].text is null"),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
        r"content\[0\] is of type 'image': the model reads text alone",
    ),
    ({"prompt": [{"role": "user", "content": [{"text": "1+1="}]}]}, r"content\[0\] is of type null"),
    ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "x.mp4"}]}]}, "of type 'video'"),
    ({"images": ["x.png"]}, "images is not empty: the model reads text alone"),
    ({"images": '["x.png"]'}, "images is not empty"),
    ({"videos": [{"video": "x.mp4"}]}, "videos is not empty"),
    ({"audios": "x.wav"}, "audios is not empty"),
    ({"prompt": [{"role": "user", "content": " \n"}]}, "prompt is blank"),
    ({"prompt": [{"role": "user", "content": "\ud800"}]}, r"prompt\[0\].content cannot be written as UTF-8"),
    ({"prompt": []}, "prompt is no list of chat messages"),
    ({"prompt": None}, "prompt is no list of chat messages .*null"),
    ({"prompt": "1+1="}, "prompt is no list of chat messages .*'1[+]1='"),
    ({"prompt": "[1+1="}, "prompt is no list of chat messages"),
    ({"prompt": USER}, "prompt is no list of chat messages"),
    ({"prompt": ["1+1="]}, r"prompt\[0\] is '1\+1=', no chat message"),
    ({"prompt": [None]}, r"prompt\[0\] is null, no chat message"),
    ({"reward_model": "2"}, "reward_model is '2', not {style, ground_truth}"),
    ({"reward_model": "{2"}, "reward_model is '{2'"),
    ({"reward_model": ["2"]}, r"reward_model is \['2'\]"),
    ({"reward_model": '["2"]'}, "reward_model is '"),
    ({"reward_model": 2}, "reward_model is 2"),
    ({"extra_info": "none"}, "extra_info is 'none', not a dict"),
    ({"extra_info": [1]}, r"extra_info is \[1\], not a dict"),
    ({"extra_info": True}, "extra_info is True"),
    ({"data_source": None}, "data_source is null, not a name"),
    ({"data_source": " "}, "data_source is ' '"),
    ({"data_source": 3}, "data_source is 3"),
    ({"agent_name": ["tool_agent"]}, "agent_name is"),
]


@pytest.mark.parametrize(("columns", "message"), BAD, ids=[str(columns)[:60] for columns, _ in BAD])
def test_what_is_no_sample_is_refused_with_its_key(columns, message):
    with pytest.raises(RowError, match=message):
        sample(row(**columns), DataConfig())


PARTS = [{"type": "text", "text": "1+1="}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
GOOD = [
    ({"prompt": json.dumps([USER])}, "prompt", [USER]),
    ({"prompt": [{**USER, "name": None}]}, "prompt", [USER]),
    ({"prompt": [{"role": "user", "content": PARTS}]}, "prompt", [{"role": "user", "content": PARTS}]),
    (
        {"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": CALL}]},
        "prompt",
        [USER, {"role": "assistant", "tool_calls": CALL}],
    ),
    ({"prompt": [{"role": "system", "content": ""}, USER]}, "prompt", [{"role": "system", "content": ""}, USER]),
    ({"reward_model": '{"ground_truth": "2"}'}, "reward_model", {"ground_truth": "2"}),
    ({"reward_model": None}, "reward_model", {}),
    ({"extra_info": ' {"index": 7, "level": null}'}, "extra_info", {"index": 7, "level": None}),
    ({"extra_info": None}, "extra_info", {}),
    ({}, "extra_info", {}),
    (
        {"extra_info": {"tools_kwargs": {"add": {"a": 1, "b": None}, "sub": None}}},
        "extra_info",
        {"tools_kwargs": {"add": {"a": 1}}},
    ),
    ({"extra_info": {"interaction_kwargs": {"a": 1, "b": None}}}, "extra_info", {"interaction_kwargs": {"a": 1}}),
    ({"agent_name": None}, "agent_name", None),
]


@pytest.mark.parametrize(("columns", "key", "value"), GOOD, ids=[str(columns)[:60] for columns, _, _ in GOOD])
def test_what_can_be_read_as_a_sample_is(columns, key, value):
    assert sample(row(**columns), DataConfig())[key] == value


def test_nulls_go_at_every_level_but_not_out_of_lists():
    value = {"a": None, "b": [{"c": None, "d": 0}, None, [None]], "e": {"f": {"g": None}}}
    assert without_nulls(value) == {"b": [{"d": 0}, None, [None]], "e": {"f": {}}}


@pytest.mark.parametrize(
    ("truth", "empty"), [(None, True), ("", True), (" ", True), ([], True), ({}, True), (0, False), (False, False)]
)
def test_nothing_is_no_ground_truth_and_zero_is_one(truth, empty):
    assert is_empty_truth(truth) is empty


@pytest.fixture(params=["parquet", "jsonl"])
def write_rows(request, tmp_path):
    def write(*rows):
        path = tmp_path / f"data.{request.param}"
        if request.param == "parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("\n".join(map(json.dumps, rows)) + "\n")
        return path

    return write


def test_the_first_bad_row_is_named_with_its_file_and_the_others_are_counted(write_rows, tokenizer):
    bad = row(prompt=[{"role": "user", "content": None}])
    path = write_rows(row(), row(), bad, bad)
    place = "row 2" if path.suffix == ".parquet" else "line 3"
    expected = rf"data.val_files: {place} of {path}: prompt\[0\].content is null.* \(2 of 4 rows are no samples\)"
    with pytest.raises(ConfigError, match=expected):
        RLHFDataset([path], tokenizer, DataConfig(), split="val")


def test_tool_arguments_have_only_the_fields_of_their_own_row_from_either_kind_of_file(write_rows, tokenizer):
    def calling(**arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]

    prompts = [calling(a=1, nested={"x": 1}), calling(b="2", nested={"y": 2})]
    dataset = RLHFDataset(
        [write_rows(*(row(prompt=prompt) for prompt in prompts))], tokenizer, DataConfig(max_prompt_length=200)
    )
    assert [item["raw_prompt"] for item in dataset] == prompts


def test_json_lines_are_read_like_parquet_also_beside_it(tmp_path, tokenizer):
    rows = [row(extra_info={"index": number}, ability=f"a{number}") for number in range(3)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(rows[0]) + "\n\n" + json.dumps(rows[1]), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    one = list(RLHFDataset([tmp_path / "a.jsonl"], tokenizer, DataConfig()))
    assert one == list(RLHFDataset([tmp_path / "b.parquet"], tokenizer, DataConfig(train_max_samples=2, shuffle=False)))
    both = RLHFDataset(
        [tmp_path / "a.jsonl", tmp_path / "b.parquet"], tokenizer, DataConfig(train_max_samples=4, shuffle=False)
    )
    assert [item["index"] for item in both] == [0, 1, 0, 1]


def test_an_index_that_is_null_is_the_row(write_rows, tokenizer):
    path = write_rows(row(extra_info={"index": None}), row(extra_info={"index": 70}))
    assert [item["index"] for item in RLHFDataset([path], tokenizer, DataConfig())] == [0, 70]


def test_sources_count_their_samples_and_those_without_a_ground_truth(write_rows, tokenizer):
    path = write_rows(row(), row(reward_model={"ground_truth": ""}), row(data_source="other"))
    sources = RLHFDataset([path], tokenizer, DataConfig()).sources
    assert {name: (each.count, each.without_truth) for name, each in sources.items()} == {
        "test/source": (2, 1),
        "other": (1, 0),
    }
    assert "1 of" in sources["test/source"].first or "line 2 of" in sources["test/source"].first


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}{% elif m.role == 'strict' %}"
    "{{ raise_exception('strict is not taken') }}{% elif m.role == 'tool' and loop.first %}"
    "{{ raise_exception('a tool speaks first') }}{% elif m.role == 'tool' %}T{{ m.content }}"
    "{% endif %}{% endfor %}A"
)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([USER, {"role": "human", "content": "2"}], "does not show messages of role 'human'"),
        ([USER, {"role": "strict", "content": "2"}], "cannot write this prompt: TemplateError: strict is not taken"),
        ([{"role": "tool", "content": "2"}], "cannot write this prompt: TemplateError: a tool speaks first"),
        ([USER, {"role": "tool", "content": "2"}], None),
    ],
)
def test_a_prompt_that_the_template_cannot_write_is_named(write_rows, tiny_model_dir, prompt, message):
    from verl.utils.model import load_tokenizer
    from verl.workers.config import HFModelConfig

    tokenizer = load_tokenizer(HFModelConfig(path=str(tiny_model_dir), custom_chat_template=TEMPLATE))
    path = write_rows(row(), row(prompt=prompt))
    if message is None:
        assert tokenizer.decode(RLHFDataset([path], tokenizer, DataConfig())[1]["prompt_ids"]) == "U1+1=T2A"
        return
    with pytest.raises(ConfigError, match=rf"(row 1|line 2) of {path}: .*{message}"):
        RLHFDataset([path], tokenizer, DataConfig())


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ("[]", "has no train samples"),
        ('[{"raw_prompt": [{"from": "human"}]}]', r"item 0 of train: prompt\[0\] has \['from'\]"),
        ('[{"raw_prompt": [{"role": "user", "content": "x"}], "data_source": "s"}]', None),
    ],
)
def test_the_first_item_of_a_users_own_class_is_checked(tmp_path, tokenizer, items, message):
    (tmp_path / "mine.py").write_text(
        "import torch\n\nclass Mine(torch.utils.data.Dataset):\n"
        "    def __init__(self, files, tokenizer, config, split): pass\n"
        f"    def __len__(self): return len({items})\n"
        f"    def __getitem__(self, index): return {items}[index]\n"
    )
    config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Mine"))
    if message is None:
        assert len(build_dataset([], tokenizer, config)) == 1
        return
    with pytest.raises(ConfigError, match=f"'Mine'.* {message}"):
        build_dataset([], tokenizer, config)


def test_pictures_are_looked_for_in_the_columns_that_the_user_names():
    config = DataConfig(image_key="photos", video_key="films", audio_key="sounds")
    for name in ("photos", "films", "sounds"):
        with pytest.raises(RowError, match=f"^{name} is not empty"):
            sample(row(**{name: [{"bytes": b"x"}]}), config)
    assert sample(row(photos=[], films=None, images=["x.png"]), config)["images"] == ["x.png"]


def test_pictures_are_refused_with_file_row_and_column(write_rows, tokenizer):
    path = write_rows(row(images=[]), row(images=["x.png"]))
    with pytest.raises(ConfigError, match=f"data.train_files: (row 1|line 2) of {path}: images is not empty"):
        RLHFDataset([path], tokenizer, DataConfig())


WRITING_PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("parts", "written"),
    [(WRITING_PARTS, True), ("{{ m.content[0].text }}", False), ("{{ m.content }}", False), ("", False)],
)
def test_texts_in_parts_are_read_if_the_template_writes_them_as_text(write_rows, tiny_model_dir, parts, written):
    from verl.utils.model import load_tokenizer
    from verl.workers.config import HFModelConfig

    content = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
    template = f"{{% for m in messages %}}{content}{{% endfor %}}A"
    tokenizer = load_tokenizer(HFModelConfig(path=str(tiny_model_dir), custom_chat_template=template))
    texts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    path = write_rows(row(prompt=[{"role": "user", "content": texts}]))
    if written:
        [item] = RLHFDataset([path], tokenizer, DataConfig())
        assert tokenizer.decode(item["prompt_ids"]) == "1+1=A"
        return
    with pytest.raises(ConfigError, match="content of role 'user' is a list of parts.*make it one text"):
        RLHFDataset([path], tokenizer, DataConfig())


def test_prompts_are_counted_with_the_tools_of_their_own_agent(write_rows, tiny_model_dir):
    from verl.utils.model import load_tokenizer
    from verl.workers.config import HFModelConfig

    template = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{{ messages[0].content }}{{ extra }}A"
    tokenizer = load_tokenizer(HFModelConfig(path=str(tiny_model_dir), custom_chat_template=template))
    asked = []

    def shown_tools(agent):
        asked.append(agent)
        return {"one": [{"name": "1234"}], "two": [{"name": "12345678"}], None: []}[agent]

    path = write_rows(*(row(agent_name=name) for name in ("two", "one", None, "", "two")))
    config = DataConfig(max_prompt_length=10, filter_overlong_prompts=True, apply_chat_template_kwargs={"extra": "x"})
    dataset = build_dataset([path], tokenizer, config, shown_tools=shown_tools)
    assert [tokenizer.decode(item["prompt_ids"]) for item in dataset] == ["12341+1=xA", "1+1=xA", "1+1=xA"]
    assert sorted(asked, key=str) == [None, "one", "two"]


def test_an_agent_that_nobody_knows_is_named_with_its_row(write_rows, tokenizer):
    def shown_tools(agent):
        if agent:
            raise ConfigError(f"unknown agent loop {agent!r}")
        return []

    path = write_rows(row(agent_name=None), row(agent_name="tool_agnt"))
    with pytest.raises(ConfigError, match=rf"(row 1|line 2) of {path}: unknown agent loop 'tool_agnt'"):
        RLHFDataset([path], tokenizer, DataConfig(), shown_tools=shown_tools)
