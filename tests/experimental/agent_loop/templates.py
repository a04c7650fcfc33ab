"""Chat templates that behave as those of well-known models do, each with a tokenizer that has its special tokens."""

from __future__ import annotations

from dataclasses import dataclass

from verl.utils.builtin.tokenizer import build_tokenizer

HEAD = "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"


@dataclass(frozen=True)
class Family:
    template: str
    special: tuple[str, ...]
    end: str
    """What ends a message."""
    answered: str
    """What is between two messages of the policy for the tool answers `42\\n` and `b`, without the end of the first."""
    alone: str
    """The same for the answer `42\\n` alone."""


LLAMA = Family(  # trims what people say, writes JSON of what tools say
    "{{ bos }}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}" + HEAD + "{% if m.role == 'tool' %}"
    "{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{% set role = 'assistant' %}" + HEAD + "{% endif %}",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "<|eot_id|>",
    '<|start_header_id|>ipython<|end_header_id|>\n\n"42\\n"<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"b"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    '<|start_header_id|>ipython<|end_header_id|>\n\n"42\\n"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
)
QWEN = Family(  # answers of tools are parts of one message of the user; thoughts of earlier messages are dropped
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "<|im_end|>",
    "\n<|im_start|>user\n<tool_response>\n42\n\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think>\n",
    "\n<|im_start|>user\n<tool_response>\n42\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
)
HERMES = Family(  # a role for tools, and white space is trimmed
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content | trim }}\n</tool_response>{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    "\n<|im_start|>tool\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    "<|im_start|>tool\n<tool_response>\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>tool\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
)
MISTRAL = Family(  # user and assistant alternate, calls have ids of nine characters, no prompt for the next message
    "{% set ns = namespace(turn=0) %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids of calls have 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}}[/TOOL_RESULTS]'
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}",
    ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    "</s>",
    '[TOOL_RESULTS] {"content": "42\\n"}[/TOOL_RESULTS][TOOL_RESULTS] {"content": "b"}[/TOOL_RESULTS]',
    '[TOOL_RESULTS] {"content": "42\\n"}[/TOOL_RESULTS]',
)
STRICT = Family(  # an answer belongs to a call of the message before it, whose text is then not shown
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% set calls = messages | selectattr('tool_calls', 'defined') | list %}"
    "{% if not calls %}{{ raise_exception('a tool answers without having been called') }}{% endif %}"
    "<|start|>tool:{{ m.name }}<|message|>{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}<|start|>assistant<|message|>{{ m.tool_calls | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}",
    ("<|start|>", "<|message|>"),
    "<|end|>",
    "<|start|>tool:add<|message|>42\n<|end|><|start|>tool:add<|message|>b<|end|><|start|>assistant<|message|>",
    "<|start|>tool:add<|message|>42\n<|end|><|start|>assistant<|message|>",
)
ALTERNATING = Family(  # no two messages of one role in a row, a space before the end
    "{% for m in messages %}{% if loop.index0 and messages[loop.index0 - 1].role == m.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }} <|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    (),
    "<|end|>",
    "\n<|tool|>42\n\nb <|end|>\n<|assistant|>",
    "\n<|tool|>42\n <|end|>\n<|assistant|>",
)
HARMONY = Family(  # gpt-oss: an answer belongs to a call; the last message of all ends otherwise than the others
    "{% set ns = namespace(called=none) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if ns.called is none %}{{ raise_exception('no call before the answer of a tool') }}{% endif %}"
    "<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}{% set ns.called = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ ns.called }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>", "<|end|>"),
    "<|call|>",
    '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42\\n"<|end|>'
    '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"b"<|end|><|start|>assistant',
    '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42\\n"<|end|><|start|>assistant',
)
FAMILIES = {
    "llama": LLAMA,
    "qwen": QWEN,
    "hermes": HERMES,
    "mistral": MISTRAL,
    "strict": STRICT,
    "alternating": ALTERNATING,
}


def tokenizer_of(family: Family, *, end: str | None = None):
    """A byte tokenizer with the family's template and special tokens. `end`: its `eos_token`, if another than the
    template's."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([*family.special, "<|endoftext|>"], special_tokens=True)
    tokenizer.eos_token = end or family.end
    tokenizer.chat_template = family.template
    return tokenizer
