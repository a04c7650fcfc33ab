"""The tokenizer of the built-in and test models: one token per byte, with a chat template.

It encodes and decodes every text without loss, so tests and users may write any prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, END, *(f"<|{role}|>" for role in ROLES))
# Ordinary tokens, not special ones: decoding without special tokens must keep them for the tool parser.
TOOL_CALL_TOKENS = ("<tool_call>", "</tool_call>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS) + len(TOOL_CALL_TOKENS)

# A message is `<|role|>content<|end|>`. The offered tools are a system message of their own, in Hermes' words.
CHAT_TEMPLATE = (
    "{%- if tools %}<|system|>You may call functions: <tools>"
    "{%- for tool in tools %}{{ tool | tojson }}{% if not loop.last %}\n{% endif %}{% endfor %}</tools>"
    ' Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>{% endif %}'
    "{%- for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{%- if message['content'] %}{{ message['content'] }}{% endif %}"
    "{%- for call in message['tool_calls'] or [] %}<tool_call>{{ (call['function'] or call) | tojson }}</tool_call>"
    "{%- endfor %}{{ '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(model_max_length: int = 512) -> PreTrainedTokenizerFast:
    """A byte tokenizer with `VOCAB_SIZE` tokens: 256 bytes, then the special tokens, then the tool-call marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(token, normalized=False) for token in TOOL_CALL_TOKENS])
    fast: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = fast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,  # bytes are never unknown, but Qwen2's tokenizer class would add a token of its own
        padding_side="left",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    return tokenizer
