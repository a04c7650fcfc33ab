"""The `actor_rollout_ref.model` section."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.utils.config import ConfigError, option, section
from verl.utils.dropout import CHOICES, KEEP, require_no_random

REQUIRE_HELP = (
    "a model whose sequences cannot share a row is computed without use_remove_padding, and a warning says so; true: "
    "that is an error"
)


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """How adapters reach the rollout engines."""

    merge: bool = option(
        True,
        "true: add them to the weights that are sent, which every engine can load; false: send them alone, and vllm "
        "adds them to the weights that it has read from model.path (verl: false)",
    )


@dataclass(frozen=True, kw_only=True)
class HFModelConfig:
    """The policy model: a local Hugging Face causal-LM directory, or a built-in one."""

    path: str = option(
        "builtin:tiny-qwen2",
        "local Hugging Face directory, or builtin:{tiny-qwen2,tiny-qwen3-moe,tiny-qwen2.5-vl}, made on first use; "
        "null: tiny-qwen2.5-vl with builtin:shapes, else tiny-qwen2",
        follows=True,
    )
    tokenizer_path: str | None = option(None, "tokenizer directory; null: the model's")
    trust_remote_code: bool = option(False, "allow code from the model directory")
    external_lib: str | None = option(None, "module imported before the model is built")
    override_config: dict[str, Any] = option({}, "fields of the Hugging Face config to replace")
    dropout: str = option(
        "off",
        "off: updates drop nothing, whatever the model's config says, as log-probs are computed without dropout, too; "
        "keep: they drop what it says",
        choices=CHOICES,
    )
    custom_chat_template: str | None = option(None, "Jinja chat template that replaces the tokenizer's")
    lora_rank: int = option(
        0, "rank of LoRA adapters, which alone are trained then; 0: the whole model is trained", least=0
    )
    lora_alpha: int = option(16, "adapters count lora_alpha / lora_rank times", least=1)
    target_modules: str | list[str] = option(
        "all-linear",
        "layers that get adapters: all-linear (all but the output and a vision tower), last parts of names, or a regex",
    )
    lora: LoRAConfig = section(LoRAConfig)
    check_load: bool = option(
        True,
        "compare what trainer ranks hold after their start with the model's files, and buffers with transformers'",
    )
    language_model_only: bool | None = option(
        None,
        "train the language model alone of a multimodal checkpoint; false: the whole model, with pictures; null: true "
        "of gemma3, gemma4, llama4, mistral3, qwen3_5 and qwen3_5_moe, false of others",
    )
    freeze_vision_tower: bool = option(
        False, "train a model that sees without its vision tower, which deltas then send once"
    )
    use_remove_padding: bool = option(
        False,
        "compute no padding: sequences share a row (fsdp and fsdp2, models that keep them apart there); null: where "
        "ranks share sequences (verl: true)",
        follows=True,
    )
    require_remove_padding: bool = option(False, REQUIRE_HELP)
    enable_gradient_checkpointing: bool = option(False, "recompute activations in the backward pass (verl: true)")

    def __post_init__(self) -> None:
        if not self.target_modules:
            raise ConfigError("target_modules names no layer")
        require_padding_removed(self.require_remove_padding, self.use_remove_padding)
        require_no_random(self.override_config, self.dropout)

    def at(self, directory: Path) -> HFModelConfig:
        """This configuration with the model's local directory as its path, for engines."""
        return replace(self, path=str(directory))

    @property
    def drops(self) -> bool:
        """Whether updates use the dropout of the model's config."""
        return self.dropout == KEEP

    @property
    def is_of_transformers(self) -> bool:
        """Whether only transformers' code builds the model."""
        return not self.trust_remote_code and self.external_lib is None

    @property
    def sends_adapters(self) -> bool:
        """Whether a sync moves only the adapters; rollout engines load the other weights from `path`."""
        return self.lora_rank > 0 and not self.lora.merge


def require_padding_removed(required: bool, used: bool | None) -> None:
    """Raises ConfigError if only one of the two options is set."""
    if required and not used:
        raise ConfigError("require_remove_padding=true needs use_remove_padding=true")
