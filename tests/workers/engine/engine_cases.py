"""Tiny models, batches and a loss for the tests of training engines, and what a single process makes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.models.architectures import ARCHITECTURES, write_checkpoint
from verl.checkpoint_engine.ports import WeightSource
from verl.protocol import DataProto
from verl.utils.builtin import make_tiny_model
from verl.workers.config import FSDPConfig, HFModelConfig, OptimizerConfig
from verl.workers.engine.base import TrainEngine
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.engine.registry import TrainEngineRegistry
from verl.workers.losses import LossTotals

NUM_PROMPT, NUM_RESPONSE = 7, 5
LEARNING_RATE = 1e-2


def tiny_model(base: Path, architecture: str, tied: bool) -> Path:
    """Head size 4: the q- and k-norms of Qwen3 have 4 rows, and of three ranks the last holds none of them."""
    directory = base / f"{architecture}-{'tied' if tied else 'untied'}"
    if not directory.exists():
        make_tiny_model(directory, architecture, tie_word_embeddings=tied, hidden_size=16, head_dim=4, heads=4)
    return directory


def write_with_shared_attention(directory: Path, name: str) -> None:
    """A Zamba (2) of which two layers have the same attention, as published ones."""
    blocks = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    known = ARCHITECTURES[name]
    write_checkpoint(replace(known, config=known.config | blocks), directory)


def batch(num_sequences: int, seed: int = 0) -> DataProto:
    """Prompts of 1 to P and responses of 1 to R tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_columns = NUM_PROMPT + NUM_RESPONSE
    prompt = torch.randint(1, NUM_PROMPT + 1, (num_sequences, 1), generator=generator)
    response = torch.randint(1, NUM_RESPONSE + 1, (num_sequences, 1), generator=generator)
    columns = torch.arange(num_columns)
    mask = ((columns >= NUM_PROMPT - prompt) & (columns < NUM_PROMPT + response)).long()
    ids = torch.randint(3, 60, (num_sequences, num_columns), generator=generator) * mask
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :NUM_PROMPT],
            "responses": ids[:, NUM_PROMPT:],
            "response_mask": mask[:, NUM_PROMPT:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "advantages": torch.randn(num_sequences, NUM_RESPONSE, generator=generator),
        }
    )


def make_engine(path: Path, **options) -> FSDPEngine:
    """A built engine of `strategy` that computes in float32, so that it can be compared exactly."""
    make = TrainEngineRegistry.get(options.pop("strategy", "fsdp2"))
    fsdp = {"dtype": "float32"} | options.pop("fsdp", {})
    model = options.pop("model", {})
    optim = {"lr": LEARNING_RATE} | options.pop("optim", {})
    engine = make(
        model_config=HFModelConfig(path=str(path), **model),
        fsdp_config=FSDPConfig(**fsdp),
        optim_config=OptimizerConfig(**optim),
        **options,
    )
    engine.build()
    assert isinstance(engine, FSDPEngine)
    return engine


def weighted_loss(log_prob, entropy, micro_batch, totals: LossTotals):
    """Has a token-mean part and a sequence-mean part, so that both denominators matter."""
    mask, advantages = micro_batch.batch["response_mask"], micro_batch.batch["advantages"]
    per_sequence = (log_prob * advantages * mask).sum(-1)
    loss = -per_sequence.sum() / totals.num_tokens + 0.1 * (log_prob**2 * mask).sum() / totals.num_sequences
    if entropy is not None:
        loss = loss - 0.01 * (entropy * mask).sum() / totals.num_tokens
    return loss, {"tokens": mask.sum() / totals.num_tokens}


def reference_log_probs(model, data: DataProto, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence by sequence, without any padding."""
    log_probs = torch.zeros(len(data), NUM_RESPONSE)
    entropies = torch.zeros(len(data), NUM_RESPONSE)
    for row in range(len(data)):
        kept = data.batch["attention_mask"][row].bool()
        num_response = int(data.batch["response_mask"][row].sum())
        ids = data.batch["input_ids"][row][kept].unsqueeze(0)
        logits = model(input_ids=ids).logits[0, -num_response - 1 : -1] / temperature
        distribution = logits.log_softmax(-1)
        labels = ids[0, -num_response:].unsqueeze(-1)
        log_probs[row, :num_response] = distribution.gather(-1, labels).squeeze(-1)
        entropies[row, :num_response] = -(distribution.exp() * distribution).sum(-1)
    return log_probs, entropies


def reference_steps(
    path: Path,
    mini_batches: list[DataProto],
    *,
    temperature: float,
    grad_clip: float,
    rates: tuple[float, ...] | None = None,
    frozen: Collection[str] = (),
    decay: Callable[[str], float] = lambda name: 0.01,
):
    """What plain torch makes of the mini-batches: loss and gradient norm of the last step, weights after it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    groups = [{"params": [each], "weight_decay": decay(name)} for name, each in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.999))
    for data, rate in zip(mini_batches, rates or [LEARNING_RATE] * len(mini_batches), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        totals = LossTotals.of(data.batch["response_mask"])
        log_prob, entropy = reference_log_probs(model, data, temperature)
        loss, _ = weighted_loss(log_prob, entropy, data, totals)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), norm.item(), checkpoint_weights(model)


def decay_of(name: str, *, spares: bool = True) -> float:
    """Of a parameter of Qwen2; one that `spares` norms and biases has none for them."""
    return 0.0 if spares and name.endswith(("norm.weight", "bias")) else 2.0


def checkpoint_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a model of transformers under the names of its checkpoint; tied ones once."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        layer, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, matrix in enumerate(parameter.detach()):
                halves = zip(("gate", "up"), matrix.chunk(2), strict=True)
                found |= {f"{layer}.{expert}.{half}_proj.weight": rows for half, rows in halves}
        elif last == "down_proj":
            found |= {f"{layer}.{expert}.down_proj.weight": rows for expert, rows in enumerate(parameter.detach())}
        else:
            found[name] = parameter.detach()
    return found


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to rounding, which Adam magnifies in single elements whose gradient is nearly zero."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs()
        assert difference.max() < 0.02 * LEARNING_RATE, name
        assert difference.mean() < 1e-4 * LEARNING_RATE, name


def held_parts(engine: FSDPEngine, dtype: str = "float32") -> list[tuple]:
    """(name, box, values) of everything that this rank holds."""
    return shown_by(engine.weight_source(dtype))


def shown_by(source: WeightSource) -> list[tuple]:
    """(name, box, values) of everything that `source` has."""
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in source.specs()}
    parts = []
    for shard in source.shards():
        values = torch.empty(shard.box.shape, dtype=dtypes[shard.name])
        source.copy(shard, values)
        parts.append((shard.name, shard.box, values))
    return parts


def weights_during_a_step(engine: TrainEngine, data: DataProto, limits: MicroBatchLimits) -> dict[str, bool]:
    """When a source that was made before a step has other weights than before it; see `TrainEngineFactory`."""
    source = engine.weight_source("float32")
    before = shown_by(source)
    changed = {"after a forward pass": False}  # only the last stage of a pipeline gets to see its end

    def look(when: str) -> None:
        pairs = zip(before, shown_by(source), strict=True)
        same = all(torch.equal(one[2], other[2]) for one, other in pairs)
        changed[when] = changed.get(when, False) or not same

    def loss(log_prob, entropy, micro_batch, totals: LossTotals):
        look("after a forward pass")
        return weighted_loss(log_prob, entropy, micro_batch, totals)

    engine._before_step = lambda: look("when asked")
    engine.train_mini_batch(data, loss, temperature=1.0, limits=limits)
    look("after the step")
    return changed


WEIGHTS_CHANGE_ONCE_ASKED = {"after a forward pass": False, "when asked": False, "after the step": True}


def assemble(parts_by_rank: list[list[tuple]]) -> dict[str, torch.Tensor]:
    """Whole tensors from the parts of all ranks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, box, _ in (part for parts in parts_by_rank for part in parts):
        shapes[name] = tuple(max(a, b) for a, b in zip(shapes.get(name, box.stop), box.stop, strict=True))
    whole = {}
    for name, box, values in (part for parts in parts_by_rank for part in parts):
        whole.setdefault(name, torch.full(shapes[name], float("nan")).to(values.dtype))
        whole[name][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = values
    return whole


def own_rows(data: DataProto) -> DataProto:
    return data.chunk(dist.get_world_size())[dist.get_rank()]


def train(path: Path, data: DataProto, limits: MicroBatchLimits, options: dict[str, Any], steps: int = 1) -> Any:
    engine = make_engine(path, grad_clip=0.5, **options)
    for _ in range(steps):
        metrics = engine.train_mini_batch(
            own_rows(data), weighted_loss, temperature=0.7, limits=limits, calculate_entropy=True
        )
    return metrics, held_parts(engine)
