"""A vLLM engine of ours that is sent versions of a model that sees, and what it answers to prompts with pictures.

    python -m tests.workers.rollout.seen_process ANSWERS RANKS MODEL ...

The engine has RANKS tensor-parallel ranks. Versions are 1, 2, ... of the models in their order. Writes a JSON object:
`checks` of the engine by version, `answers`, [tokens, log-probs] by version of each of PROMPTS, and `refused`, what it
said of requests that cannot be answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

LENGTH = 12
VERSIONS = (1, 2)


async def answered(models: dict[int, Path], ranks: int, trainer: Any, gone: Any) -> dict[str, Any]:
    """`gone`: a picture whose file is not there any more."""
    from tests.pictures import noise
    from tests.seeing import as_a_whole
    from tests.workers.rollout.test_seeing import PROMPTS, prompt_ids
    from verl.utils.model import read_hf_config
    from verl.utils.pictures import keep
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.engine import EngineSpec
    from verl.workers.rollout.errors import RolloutError
    from verl.workers.rollout.records import SamplingOptions
    from verl.workers.rollout.vllm.engine import VLLMEngine

    config = RolloutConfig(
        name="vllm",
        dtype="float32",
        cpu_kvcache_gib=0.1,
        tensor_model_parallel_size=ranks,
        checkpoint_engine={"check_engine": "always"},
    )
    model = HFModelConfig(
        path=str(models[1]), **as_a_whole(read_hf_config(models[1], trust_remote_code=False).model_type)
    )
    engine = VLLMEngine(
        EngineSpec(name="e", engine="", config=config, model=model, device="cpu", max_model_len=256, seed=0)
    )
    found: dict[str, Any] = {"checks": [], "answers": [], "refused": []}
    option = SamplingOptions(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    try:
        await engine.start()
        for version in models:
            trainer.commit(version)
            await engine.pause("abort")
            checked = await engine.activate(trainer.arena_path, version)
            await engine.resume()
            found["checks"].append(checked.found if checked else "")
            calls = [
                engine.generate(prompt_ids(models[1], images), option, f"{version}-{number}", [keep(i) for i in images])
                for number, images in enumerate(PROMPTS)
            ]
            outputs = await asyncio.gather(*calls)
            found["answers"].append([[output.token_ids, output.log_probs] for output in outputs])
        for ids, picture in (([3, 4], keep(noise())), (prompt_ids(models[1], PROMPTS[2]), gone)):
            try:
                await engine.generate(ids, option, "r", [picture])
            except RolloutError as exc:
                found["refused"].append(str(exc))
    finally:
        await engine.shutdown()
    return found


def main() -> None:
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    from transformers import AutoModelForImageTextToText

    from tests.pictures import noise
    from tests.workers.rollout.conftest import Trainer
    from verl.utils.pictures import keep

    gone = keep(noise(9))
    Path(gone.path).unlink()
    written, ranks = Path(sys.argv[1]), int(sys.argv[2])
    models = dict(enumerate(map(Path, sys.argv[3:]), 1))
    trainer = Trainer(models, AutoModelForImageTextToText)
    try:
        written.write_text(json.dumps(asyncio.run(answered(models, ranks, trainer, gone))))
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
