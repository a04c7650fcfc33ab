"""Megatron engines for tests, and what each rank of a pool does with them."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.workers.engine.engine_cases import (
    LEARNING_RATE,
    batch,
    held_parts,
    own_rows,
    weighted_loss,
)
from verl.utils.builtin.tiny import save_model
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.workers.config import HFModelConfig, MegatronConfig, OptimizerConfig
from verl.workers.engine.micro_batches import MicroBatchLimits

RATES = (LEARNING_RATE / 2, LEARNING_RATE, LEARNING_RATE)
"""Of the steps of `train`."""
SMALL = MicroBatchLimits(max_tokens=24)
CONTENTS = ("model", "optimizer", "extra")

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}
SEQUENCE = {"sequence_parallel": True}


def tiny_moe(directory: Path) -> Path:
    """Four experts, of which a token takes two."""
    tokenizer = build_tokenizer(512)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer, directory)
    return directory


def as_in_the_file(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers fuses the experts of a layer in memory: here every expert for itself again."""
    found: dict[str, torch.Tensor] = {}
    for name, fused in weights.items():
        prefix, _, part = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = fused
            continue
        for expert, weight in enumerate(fused):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            pieces = weight.chunk(len(names))
            found |= {f"{prefix}.{expert}.{own}.weight": piece for own, piece in zip(names, pieces, strict=True)}
    return found


OPTIM = {"lr": LEARNING_RATE, "lr_warmup_steps": 2, "zero_indexed_step": False}


def make_megatron(path: Path, options: dict, *, trainable: bool = True, model: dict | None = None, **optim):
    """A built engine that computes in float32 unless `options` say otherwise; `recompute` among them is the model's."""
    from verl.workers.engine.megatron.engine import MegatronEngine

    parallel = {"dtype": "float32"} | options
    recompute = parallel.pop("recompute", False)
    engine = MegatronEngine(
        model_config=HFModelConfig(path=str(path), enable_gradient_checkpointing=recompute, **(model or {})),
        megatron_config=MegatronConfig(**parallel),
        optim_config=OptimizerConfig(**OPTIM | optim) if trainable else None,
        grad_clip=0.5,
    )
    engine.build()
    return engine


def train(engine, seeds) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for seed in seeds:
        metrics = engine.train_mini_batch(
            own_rows(batch(12, seed)), weighted_loss, temperature=0.7, limits=SMALL, calculate_entropy=True
        )
        engine.step_lr()
    return metrics


def whole_life(path: Path, options: dict, directory: Path) -> dict:
    """Log-probs, three steps with a checkpoint after the second, and an export after the third."""
    torch.manual_seed(dist.get_rank())
    engine = make_megatron(path, options)
    log_probs = engine.compute_log_prob(own_rows(batch(12)), temperature=0.7, limits=SMALL, calculate_entropy=True)
    train(engine, (0, 1))
    engine.save_checkpoint(directory / "step", CONTENTS)
    found = {
        "log_probs": log_probs,
        "drawn": torch.rand(3),
        "saved": held_parts(engine),
        "metrics": train(engine, (2,)),
    }
    source, before = engine.weight_source("bfloat16"), collectives()
    for shard in source.shards():
        source.copy(shard, torch.empty(shard.box.shape, dtype=torch.bfloat16))
    found |= {"collectives": collectives() - before, "specs": source.specs(), "trained": held_parts(engine)}
    engine.export_hf(directory / "hf", "float32")
    return found


def resumed(path: Path, options: dict, directory: Path) -> dict:
    """The third step again, from the checkpoint."""
    engine = make_megatron(path, options)
    engine.load_checkpoint(directory / "step", CONTENTS)
    return {
        "drawn": torch.rand(3),
        "saved": held_parts(engine),
        "metrics": train(engine, (2,)),
        "trained": held_parts(engine),
    }


def collectives() -> int:
    """How many collectives this process has started on its groups: each one takes a sequence number of its group."""
    count = 0
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group of one rank has no numbers
            count += group._get_sequence_number_for_group()
    return count


def rounded_log_probs(path: Path, options: dict) -> torch.Tensor:
    """In bfloat16, by a reference policy."""
    engine = make_megatron(path, {**options, "dtype": "bfloat16"}, trainable=False)
    return engine.compute_log_prob(own_rows(batch(12)), temperature=1.0, limits=SMALL)[0]


def written_by_megatron(path: Path, options: dict, directory: Path) -> list[tuple]:
    """A distributed checkpoint of a model whose weights are no file's, by Megatron's own writer; what it holds."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Its writer starts processes, which those of the pool, as daemons, may not.
    multiprocessing.current_process()._config["daemon"] = False
    # It looks whether the queue is empty right after it has put something in: one between processes may be, by then.
    filesystem_async._results_queue = queue.Queue()
    engine = make_megatron(path, options)
    train(engine, (0, 1))
    directory.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(engine.model.sharded_state_dict(), str(directory))
    return held_parts(engine)


def read_from_megatron(path: Path, options: dict, directory: Path) -> list[tuple]:
    return held_parts(
        make_megatron(path, options | {"use_dist_checkpointing": True, "dist_checkpointing_path": str(directory)})
    )
