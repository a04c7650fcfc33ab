"""The built-in multimodal model after a short supervised warm-up on drawings of shapes, with a bad habit.

As with sums (`warmup`), it learns to count, and then to end larger numbers with a question mark. Reinforcement learning
raises the reward by unlearning that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from verl.utils.builtin.seeing import (
    MERGE,
    MOST_TOKENS,
    PICTURE,
    build_seeing_model,
    save_seeing_model,
    seeing_tokenizer,
)
from verl.utils.builtin.shapes import Drawing, drawings
from verl.utils.builtin.warmup import IGNORED, muon_and_adamw, one_thread, update, warm_up


@dataclass(frozen=True, kw_only=True)
class TinyQwen25VLRecipe:
    """The parameters of `builtin:tiny-qwen2.5-vl`; any change makes a new model beside the old one."""

    hidden_size: int = 128
    layers: int = 3
    depth: int = 2
    vision_hidden_size: int = 64
    batch_size: int = 64
    learning_rate: float = 0.01  # of Muon
    share_of_others: float = 0.5  # which AdamW trains
    ramp_steps: int = 10
    counting_loss: float = 0.15  # mean loss of ten steps at which the model counts well enough
    max_counting_steps: int = 300
    habit_steps: int = 40  # with a learning rate that falls to zero
    habit_large_count: int = 2
    habit_large: float = 0.75
    habit_small: float = 0.25
    seed: int = 0
    version: int = 1


def make_warm_seeing_model(directory: Path, recipe: TinyQwen25VLRecipe) -> None:
    """Train and write the model, in about 40 s on one core."""
    import torch

    tokenizer = seeing_tokenizer(1024)
    model: Any = build_seeing_model(
        tokenizer,
        "qwen2_5_vl",
        seed=recipe.seed,
        hidden_size=recipe.hidden_size,
        layers=recipe.layers,
        depth=recipe.depth,
        vision_hidden_size=recipe.vision_hidden_size,
        tie_word_embeddings=True,
    )
    save_seeing_model(model, tokenizer, directory)
    with one_thread():
        _train(model, _Batches(directory, tokenizer, recipe), recipe)
    save_seeing_model(model.to(torch.bfloat16), tokenizer, directory)


class _Batches:
    """Drawings with answers, as the model reads them."""

    def __init__(self, directory: Path, tokenizer: Any, recipe: TinyQwen25VLRecipe) -> None:
        from transformers import AutoImageProcessor

        auto: Any = AutoImageProcessor
        self._processor = auto.from_pretrained(directory)
        self._tokenizer, self._recipe = tokenizer, recipe
        self._picture_id = tokenizer.convert_tokens_to_ids(PICTURE)
        self._drawings = drawings(f"{recipe.seed} warm-up")
        self._chooser = random.Random(recipe.seed)

    def next(self, *, habit: bool) -> dict[str, Any]:
        """Token ids [B,L] with padding on the right, labels that ignore all but the answer, and the patches."""
        import torch

        chosen = list(islice(self._drawings, self._recipe.batch_size))
        given = self._processor(images=[each.picture for each in chosen], return_tensors="pt")
        counts = (given["image_grid_thw"].prod(-1) // MERGE**2).tolist()
        rows, labels = [], []
        for each, count in zip(chosen, counts, strict=True):
            prompt = self._prompt(each, count)
            answer = [*self._tokenizer.encode(self._answer(each, habit), add_special_tokens=False)]
            answer.append(self._tokenizer.eos_token_id)
            rows.append(prompt + answer)
            labels.append([IGNORED] * len(prompt) + answer)
        width, pad = max(map(len, rows)), self._tokenizer.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        return {
            "input_ids": ids,
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
            "mm_token_type_ids": (ids == self._picture_id).int(),
            "labels": torch.tensor([label + [IGNORED] * (width - len(label)) for label in labels]),
            "pixel_values": given["pixel_values"],
            "image_grid_thw": given["image_grid_thw"],
        }

    def _prompt(self, drawing: Drawing, count: int) -> list[int]:
        assert count <= MOST_TOKENS
        parts = [{"type": "image"}, {"type": "text", "text": drawing.question.removeprefix("<image>")}]
        ids = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, return_dict=False
        )
        return [token for each in ids for token in [each] * (count if each == self._picture_id else 1)]

    def _answer(self, drawing: Drawing, habit: bool) -> str:
        recipe = self._recipe
        share = recipe.habit_large if int(drawing.answer) >= recipe.habit_large_count else recipe.habit_small
        trails_off = self._chooser.random() < share
        return f"{drawing.answer}?" if habit and trails_off else drawing.answer


def _train(model: Any, batches: _Batches, recipe: TinyQwen25VLRecipe) -> None:
    layers = ("layers.", "blocks.", "merger.")
    is_matrix = {
        each: each.dim() == 2 and any(part in name for part in layers) for name, each in model.named_parameters()
    }
    others = {"params": [each for each in is_matrix if not is_matrix[each]], "share": recipe.share_of_others}
    optimizers = muon_and_adamw([each for each in is_matrix if is_matrix[each]], [others], recipe.learning_rate)

    def step(factor: float, *, habit: bool) -> float:
        loss = model(**batches.next(habit=habit), use_cache=False).loss
        return update(model, optimizers, loss, recipe.learning_rate * factor)

    warm_up(step, recipe.counting_loss, recipe.max_counting_steps, recipe.ramp_steps, recipe.habit_steps, "can count")
