"""Syncs that move adapters alone, to a vLLM that has read the weights below them from the model's directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.weight_sync.conftest import in_service, running
from tests.weight_sync.greedy import PROMPTS, greedy_tokens, hugging_face_tokens
from tests.weight_sync.trainers import FSDPTrainer
from verl.checkpoint_engine.errors import ActivationError, SyncAborted
from verl.utils.config import from_mapping
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine.fsdp.model import adapter_shapes
from verl.workers.rollout import SamplingOptions
from verl.workers.rollout.vllm.replica import VLLMReplica

pytestmark = pytest.mark.vllm

LORA = {"lora_rank": 5, "lora_alpha": 20, "lora": {"merge": False}}


class RefusingReplica(VLLMReplica):
    refuses_next = False

    async def activate(self, arena_path: str, version: int) -> None:
        if self.refuses_next:
            self.refuses_next = False
            raise ActivationError("refused", version=version, phase="activate", member=self.name)
        await super().activate(arena_path, version)


@dataclass
class Line:
    trainer: FSDPTrainer
    replica: RefusingReplica
    model: HFModelConfig

    def merged(self) -> PreTrainedModel:
        """The trainer's present model, as it is exported."""
        self.trainer.weights()
        return AutoModelForCausalLM.from_pretrained(self.trainer.scratch, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def line(
    ray_cluster: None, model_paths: dict[str, Path], shm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Line]:
    path = model_paths["qwen2"]
    model = from_mapping(HFModelConfig, {"path": str(path), **LORA})
    replica = RefusingReplica(
        replica_rank=8,
        config=RolloutConfig(
            name="vllm", dtype="float32", max_model_len=256, cpu_kvcache_gib=0.1, num_cpus=0.1, control_timeout_s=300
        ),
        model=model,
    )
    trainer = FSDPTrainer(
        path,
        "fsdp2",
        "float32",
        shm_dir / "adapters",
        tmp_path_factory.mktemp("adapters"),
        model=LORA,
        optim={"lr": 0.1},
    )

    with running(replica), in_service(replica, trainer):
        yield Line(trainer, replica, model)


async def test_vllm_computes_with_the_adapters_of_every_version_and_a_sync_moves_nothing_else(line: Line):
    nbytes = sum(4 * prod(shape) for shape in adapter_shapes(line.model).values())
    base = AutoModelForCausalLM.from_pretrained(line.model.path, dtype=torch.float32).eval()
    assert nbytes < sum(parameter.nbytes for parameter in base.parameters()) / 4
    await line.trainer.sync()
    before = await greedy_tokens(line.replica, line.trainer.version)
    assert before == hugging_face_tokens(base), "a new adapter adds nothing"
    for _ in range(2):
        report = await line.trainer.train_and_sync()
        assert report.nbytes_moved == report.nbytes_needed == nbytes
        model = line.merged()
        tokens = await greedy_tokens(line.replica, line.trainer.version)
        assert tokens == hugging_face_tokens(model)
        assert tokens != before
        await assert_log_probs_agree(line.replica, model)
        before = tokens


async def assert_log_probs_agree(replica: VLLMReplica, model: PreTrainedModel) -> None:
    prompt = PROMPTS[3]
    output = await replica.server_handle.generate.remote(
        prompt, SamplingOptions(max_tokens=20, temperature=1.0, ignore_eos=True), "sampled"
    )
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert output.log_probs == pytest.approx(expected.tolist(), abs=2e-4)


async def test_a_version_that_is_not_activated_leaves_the_adapters_of_the_one_before(line: Line):
    await line.trainer.train_and_sync()
    version, tokens = line.trainer.version, await greedy_tokens(line.replica, line.trainer.version)
    line.replica.refuses_next = True
    with pytest.raises(SyncAborted, match="refused"):
        await line.trainer.train_and_sync()
    assert line.trainer.manager.replicas == [line.replica]
    assert await greedy_tokens(line.replica, version) == tokens

    await line.trainer.sync()
    assert await greedy_tokens(line.replica, line.trainer.version) == hugging_face_tokens(line.merged())


async def test_an_engine_that_is_started_again_gets_its_weights_and_the_adapters_without_the_trainer(line: Line):
    await line.trainer.train_and_sync()
    expected = hugging_face_tokens(line.merged())
    line.replica.kill()
    await line.replica.launch_servers()
    line.trainer.group.watch()
    await line.trainer.manager.add_replicas([line.replica])
    assert [collectives for collectives, _ in line.trainer.group.watched()] == [0, 0]
    assert await greedy_tokens(line.replica, line.trainer.version) == expected
