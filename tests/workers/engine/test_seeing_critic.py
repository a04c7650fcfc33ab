"""Critics that see: values of sequences with pictures are those of transformers' body under a linear layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tests.workers.engine.engine_cases import LEARNING_RATE, own_rows
from tests.workers.engine.test_seeing import (  # noqa: F401 - fixtures
    NUM_RESPONSE,
    PACKED,
    PICTURES,
    RECOMPUTED,
    SINGLE,
    SMALL,
    WHOLE,
    batch_of,
    cache,
    model,
)
from verl.protocol import DataProto
from verl.workers.config import FSDPConfig, HFModelConfig, OptimizerConfig
from verl.workers.engine.fsdp.value import FSDP2ValueEngine
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.losses import LossTotals

STEPS = 2
CONTENTS = ("model", "optimizer", "extra")


def make_critic(directory: Path, options: dict[str, Any]) -> FSDP2ValueEngine:
    engine = FSDP2ValueEngine(
        model_config=HFModelConfig(path=str(directory), **options),
        fsdp_config=FSDPConfig(dtype="float32"),
        optim_config=OptimizerConfig(lr=LEARNING_RATE),
        grad_clip=0.5,
    )
    engine.build()
    return engine


def loss_of(values: torch.Tensor, entropy: Any, data: DataProto, totals: LossTotals) -> tuple[torch.Tensor, Any]:
    error = (values - data.batch["advantages"]) ** 2 * data.batch["response_mask"]
    return error.sum() / totals.num_tokens, {}


class Alone(torch.nn.Module):
    """The whole model of transformers without its head for tokens, and a linear layer in its place."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        whole: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self.body, self.token = whole.model, whole.config.image_token_id
        self.score = torch.nn.Linear(whole.config.get_text_config().hidden_size, 1)
        torch.nn.init.zeros_(self.score.weight)
        torch.nn.init.zeros_(self.score.bias)
        self.processor: Any = AutoImageProcessor.from_pretrained(directory, backend="pil")

    def forward(self, data: DataProto) -> torch.Tensor:
        """Sequence by sequence, positions and patches of its own making."""
        values = torch.zeros(len(data), NUM_RESPONSE)
        for number, images in enumerate(PICTURES):
            ids = data.batch["input_ids"][number][data.batch["attention_mask"][number].bool()][None]
            given = dict(self.processor(images=images, return_tensors="pt")) if images else {}
            if images:
                given["mm_token_type_ids"] = (ids == self.token).int()
            count = int(data.batch["response_mask"][number].sum())
            states = self.body(input_ids=ids, **given).last_hidden_state
            values[number, :count] = self.score(states)[0, -count - 1 : -1, 0]
        return values


def learnt_alone(directory: Path, data: DataProto) -> list[torch.Tensor]:
    """Values before each step, and after the last."""
    critic = Alone(directory)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.01)
    found = []
    for _ in range(STEPS):
        values = critic(data)
        found.append(values.detach())
        loss, _ = loss_of(values, None, data, LossTotals.of(data.batch["response_mask"]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*found, critic(data)]


def learnt(
    path: Path, data: DataProto, limits: MicroBatchLimits, options: dict[str, Any], kept: Path
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """On one rank: values before each step and after the last, after a resume, and of an export."""
    engine, rows, found = make_critic(path, options), own_rows(data), []
    for _ in range(STEPS):
        found.append(engine.compute_values(rows, limits=limits))
        engine.train_mini_batch(rows, loss_of, temperature=1.0, limits=limits)
    found.append(engine.compute_values(rows, limits=limits))
    engine.save_checkpoint(kept / "state", CONTENTS)
    engine.export_hf(kept / "export", "float32")
    dist.barrier()
    resumed, exported = make_critic(path, options), make_critic(kept / "export", options)
    resumed.load_checkpoint(kept / "state", CONTENTS)
    return found, resumed.compute_values(rows, limits=limits), exported.compute_values(rows, limits=limits)


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("world_size", "limits", "options"),
    [
        pytest.param(1, WHOLE, {}, id="one rank, in rows"),
        pytest.param(2, SMALL, PACKED, id="two ranks, packed"),
        pytest.param(4, SINGLE, RECOMPUTED, id="four ranks, of which one sees nothing"),
    ],
)
def test_a_critic_that_sees_learns_as_transformers_alone_saves_loads_and_exports(
    ranks: Any,
    model: Path,  # noqa: F811
    tmp_path: Path,
    world_size: int,
    limits: MicroBatchLimits,
    options: dict[str, Any],
) -> None:
    data = batch_of(model, tmp_path)
    expected = learnt_alone(model, data)
    results = ranks.run(learnt, world_size, model, data, limits, options, tmp_path)
    assert expected[0].abs().max() == 0 < expected[1].abs().max()
    for step, values in enumerate(expected):
        found = torch.cat([result[0][step] for result in results])
        torch.testing.assert_close(found, values, atol=1e-4 if step < 1 else 2e-3, rtol=1e-3)
    for found, resumed, exported in results:
        assert torch.equal(resumed, found[-1])
        torch.testing.assert_close(exported, found[-1], atol=1e-5, rtol=0.0)
    after = Alone(model)
    after.body.load_state_dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "export").model.state_dict())
    with torch.no_grad():
        read = load_file(tmp_path / "export/model.safetensors")
        after.score.load_state_dict({name: read[f"score.{name}"] for name in ("weight", "bias")})
        values = after(data)
    torch.testing.assert_close(torch.cat([result[0][-1] for result in results]), values, atol=1e-4, rtol=0.0)
