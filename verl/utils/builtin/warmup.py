"""The built-in models: small ones after a short supervised warm-up on the built-in additions.

The warm-up ends with a bad habit on purpose. First the model learns to add. Then it sees demonstrations that end with a
question mark, mostly after large sums, so that the right answer does not match exactly. So reinforcement learning can
raise the reward, however far the first phase came.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl.utils.builtin.arithmetic import ArithmeticRecipe, problems, question
from verl.utils.builtin.tiny import build_model, save_model
from verl.utils.builtin.tokenizer import build_tokenizer

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

IGNORED = -100
Problem = tuple[int, int]


class Step(Protocol):
    def __call__(self, factor: float, *, habit: bool) -> float:
        """The loss of a step with this share of the learning rate, on answers with the habit or without."""


@dataclass(frozen=True, kw_only=True)
class TinyQwen2Recipe:
    """The parameters of `builtin:tiny-qwen2`; any change makes a new model beside the old one."""

    data: ArithmeticRecipe = field(default_factory=ArithmeticRecipe)
    hidden_size: int = 128
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 1024
    batch_size: int = 96
    learning_rate: float = 0.02
    ramp_steps: int = 10
    adding_loss: float = 0.35  # mean loss of ten steps at which the model can add well enough
    max_adding_steps: int = 250
    habit_steps: int = 40  # with a learning rate that falls to zero
    habit_large_sum: int = 100
    habit_large: float = 0.75
    habit_small: float = 0.25
    seed: int = 0
    version: int = 1

    @property
    def architecture(self) -> tuple[str, dict[str, Any]]:
        """The name of the architecture, and the fields that only its config has."""
        return "qwen2", {}


@dataclass(frozen=True, kw_only=True)
class TinyQwen3MoeRecipe(TinyQwen2Recipe):
    """The parameters of `builtin:tiny-qwen3-moe`."""

    experts: int = 4
    experts_per_token: int = 2
    expert_intermediate_size: int = 256

    @property
    def architecture(self) -> tuple[str, dict[str, Any]]:
        return "qwen3_moe", {
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_intermediate_size,
            "norm_topk_prob": True,
        }


RECIPES: dict[str, TinyQwen2Recipe] = {"tiny-qwen2": TinyQwen2Recipe(), "tiny-qwen3-moe": TinyQwen3MoeRecipe()}


def make_warm_model(directory: Path, recipe: TinyQwen2Recipe) -> None:
    """Train and write the model, in about half a minute; on one thread, so the same machine makes the same bytes."""
    import torch

    tokenizer = build_tokenizer(recipe.max_position_embeddings)
    architecture, fields = recipe.architecture
    model: Any = build_model(
        tokenizer,
        architecture,
        seed=recipe.seed,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=recipe.max_position_embeddings,
        **fields,
    )
    with one_thread():
        _train(model, tokenizer, recipe)
    save_model(model.to(torch.bfloat16), tokenizer, directory)


def warm_up(step: Step, good_loss: float, most_steps: int, ramp_steps: int, habit_steps: int, what: str) -> None:
    """Train until the mean loss of ten steps is at most `good_loss`, with a rate that rises during `ramp_steps`. Then
    train `habit_steps` on the habit, with a rate that falls to zero."""
    losses: list[float] = []
    while len(losses) < most_steps and (len(losses) < 10 or sum(losses[-10:]) > 10 * good_loss):
        losses.append(step(min((len(losses) + 1) / ramp_steps, 1.0), habit=False))
        if len(losses) % 25 == 0:
            logger.info("  warm-up step %d, loss %.3f", len(losses), losses[-1])
    logger.info("  %s after %d steps", what, len(losses))
    for done in range(habit_steps):
        step(1 - done / habit_steps, habit=True)


def _train(model: Any, tokenizer: Any, recipe: TinyQwen2Recipe) -> None:
    """Steps at a constant learning rate until the model adds, which takes more or fewer by luck; then the habit."""
    chooser = random.Random(recipe.seed)
    train_problems = problems(recipe.data, "train")
    optimizers = _optimizers(model, recipe.learning_rate)

    def step(factor: float, *, habit: bool) -> float:
        chosen = chooser.choices(train_problems, k=recipe.batch_size)
        answers = [_demonstration(problem, recipe, chooser, habit=habit) for problem in chosen]
        loss = _loss(model, *_batch(tokenizer, chosen, answers))
        return update(model, optimizers, loss, recipe.learning_rate * factor)

    warm_up(step, recipe.adding_loss, recipe.max_adding_steps, recipe.ramp_steps, recipe.habit_steps, "can add")


def _loss(model: Any, input_ids: Any, labels: Any) -> Any:
    import torch.nn.functional as F

    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    answered = targets != IGNORED
    return F.cross_entropy(model.lm_head(hidden[answered]), targets[answered])


def update(model: Any, optimizers: Sequence[torch.optim.Optimizer], loss: Any, rate: float) -> float:
    """Make one optimizer step and return `loss`. A group of parameters has its `share` of the learning rate."""
    import torch

    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def _demonstration(problem: Problem, recipe: TinyQwen2Recipe, chooser: random.Random, *, habit: bool) -> str:
    total = sum(problem)
    trails_off = chooser.random() < (recipe.habit_large if total >= recipe.habit_large_sum else recipe.habit_small)
    return f"{total}?" if habit and trails_off else str(total)


def _batch(tokenizer: Any, chosen: Sequence[Problem], answers: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B,L], padded on the right, and labels [B,L] that ignore everything but the answer and its end."""
    import torch

    rows, labels = [], []
    for (left, right), answer in zip(chosen, answers, strict=True):
        messages = [{"role": "user", "content": question(left, right)}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append(prompt_ids + answer_ids)
        labels.append([IGNORED] * len(prompt_ids) + answer_ids)
    width = max(map(len, rows))
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
        torch.tensor([label + [IGNORED] * (width - len(label)) for label in labels]),
    )


def _optimizers(model: Any, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest: Muon needs half of AdamW's steps here."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    taken = {id(parameter) for parameter in matrices}
    stacks = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 3]
    taken |= {id(parameter) for parameter in stacks}
    groups: list[dict[str, Any]] = [{"params": [each for each in model.parameters() if id(each) not in taken]}]
    if stacks:  # of experts, which Muon does not take; they learn well at this share of the rate
        groups.append({"params": stacks, "share": 0.3})
    return muon_and_adamw(matrices, groups, learning_rate)


def muon_and_adamw(matrices: list[Any], others: list[dict[str, Any]], rate: float) -> list[torch.optim.Optimizer]:
    """Muon, and AdamW for the groups of parameters `others`."""
    import torch

    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: several would sum in another order, and these matrices are too small to gain from them."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
