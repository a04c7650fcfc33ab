"""An engine that quantizes what it is sent computes with what one that read the same weights from disk does."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.float8 import NEEDS_FLOAT8
from tests.warm_workers import Fork, WarmWorkers
from tests.workers.rollout.conftest import MAX_MODEL_LEN, PROMPT, Served, Trainer
from verl.utils.builtin.tiny import make_tiny_model
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import RolloutReplicaRegistry, TokenOutput

LENGTH = 24
VERSIONS = (1, 2, 3)

pytestmark = [pytest.mark.vllm, NEEDS_FLOAT8]


@dataclass(frozen=True)
class Answers:
    """To PROMPT, by version."""

    served: Mapping[int, TokenOutput]
    fresh: Mapping[int, TokenOutput]
    """Of engines that read the version from disk."""
    plain: Mapping[int, Mapping[int, list[float]]]
    """Log-probs of what was served, by the version whose weights Hugging Face computes them with."""
    checks: Mapping[int, str]
    """What the engine found when it looked at what it had loaded."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None, warm: WarmWorkers) -> Answers:
    base = tmp_path_factory.mktemp("quantized")
    models = {
        version: make_tiny_model(base / str(version), "qwen3_moe", hidden_size=256, dtype="bfloat16", seed=version)
        for version in VERSIONS
    }
    trainer = Trainer(models)
    config = RolloutConfig(
        name="vllm", quantization="fp8", max_model_len=MAX_MODEL_LEN, cpu_kvcache_gib=0.1, num_cpus=0.1
    )
    replica = RolloutReplicaRegistry.get("vllm")(
        replica_rank=0, config=config, model=HFModelConfig(path=str(models[1]))
    )
    served, checks = {}, {}

    async def serve() -> None:
        await replica.init_standalone()
        for version in VERSIONS:
            trainer.commit(version)
            await replica.pause("abort")
            checked = await replica.activate(trainer.arena_path, version)
            await replica.resume()
            checks[version] = checked.found if checked else ""
            served[version] = await Served(replica, trainer).generate(
                max_tokens=LENGTH, temperature=0.0, ignore_eos=True
            )
        await replica.shutdown()

    asyncio.run(serve())
    plain = {
        version: {other: trainer.log_probs(other, PROMPT, output.token_ids, 1.0) for other in VERSIONS}
        for version, output in served.items()
    }
    trainer.close()
    fresh = {version: _fresh(base, models[version], warm) for version in VERSIONS}
    return Answers(served, fresh, plain, checks)


def _fresh(base: Path, model: Path, warm: WarmWorkers) -> TokenOutput:
    answered = base / f"{model.name}.out"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"TMPDIR": str(base)}
    arguments = [str(model), str(LENGTH), *map(str, PROMPT)]
    with answered.open("w") as output:
        program = "tests.workers.rollout.quantized_process"
        process = Fork(warm, program, arguments, env=environment, stdout=output, stderr=output)
    assert process.end(answered) == 0, answered.read_text()
    told = json.loads(answered.read_text().splitlines()[-1])
    return TokenOutput(told["tokens"], told["log_probs"], "length", ())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_computed_with_as_by_an_engine_that_read_it_from_disk(answers: Answers, version: int):
    served, fresh = answers.served[version], answers.fresh[version]
    assert served.token_ids == fresh.token_ids
    assert served.log_probs == fresh.log_probs


@pytest.mark.parametrize("version", VERSIONS)
def test_log_probs_are_near_those_of_the_weights_that_were_sent_and_of_no_other_version(answers: Answers, version: int):
    """Rounded to 4 of 8 bits, so that they are not equal."""
    distances = {other: _distance(answers.served[version], plain) for other, plain in answers.plain[version].items()}
    assert 0.01 < distances.pop(version) < 0.1
    assert min(distances.values()) > 0.5


def test_the_first_version_is_compared_with_a_load_from_disk(answers: Answers):
    assert answers.checks[1].endswith("live tensors equal a load from disk")
    assert (answers.checks[2], answers.checks[3]) == ("", "")


def _distance(output: TokenOutput, log_probs: list[float]) -> float:
    assert output.log_probs is not None
    return max(abs(one - other) for one, other in zip(output.log_probs, log_probs, strict=True))
