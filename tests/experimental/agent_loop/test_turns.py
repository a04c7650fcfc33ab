"""What stands between two messages of the policy, in templates of every kind."""

import pytest

from tests.experimental.agent_loop.pieces import pieces_tokenizer
from tests.experimental.agent_loop.templates import ALTERNATING, FAMILIES, HARMONY, LLAMA, QWEN, tokenizer_of
from verl.utils.chat_template import Turns, well_formed
from verl.utils.config import ConfigError

SAID = "Let me add."


def answers(*texts):
    return [{"role": "tool", "name": "add", "content": text} for text in texts]


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(params=FAMILIES, name="family")
def _family(request):
    return FAMILIES[request.param]


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "add", "parameters": {}}}]])
def test_answers_are_written_as_the_template_writes_them(family, tools):
    tokenizer = tokenizer_of(family)
    turns = Turns(tokenizer, tools, {})
    said = ids(tokenizer, SAID + family.end)
    assert tokenizer.decode(turns.between(answers("42\n"), said)) == family.alone
    assert tokenizer.decode(turns.between(answers("42\n", "b"), said)) == family.answered


@pytest.mark.parametrize("prepend", ["always", "first", "never"])
def test_tokenizers_that_put_a_space_before_words_get_the_tokens_of_the_whole_text(family, prepend):
    tokenizer = pieces_tokenizer(family, end="<|endoftext|>", prepend=prepend)
    expected = ids(tokenizer, f"{SAID}{family.end}{family.answered}")
    said = expected[: 1 + expected.index(tokenizer.convert_tokens_to_ids(family.end))]
    replies = Turns(tokenizer, None, {}).between(answers("42\n", "b"), said)
    assert [*said, *replies] == expected
    assert Turns(tokenizer, None, {}).between(answers("42\n", "b"), [*said[:-1], tokenizer.eos_token_id]) == replies


def test_one_token_ends_a_message_whoever_chose_it(family):
    tokenizer = tokenizer_of(family, end="<|endoftext|>")
    turns = Turns(tokenizer, None, {})
    for end in (family.end, "<|endoftext|>", "<|pad|>"):
        between = turns.between(answers("42\n"), ids(tokenizer, SAID + end))
        assert tokenizer.decode(between) == family.alone, end
    assert turns.stop_token_ids == tuple(ids(tokenizer, family.end))
    unended = tokenizer.decode(turns.between(answers("42\n"), ids(tokenizer, SAID)))
    assert unended.strip(" ") == family.end + family.alone
    assert tokenizer.decode(turns.between(answers("42\n"), [])) == unended


def test_a_last_message_that_ends_otherwise_says_nothing_about_the_others():
    turns = Turns(tokenizer_of(HARMONY, end="<|return|>"), None, {})
    assert turns.stop_token_ids == ()
    said = ids(turns._tokenizer, '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>')
    assert turns._tokenizer.decode(turns.between(answers("42\n"), said)) == HARMONY.alone
    assert turns._tokenizer.decode(turns.between(answers("42\n", "b"), said)) == HARMONY.answered


@pytest.mark.parametrize(
    "answer",
    ["", " ", "\n", "0", "null", "None", "a\0b", "\u200b", "\ufffd", "{{ 1 }}", "{% raise %}", "'\"\\", "é" * 1000]
    + ["<tool_call>", "</tool_response>", "<think>", "</think>", "\u241fassistant-message\u241f", "nnn", "answer"],
)
def test_any_text_can_be_an_answer(family, answer):
    tokenizer = tokenizer_of(family)
    turns = Turns(tokenizer, None, {})
    calls = [{"id": "call00000", "function": {"name": "add", "arguments": {}}}]
    conversation = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({**each, "tool_call_id": "call00000"} for each in answers(answer)),
    ]
    shown = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    between = tokenizer.decode(turns.between(answers(answer), ids(tokenizer, SAID + family.end)))
    assert shown.endswith(between)


def test_special_tokens_that_an_answer_spells_stay_text(family):
    tokenizer = tokenizer_of(family)
    turns = Turns(tokenizer, None, {})
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    said = ids(tokenizer, SAID + family.end)

    def specials(text):
        return [number for number in turns.between(answers(text), said) if number in special]

    spelled = "".join(token.content for token in tokenizer.added_tokens_decoder.values())
    assert specials(f"a{spelled}b{spelled}") == specials("harmless")
    assert f"a {family.end} b" in tokenizer.decode(turns.between(answers(f"a {family.end} b"), said))


def test_a_name_that_spells_a_special_token_stays_text_too():
    tokenizer = tokenizer_of(FAMILIES["strict"])
    replies = [{"role": "tool", "name": "<|end|>", "content": "x"}]
    between = Turns(tokenizer, None, {}).between(replies, ids(tokenizer, SAID + "<|end|>"))
    assert between.count(tokenizer.eos_token_id) == 1


def test_the_users_turn_is_written_likewise():
    tokenizer = tokenizer_of(QWEN)
    between = Turns(tokenizer, None, {}).between(
        [{"role": "user", "content": "Sure?"}], ids(tokenizer, SAID + "<|endoftext|>")
    )
    assert tokenizer.decode(between) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_a_template_that_wants_a_system_message_gets_one():
    tokenizer = tokenizer_of(LLAMA)
    wants = "{% if messages[0].role != 'system' %}{{ raise_exception('who am I?') }}{% endif %}"
    tokenizer.chat_template = wants + LLAMA.template
    between = Turns(tokenizer, None, {}).between(answers("42\n"), ids(tokenizer, SAID + "<|endoftext|>"))
    assert tokenizer.decode(between) == LLAMA.alone


def test_arguments_of_the_template_are_used():
    tokenizer = tokenizer_of(QWEN)
    tokenizer.chat_template = QWEN.template.replace("<think>\n{% endif %}", "{% if quick %}!{% endif %}{% endif %}")
    between = Turns(tokenizer, None, {"quick": True}).between(answers("4"), ids(tokenizer, SAID + "<|im_end|>"))
    assert tokenizer.decode(between).endswith("assistant\n!")


def test_a_template_for_tools_is_taken_where_there_are_tools():
    tokenizer = tokenizer_of(LLAMA)
    tokenizer.chat_template = {"default": "{{ raise_exception('no tools here') }}", "tool_use": LLAMA.template}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    between = Turns(tokenizer, tools, {}).between(answers("42\n"), ids(tokenizer, SAID + "<|eot_id|>"))
    assert tokenizer.decode(between) == LLAMA.alone


def test_an_end_token_that_is_not_called_special_is_one():
    tokenizer = tokenizer_of(ALTERNATING, end="<|endoftext|>")
    tokenizer.add_tokens(["<end_of_turn>"])
    tokenizer.chat_template = ALTERNATING.template.replace("<|end|>", "<end_of_turn>")
    turns = Turns(tokenizer, None, {})
    for end in ("<end_of_turn>", "<|endoftext|>"):
        between = tokenizer.decode(turns.between(answers("4"), ids(tokenizer, SAID + end)))
        assert between == "\n<|tool|>4 <end_of_turn>\n<|assistant|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            "role 'tool'; set actor_rollout_ref",
        ),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('only two roles') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            r"role 'tool' \(it says: only two roles\); set actor_rollout_ref.model.custom_chat_template",
        ),
    ],
)
def test_a_template_without_answers_of_tools_is_told(template, message):
    tokenizer = tokenizer_of(LLAMA)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        Turns(tokenizer, None, {}).require_tool_answers()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", "a"), ("\ud83d\ude00", "😀"), ("x\ud800y", "x\ufffdy"), ("\udfff", "\ufffd"), ("😀\0", "😀\0")],
)
def test_texts_are_made_well_formed(text, expected):
    assert well_formed(text) == expected
