"""The `megatron` sections of `actor_rollout_ref.actor` and `actor_rollout_ref.ref`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from verl.utils.config import option, section


@dataclass(frozen=True, kw_only=True)
class RouterReplayConfig:
    """Whether the experts of a token are chosen once for a training step."""

    mode: str = option(
        "disabled",
        "R2: updates use the experts that were chosen when old log-probs were computed; R3: both use those that the "
        "rollout engine chose; disabled: every pass chooses",
        choices=("disabled", "R2", "R3"),
    )


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """How Megatron-core cuts the model and computes; used by strategy=megatron."""

    tensor_model_parallel_size: int = option(1, "ranks that share every layer", least=1)
    pipeline_model_parallel_size: int = option(1, "stages of layers, one after the other", least=1)
    expert_model_parallel_size: int = option(1, "ranks among which the experts of a layer are dealt out", least=1)
    expert_tensor_parallel_size: int | None = option(
        None, "ranks that share every expert; null: tensor_model_parallel_size", least=1
    )
    sequence_parallel: bool = option(
        False,
        "cut activations between tensor-parallel layers by tokens; models with experts need it (verl: true)",
    )
    num_layers_in_first_pipeline_stage: int | None = option(None, "null: as many as the other stages", least=1)
    num_layers_in_last_pipeline_stage: int | None = option(None, "null: as many as the other stages", least=1)
    account_for_embedding_in_pipeline_split: bool = option(
        False, "the embedding counts as a layer: the first stage has one layer less than the others"
    )
    account_for_loss_in_pipeline_split: bool = option(
        False, "head and loss count as a layer: the last stage has one layer less than the others"
    )
    make_vocab_size_divisible_by: int = option(
        128, "rows of the embedding are padded to a multiple of this, times tensor_model_parallel_size", least=1
    )
    padded_vocab_size: int | None = option(
        None, "rows of the embedding; null: as make_vocab_size_divisible_by says", least=1
    )
    use_distributed_optimizer: bool = option(
        True, "each data-parallel rank keeps the optimizer's moments of a part of the tensors; false: of all"
    )
    use_dist_checkpointing: bool = option(
        False, "read the first weights from dist_checkpointing_path; config and tokenizer come from model.path"
    )
    dist_checkpointing_path: str | None = option(None, "directory of a distributed checkpoint of Megatron's")
    dist_checkpointing_prefix: str = option("", "what stands before its names")
    override_transformer_config: dict[str, Any] = option(
        {}, "fields of Megatron's TransformerConfig, such as recompute_granularity or moe_router_dtype"
    )
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    model_dtype: str = option("fp32", "dtype of the weights that the optimizer keeps", choices=("fp32", "bf16", "fp16"))
    dtype: str = option("bfloat16", "dtype of the computation", choices=("float32", "bfloat16", "float16"))

    def padded_vocab(self, vocab: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks, for a vocabulary of `vocab` tokens."""
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-vocab // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class RefMegatronConfig:
    """How Megatron-core cuts the reference policy: as the actor, whose process groups it shares."""

    tensor_model_parallel_size: int | None = option(None, "null: the actor's", least=1)
    pipeline_model_parallel_size: int | None = option(None, "null: the actor's", least=1)
    expert_model_parallel_size: int | None = option(None, "null: the actor's", least=1)
    expert_tensor_parallel_size: int | None = option(None, "null: the actor's", least=1)

    def differences(self, actor: MegatronConfig) -> list[str]:
        """`key=value` of each key that is set here to another value than `actor` has."""
        stated = {field.name: getattr(self, field.name) for field in fields(self)}
        return [f"{key}={value}" for key, value in stated.items() if value not in (None, getattr(actor, key))]
