"""Pictures that tools answer with, beside transformers' processor of the whole conversation."""

import asyncio
import functools

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.experimental.agent_loop.scripted_manager import ScriptedManager
from tests.experimental.agent_loop.seeing_tools import CALL, SCHEMA, SHOWN, part_of, tool_file
from tests.pictures import noise
from tests.seeing import make_seeing
from tests.seeing import processor_of as read_processor
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopError, AgentLoopOutput, ToolAgentLoop, register
from verl.experimental.agent_loop.base import DictConfigWrap, pictures_of
from verl.experimental.agent_loop.registry import known_loops
from verl.experimental.agent_loop.worker import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.utils.builtin.seeing import PICTURE
from verl.utils.pictures import keep
from verl.workers.rollout.records import SamplingOptions

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
GIVEN = noise(1)
processor_of = functools.cache(read_processor)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_seeing(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def run(tmp_path, directory, *texts, shows="pictures", template=None, reads_text=False, budget=400):
    path = tool_file(tmp_path, shows)
    config = load_config(
        ["data.max_prompt_length=400", f"{MULTI_TURN}.enable=true", f"{MULTI_TURN}.tool_config_path={path}"]
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = template or tokenizer.chat_template
    manager = ScriptedManager(tokenizer, *texts)
    loop = ToolAgentLoop(trainer_config=DictConfigWrap(config), server_manager=manager, tokenizer=tokenizer)
    sample = {"raw_prompt": [{"role": "user", "content": "what?"}]}
    if not reads_text:
        loop.pictures, picture = processor_of(directory), keep(GIVEN)
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}]
        sample = {"raw_prompt": [{"role": "user", "content": parts}], "multi_modal_data": {"images": [picture]}}
    return asyncio.run(loop.run(SamplingOptions(max_tokens=budget).as_dict(), **sample)), manager


def text_of(tokenizer, output):
    pairs = zip(output.response_ids, output.response_mask, strict=True)
    return tokenizer.decode([token for token, mask in pairs if not mask])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "llava_next"])
def test_ids_and_patches_are_those_of_transformers_for_the_whole_conversation(tmp_path, family):
    directory = make_seeing(tmp_path / "model", family)
    output, manager = run(tmp_path, directory, f"Hm. {CALL}", CALL, "5")
    whole = processor_of(directory).of_transformers
    answers = [GIVEN, *(each for last in (GIVEN, SHOWN) for each in (part_of(last), SHOWN))]
    shown = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "closer"}]
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
        *({"role": "assistant", "content": f"Hm. {CALL}"}, {"role": "tool", "content": shown, "name": "look"}),
        *({"role": "assistant", "content": CALL}, {"role": "tool", "content": shown, "name": "look"}),
    ]
    text = whole.tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
    expected = whole(images=answers, text=[text], return_tensors="pt")
    plain = "closer <|image_pad|>"
    found = manager.prompts[-1]
    ordinary = whole.tokenizer.encode(plain, add_special_tokens=False, split_special_tokens=True)
    short = whole.tokenizer.encode("closer", add_special_tokens=False)
    assert replaced(found, ordinary, short) == expected["input_ids"][0].tolist()
    assert output.prompt_ids + output.response_ids[: len(found) - len(output.prompt_ids)] == found
    assert [len(pictures) for pictures in manager.pictures] == [1, 3, 5]
    assert output.multi_modal_data == {"images": manager.pictures[-1]}
    patches = processor_of(directory).inputs(manager.pictures[-1])
    for name, values in patches.items():
        assert torch.equal(values, expected[name]), name
    assert output.extra_fields["tool_rewards"] == [0.5, 0.5]
    assert (output.num_turns, output.stop_reason) == (6, "completed")


def replaced(ids, old, new):
    """`ids` with `new` in the place of each `old`: a template writes special tokens of an answer as they are."""
    found, at = [], 0
    while at < len(ids):
        is_old = ids[at : at + len(old)] == old
        found += new if is_old else [ids[at]]
        at += len(old) if is_old else 1
    return found


def test_a_model_that_reads_text_ends_the_run_with_the_tools_name(tmp_path, model):
    with pytest.raises(AgentLoopError, match="tool 'look' answers with a picture, and the model reads text alone"):
        run(tmp_path, model, CALL, "5", shows="one", reads_text=True)


def test_a_video_ends_the_run(tmp_path, model):
    with pytest.raises(AgentLoopError, match="tool 'look' answers with a video"):
        run(tmp_path, model, CALL, "5", shows="a video")


@pytest.mark.parametrize(
    ("shows", "said"),
    [
        ("a damaged one", "error: a picture of look is damaged, or none of"),
        (
            "one of another machine",
            "error: a picture of look is at 'https://example.org/x.png', and nothing is",
        ),
    ],
)
def test_a_picture_that_cannot_be_used_is_an_answer_that_says_so(tmp_path, model, shows, said):
    output, manager = run(tmp_path, model, CALL, "5", shows=shows)
    assert said in text_of(manager.tokenizer, output)
    assert len(manager.pictures[-1]) == 1


def test_a_picture_behind_a_token_for_pictures_that_the_policy_wrote_ends_the_response(tmp_path, model):
    output, manager = run(tmp_path, model, f"{PICTURE}{CALL}", "5", shows="one")
    assert (output.stop_reason, len(manager.prompts), len(output.multi_modal_data["images"])) == ("length", 1, 1)
    assert all(output.response_mask)


def test_a_picture_that_leaves_no_room_for_an_answer_ends_the_response(tmp_path, model):
    budget = len(AutoTokenizer.from_pretrained(model).encode(CALL)) + 10
    output, manager = run(tmp_path, model, CALL, "5", shows="one", budget=budget)
    assert (output.stop_reason, len(manager.prompts), len(output.multi_modal_data["images"])) == ("length", 1, 1)


@pytest.mark.parametrize(
    ("of_tools", "shows", "said"),
    [
        ("{{ message['content'] }}", "one", "writes 0 tokens for pictures where there are 1: set actor"),
        (PICTURE + PICTURE, "pictures", "does not show the text beside a picture in messages of role 'tool'"),
    ],
)
def test_a_template_that_loses_a_picture_or_its_text_ends_the_run(tmp_path, model, of_tools, shows, said):
    template = AutoTokenizer.from_pretrained(model).chat_template
    begin = template.index("{%- if message['content'] is string %}")
    other = f"{{% if message['role'] == 'tool' and message['content'] is not string %}}{of_tools}{{% else %}}"
    end = template.index("{% endif %}", template.rindex("{%- endfor %}{% endif %}")) + len("{% endif %}")
    changed = f"{template[:begin]}{other}{template[begin:end]}{{% endif %}}{template[end:]}"
    with pytest.raises(AgentLoopError, match=said):
        run(tmp_path, model, CALL, "5", shows=shows, template=changed)


class TextsAlone(AgentLoopBase):
    """Says what its class says, in the middle of a conversation with a picture."""

    sees = True
    said: tuple[int, ...] = ()

    async def run(self, sampling_params, **kwargs):
        (picture,) = pictures_of(kwargs["raw_prompt"])
        found = await self.process_vision_info(kwargs["raw_prompt"])
        ids = await self.apply_chat_template(kwargs["raw_prompt"], images=found["images"])
        assert found == {"images": [picture]}
        later = [*self.said, *[self.pictures.token_id] * 2]
        mask = [1] * len(self.said) + [0, 0]
        return AgentLoopOutput(prompt_ids=ids, response_ids=later, response_mask=mask, multi_modal_data=found)


@pytest.mark.parametrize(("said", "is_wrong"), [((5, 6), False), ((5, None), True)])
async def test_a_loop_whose_policy_wrote_a_token_for_pictures_before_one_is_refused(model, said, is_wrong):
    """Trainers would take that token for the picture."""
    processor = processor_of(model)
    TextsAlone.said = tuple(processor.token_id if token is None else token for token in said)
    register("texts_alone")(TextsAlone)
    config = load_config(
        ["data.max_prompt_length=400", "actor_rollout_ref.rollout.agent.default_agent_loop=texts_alone"]
    )
    worker = AgentLoopWorker(
        config=config,
        servers=[object()],
        tokenizer_path=str(model),
        loops=known_loops(),
        rank=0,
        pictures=processor,
    )
    parts = [{"type": "image", "image": keep(GIVEN)}, {"type": "text", "text": "what?"}]
    column = np.empty(1, dtype=object)
    column[0] = [{"role": "user", "content": parts}]
    samples = DataProto(None, {"raw_prompt": column}, {"validate": False})
    if is_wrong:
        with pytest.raises(AgentLoopError, match="a picture follows a token for pictures that the policy has written"):
            await worker.generate_sequences(samples, 0)
        return
    batch = await worker.generate_sequences(samples, 0)
    whole = processor.of_transformers
    text = whole.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, parts[1]]}], tokenize=False, add_generation_prompt=True
    )
    expected = whole(images=[GIVEN], text=[text])["input_ids"][0]
    assert batch.batch["prompts"][0, -len(expected) :].tolist() == list(expected)
    assert batch.non_tensor_batch["multi_modal_data"][0] == {"images": [keep(GIVEN)]}


def test_pictures_of_another_form_than_ours_are_refused():
    with pytest.raises(ValueError, match="multi_modal_data with images of Image; it is"):
        AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[], multi_modal_data={"images": [GIVEN]})
