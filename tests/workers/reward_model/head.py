"""A tiny reward model with a head: it gives every conversation a score."""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from verl.utils.builtin.tokenizer import VOCAB_SIZE, build_tokenizer


def make(directory: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = build_tokenizer(512)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@torch.no_grad()
def score(directory: Path, messages: list[dict[str, str]]) -> float:
    """By transformers alone."""
    text = AutoTokenizer.from_pretrained(directory).apply_chat_template(messages, tokenize=False)
    tokens = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt", add_special_tokens=False)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    return float(model(**tokens).logits[0, -1])
