"""Tokenizers by path alone, under the names that scripts for verl use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.utils.config import ConfigError


def hf_tokenizer(name_or_path: str | Path, correct_pad_token: bool = True, **kwargs: Any) -> Any:
    """transformers' tokenizer; one without a padding token pads with its end token, if `correct_pad_token`.

    `kwargs` go to `AutoTokenizer.from_pretrained`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if correct_pad_token and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def hf_processor(name_or_path: str | Path, **kwargs: Any) -> None:
    """None: text models have no processor. Raises ConfigError for a multimodal model."""
    if (Path(name_or_path).expanduser() / "preprocessor_config.json").is_file():
        raise ConfigError(f"{name_or_path} reads more than text (it has preprocessor_config.json): not supported here")
