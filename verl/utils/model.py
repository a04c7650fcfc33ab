"""A model's directory, Hugging Face config and tokenizer. Downloads nothing."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl.utils.builtin import builtin_model, is_builtin
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.language_model import choose_part, directory_sees
from verl.utils.trainable import MERGE

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configs."""
_NO_DTYPE = re.compile(r"module 'torch' has no attribute '(.*)'")
"""What transformers makes of a word in `dtype`."""
MODEL_KEY = "actor_rollout_ref.model"
ATTENTION = "attn_implementation"
"""A key of `override_config` that selects the trainer's attention, and is no field of the config."""
EXACT = "verl_exact"
"""The attention with bit-identical results in trainer and engine: `verl.workers.hf.exact`."""


class ModelSettings(Protocol):
    """The part of `verl.workers.config.HFModelConfig` that is needed here; this layer imports no higher one."""

    @property
    def path(self) -> str: ...
    @property
    def tokenizer_path(self) -> str | None: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def external_lib(self) -> str | None: ...
    @property
    def override_config(self) -> dict[str, Any]: ...
    @property
    def language_model_only(self) -> bool | None: ...
    @property
    def custom_chat_template(self) -> str | None: ...


def resolve_model_path(path: str | Path, *, need_tokenizer: bool = True, key: str = f"{MODEL_KEY}.path") -> Path:
    """The Hugging Face directory behind `path`: a built-in name, made on first use, or a local directory.

    `key` is the configuration key of `path`, for messages.

    Raises ConfigError naming what is missing, weights included: `load_format=dummy` is for the rollout engine, the
    trainer needs real ones.
    """
    if is_builtin(str(path)):
        return builtin_model(str(path))
    directory = Path(path).expanduser().absolute()
    if not directory.is_dir():
        raise ConfigError(
            f"{key}={str(path)!r} is not a directory. Models are not downloaded from a hub: give a local "
            "directory (`hf download <name> --local-dir <directory>` makes one), builtin:tiny-qwen2 or "
            "builtin:tiny-qwen3-moe"
        )
    if not (directory / "config.json").is_file():
        what = "it is no Hugging Face model directory"
        if (directory / "adapter_config.json").is_file():
            what = f"it holds adapters alone: give a merged copy, which `{MERGE}` of peft writes"
        elif (directory / "params.json").is_file():
            what = "it has the format of its authors (params.json): give the Hugging Face version of the same model"
        raise ConfigError(f"{key}={str(path)!r} has no config.json: {what}")
    if not any(next(directory.glob(pattern), None) for pattern in WEIGHT_FILES):
        gguf = "; GGUF, which is quantised, is not read: give the checkpoint that it was made of"
        more = gguf if any(directory.glob("*.gguf")) else ""
        raise ConfigError(f"{key}={str(path)!r} has no weights ({' or '.join(WEIGHT_FILES)}){more}")
    if need_tokenizer:
        elsewhere = f"; set {MODEL_KEY}.tokenizer_path if it is elsewhere" if key == f"{MODEL_KEY}.path" else ""
        _require_tokenizer(directory, key, elsewhere)
    return directory


def load_tokenizer(model: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer of the model or of `tokenizer_path`, with `custom_chat_template` in force and a padding token.

    With a model that sees, a chat template of its processor goes before the tokenizer's, as in transformers.

    Raises ConfigError if there are no tokenizer files, if they cannot be read, or if the tokenizer has no end token.
    """
    from transformers import AutoTokenizer

    if model.tokenizer_path is None:
        directory = resolve_model_path(model.path)
    elif is_builtin(model.tokenizer_path):
        directory = builtin_model(model.tokenizer_path)
    else:
        directory = Path(model.tokenizer_path).expanduser().absolute()
        _require_tokenizer(directory, f"{MODEL_KEY}.tokenizer_path")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=model.trust_remote_code
        )
    except Exception as exc:  # it reads the model's config, too, whose class may raise anything
        if (directory / "config.json").is_file():
            read_hf_config(directory, trust_remote_code=model.trust_remote_code)
        raise ConfigError(f"the tokenizer in {directory} cannot be loaded: {' '.join(str(exc).split())}") from exc
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {directory} has no eos_token: a response could not end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    elif directory_sees(directory, whole=True):
        tokenizer.chat_template = _template_of_processor(directory) or tokenizer.chat_template
    return tokenizer


def _template_of_processor(directory: Path) -> Any:
    """In `processor_config.json`, `chat_template.json` or `chat_template.jinja`, in this order; None without one.
    Raises ConfigError for files that are damaged or contradict each other."""
    from transformers import ProcessorMixin

    processor: Any = ProcessorMixin
    try:
        described, _ = processor.get_processor_dict(directory)
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(f"the chat template of the processor in {directory} cannot be loaded: {exc}") from exc
    return described.get("chat_template")


def load_hf_config(model: ModelSettings) -> PretrainedConfig:
    """The model's Hugging Face config with `override_config` applied, after `external_lib` has been imported.

    Raises ConfigError for an architecture that transformers does not know, what it refuses in a configuration, a
    library that cannot be imported, and a field that the config does not have.
    """
    if model.external_lib:
        try:
            importlib.import_module(model.external_lib)
        except ImportError as exc:
            raise ConfigError(f"{MODEL_KEY}.external_lib={model.external_lib!r} cannot be imported: {exc}") from exc
    directory = resolve_model_path(model.path, need_tokenizer=model.tokenizer_path is None)
    config = read_hf_config(directory, trust_remote_code=model.trust_remote_code)
    override(config, model.override_config, f"{MODEL_KEY}.override_config")
    choose_part(config, model.language_model_only, f"{MODEL_KEY}.language_model_only")
    return config


def read_hf_config(directory: Path | str, *, trust_remote_code: bool) -> PretrainedConfig:
    """The config.json of a model. Raises ConfigError with the reason if transformers does not load it."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as exc:  # a class of configurations may raise anything
        why = " ".join(str(exc).split())
        if "does not recognize this architecture" in why:  # how to install another transformers follows
            why = f"{why.partition('. ')[0]} (transformers {version('transformers')})"
        elif "trust_remote_code" in why:
            why = "it has code of its own (auto_map), which is run with trust_remote_code=true beside the path alone"
        elif found := _NO_DTYPE.fullmatch(why):
            why = f"its dtype {found[1]!r} is none of torch's, such as bfloat16"
        raise ConfigError(f"{Path(directory) / 'config.json'} cannot be loaded: {why}") from exc
    return config


def expert_count(config: PretrainedConfig) -> int | None:
    """The number of experts in each layer with experts; None for a dense model."""
    text = config.get_text_config()
    counts = (getattr(text, name, None) for name in EXPERT_COUNTS)
    return next((count for count in counts if isinstance(count, int)), None)


def require_vocabulary(
    tokenizer: PreTrainedTokenizerBase, directory: Path, key: str, *, trust_remote_code: bool
) -> None:
    """Raises ConfigError unless the model in `directory` (of `key`) has the vocabulary of `tokenizer`.

    Called on the driver. The model's own tokenizer must give every token the same id, and may have more tokens; its
    embedding must have a row for each, and may have more: models of one family pad it differently.
    """
    from transformers import AutoTokenizer

    expected = tokenizer.get_vocab()
    found = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code).get_vocab()
    different = [token for token, number in expected.items() if found.get(token) != number]
    if different:
        first = min(different, key=lambda token: expected[token])
        raise ConfigError(
            f"{key}={directory} has another vocabulary than the policy, whose token ids it would read: "
            f"{len(different)} of {len(expected)} tokens differ, such as {first!r}, which is {expected[first]} for the "
            f"policy and {found.get(first, 'unknown')} there"
        )
    config = read_hf_config(directory, trust_remote_code=trust_remote_code)
    rows, needed = config.get_text_config().vocab_size, 1 + max(expected.values())
    if rows < needed:
        raise ConfigError(
            f"{key}={directory} has embeddings for {rows} tokens, and the policy's tokenizer has {needed} token ids"
        )


def override(config: PretrainedConfig, fields: Mapping[str, Any], key: str) -> None:
    """Set `fields` (of `key`) of `config` and of its nested configurations.

    Raises ConfigError for unknown fields, and for values that transformers refuses.
    """
    known = config.to_dict()
    for name, value in fields.items():
        if name == ATTENTION:
            continue
        if name not in known:
            raise ConfigError(f"{key}.{name} is not a field of {type(config).__name__}.{did_you_mean(name, known)}")
        nested = getattr(config, name)
        if isinstance(value, Mapping) and hasattr(nested, "to_dict"):
            override(nested, value, f"{key}.{name}")
        else:
            try:
                setattr(config, name, value)
            except Exception as exc:
                raise ConfigError(f"{key}.{name}={value!r}: {' '.join(str(exc).split())}") from exc


def _require_tokenizer(directory: Path, key: str, remedy: str = "") -> None:
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"{key}={str(directory)!r} has no tokenizer (one of {', '.join(TOKENIZER_FILES)}){remedy}")
