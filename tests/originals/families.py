"""Chat templates with the manners of model families, in a few lines each, and what their policies say.

Those that `tests/experimental/agent_loop/templates.py` has are about single rules; these write a whole conversation:
tools that are shown, a prompt of the system that nobody gave, a token at the beginning, thoughts that are dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import processors

from verl.utils.builtin.tokenizer import build_tokenizer

HERMES = '<tool_call>\n{{"name": "echo", "arguments": {{"text": {}}}}}\n</tool_call>'
TOOLS = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}"


def quoted(text: str) -> str:
    """As JSON in which nothing reads like a special token."""
    return json.dumps(text, ensure_ascii=False).replace("<", "\\u003c").replace("[", "\\u005b")


@dataclass(frozen=True)
class Family:
    model_type: str
    """What verl chooses its rules by."""
    template: str
    special: tuple[str, ...]
    end: str
    """How a last message ends."""
    called: str = ""
    """How a message with calls ends, if otherwise."""
    begin: str = ""
    """What the tokenizer puts before every text that it is not told to leave as it is."""
    format: str = "hermes"
    call: str = HERMES
    thought: str = ""
    """What messages begin with, where the template has opened the thoughts."""
    ordinary: tuple[str, ...] = ()
    """Tokens that are kept where special ones are dropped."""

    def says(self, text: str, *echoed: str) -> str:
        """A message with a call for each text that is to be echoed."""
        calls = "".join(self.call.format(quoted(each)) for each in echoed)
        return self.thought + text + calls + (self.called if echoed and self.called else self.end)

    def save(self, folder: Path) -> Any:
        """The tokenizer, which is in `folder` then."""
        tokenizer = build_tokenizer(4096)
        tokenizer.add_tokens([*self.special, self.end], special_tokens=True)
        tokenizer.add_tokens([*self.ordinary])
        tokenizer.eos_token = self.end
        if self.begin:
            tokenizer.bos_token = self.begin
            number = tokenizer.convert_tokens_to_ids(self.begin)
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{self.begin} $A", special_tokens=[(self.begin, number)]
            )
        tokenizer.chat_template = self.template.replace("%}\n", "%}{{ '\\n' }}")  # which Jinja would drop
        tokenizer.save_pretrained(folder)
        return tokenizer


class Harmony(Family):
    """Thoughts, calls and answers are messages of their own."""

    def says(self, text: str, *echoed: str) -> str:
        if not echoed:
            return f"<|channel|>final<|message|>{text}{self.end}"
        thought = [f"<|channel|>analysis<|message|>{text or 'Hm.'}<|end|>"]
        return "<|start|>assistant".join([*thought, *(self.call.format(quoted(each)) for each in echoed)])


SAID = (  # `thought`, and `said` without it
    "{% set said = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
ANSWERS = (  # all of a kind in one message of the user
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
SYSTEM = "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"

QWEN25 = Family(  # says who it is, if nobody else does
    "qwen2",
    SYSTEM + "<|im_start|>system\n{{ first or 'You are Q.' }}"
    "{% if tools %}\n\n<tools>\n" + TOOLS + "</tools>{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'tool' %}" + ANSWERS + "{% elif not (loop.first and m.role == 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|endoftext|>"),
    "<|im_end|>",
)
QWEN3 = Family(  # thoughts before the last question are dropped; nobody has to think
    "qwen3",
    SYSTEM + "{% if tools or first %}<|im_start|>system\n{{ first }}{% if tools %}\n<tools>\n" + TOOLS + "</tools>"
    "{% endif %}<|im_end|>\n{% endif %}{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    + ANSWERS
    + "{% elif m.role == 'assistant' %}"
    + SAID
    + "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}" + CALLS + "<|im_end|>\n"
    "{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    ("<|im_start|>", "<|endoftext|>"),
    "<|im_end|>",
    ordinary=("<think>", "</think>", "<tool_response>", "</tool_response>"),
)
HEAD = "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
LLAMA3 = Family(  # begins with a token and a date; tools are shown in the first question, answers as JSON
    "llama",
    "<|begin_of_text|>" + SYSTEM + "{% set role = 'system' %}" + HEAD + "Today: {{ date_string or '26 Jul 2024' }}\n\n"
    "{{ first | trim }}<|eot_id|>{% set ns = namespace(shown=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% set role = 'ipython' %}" + HEAD + "{{ m.content | tojson }}<|eot_id|>"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call a message') }}{% endif %}"
    "{% set role = 'assistant' %}" + HEAD + '{"name": "{{ m.tool_calls[0].function.name }}"}<|eot_id|>'
    "{% elif not (loop.first and m.role == 'system') %}{% set role = m.role %}" + HEAD + ""
    "{% if m.role == 'user' and tools and not ns.shown %}{% set ns.shown = true %}Tools:\n" + TOOLS + "{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% set role = 'assistant' %}" + HEAD + "{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    "<|eot_id|>",
    begin="<|begin_of_text|>",
)
GEMMA3 = Family(  # the system's words are the user's; two roles that take turns
    "gemma3_text",
    "<bos>" + SYSTEM + "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles take turns') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if loop.first and first %}{{ first }}\n\n{% endif %}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ("<bos>", "<start_of_turn>", "<eos>"),
    "<end_of_turn>",
    begin="<bos>",
)
DEEPSEEK = Family(  # nothing between messages; no mark of the assistant after answers of tools
    "deepseek_v3",
    "<｜begin▁of▁sentence｜>" + SYSTEM + "{{ first }}{% if tools %}\n" + TOOLS + "{% endif %}"
    "{% set ns = namespace(answers=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if not ns.answers %}<｜tool▁outputs▁begin｜>{% endif %}{% set ns.answers = true %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% else %}"
    "{% if ns.answers %}<｜tool▁outputs▁end｜>{% endif %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}{% if not ns.answers %}<｜Assistant｜>{% endif %}"
    "{{ (m.content or '').split('</think>')[-1] }}{% for c in m.tool_calls or [] %}<｜tool▁call▁begin｜>"
    "{{ c.function.name }}<｜tool▁call▁end｜>{% endfor %}<｜end▁of▁sentence｜>{% endif %}"
    "{% set ns.answers = false %}{% endif %}{% endfor %}{% if ns.answers %}<｜tool▁outputs▁end｜>"
    "{% elif add_generation_prompt %}<｜Assistant｜>{% endif %}",
    (
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        *(f"<｜tool▁{name}｜>" for name in ("call▁begin", "call▁end", "outputs▁begin", "outputs▁end")),
        *(f"<｜tool▁{name}｜>" for name in ("output▁begin", "output▁end")),
    ),
    "<｜end▁of▁sentence｜>",
    begin="<｜begin▁of▁sentence｜>",
    ordinary=("<think>", "</think>"),
)
MISTRAL = Family(  # no prompt for the next message, calls have ids of nine characters
    "mistral",
    "<s>" + SYSTEM + "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
    "{% if m.role == 'user' %}{% if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {% if loop.last and first %}{{ first }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if (m.tool_call_id or '') | length != 9 %}"
    "{{ raise_exception('ids of calls have 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | tojson }}</s>"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}",
    ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
    + ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "</s>",
    begin="<s>",
)
GLM4 = Family(  # a message ends where the next one begins
    "glm4_moe",
    "[gMASK]<sop>" + SYSTEM + "{% if tools %}<|system|>\n# Tools\n" + TOOLS + "{% endif %}"
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'assistant' %}<|assistant|>" + SAID + "\n<think>"
    "{% if loop.index0 > ns.asked %}{{ thought | trim }}{% endif %}</think>{% if said | trim %}\n{{ said | trim }}"
    "{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'user' and enable_thinking is defined and not enable_thinking %}/nothink{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{% endif %}",
    ("[gMASK]", "<sop>", "<|endoftext|>", "<|observation|>"),
    "<|user|>",
    called="<|observation|>",
    ordinary=("<think>", "</think>", "<tool_response>", "</tool_response>"),
)
GPT_OSS = Harmony(  # an answer belongs to a call, and the last message ends otherwise than others
    "gpt_oss",
    "<|start|>system<|message|>You are G.{% if tools %}\nCalls go to the commentary channel.{% endif %}<|end|>"
    + SYSTEM
    + "{% if tools or first %}<|start|>developer<|message|>{{ first }}{% if tools %}\n# Tools\n"
    + TOOLS
    + "{% endif %}"
    "<|end|>{% endif %}{% set ns = namespace(called=none) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if ns.called is none %}{{ raise_exception('no call before the answer of a tool') }}{% endif %}"
    "<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}{% set ns.called = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ ns.called }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% set ns.called = none %}"
    "{% elif not (loop.first and m.role == 'system') %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    "<|return|>",
    format="gpt-oss",
    call='<|channel|>commentary to=functions.echo <|constrain|>json<|message|>{{"text": {}}}<|call|>',
)
MINIMAX = Family(  # opens the thoughts itself
    "minimax_m2",
    "]~!b[" + SYSTEM + "]~b]system\n{{ first or 'You are M.' }}{% if tools %}\n" + TOOLS + "{% endif %}[e~[\n"
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif %}"
    "\n<response>{{ m.content }}</response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[\n{% endif %}"
    "{% elif m.role == 'assistant' %}" + SAID + "]~b]ai\n"
    "{% if loop.index0 > ns.asked and thought %}<think>\n{{ thought | trim }}\n</think>\n\n{% endif %}"
    "{{ said }}" + CALLS + "[e~[\n"
    "{% elif not (loop.first and m.role == 'system') %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}",
    ("]~!b[", "]~b]"),
    "[e~[",
    thought="1, 2\n</think>\n\n",
    ordinary=("<think>", "</think>"),
)
KIMI = Family(  # answers are the system's
    "kimi_k2",
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    + SYSTEM
    + "{% if not first %}<|im_system|>system<|im_middle|>You are K.<|im_end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_system|>{{ m.name or 'tool' }}<|im_middle|>## Return\n{{ m.content }}<|im_end|>"
    "{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content or '' }}{% if m.tool_calls %}"
    "<|tool_calls_section_begin|>{{ m.tool_calls | length }}<|tool_calls_section_end|>{% endif %}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
    ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>")
    + ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "[BOS]", "[EOS]"),
    "<|im_end|>",
)
FAMILIES = {
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "gemma3": GEMMA3,
    "deepseek": DEEPSEEK,
    "mistral": MISTRAL,
    "glm4": GLM4,
    "gpt-oss": GPT_OSS,
    "minimax": MINIMAX,
    "kimi": KIMI,
}
