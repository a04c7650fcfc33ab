"""vLLM engines of ours over models from disk, one after the other in this process, and what they sample.

    python -m tests.models.stretched_process ANSWERS LONGEST:DIRECTORY ...

`LONGEST` is the most tokens of a sequence. Writes a JSON list: of each engine [[prompt, tokens, log-probs], ...].
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = (3, 7, 20)
"""Their tokens, of which engines are asked the ones that leave room for a response."""


async def sampled(directory: str, longest: int) -> list[Any]:
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.engine import EngineSpec
    from verl.workers.rollout.records import SamplingOptions
    from verl.workers.rollout.vllm.engine import VLLMEngine

    config = RolloutConfig(name="vllm", dtype="float32", load_format="auto", cpu_kvcache_gib=0.1)
    model = HFModelConfig(path=directory)
    engine = VLLMEngine(
        EngineSpec(name="e", engine="", config=config, model=model, device="cpu", max_model_len=longest, seed=0)
    )
    prompts = [[3 + place * 7 % 200 for place in range(length)] for length in PROMPTS if length + 4 <= longest]
    try:
        await engine.start()
        options = [SamplingOptions(max_tokens=longest - len(prompt), ignore_eos=True) for prompt in prompts]
        calls = [engine.generate(prompt, options[place], str(place)) for place, prompt in enumerate(prompts)]
        outputs = await asyncio.gather(*calls)
    finally:
        await engine.shutdown()
    return [[prompt, output.token_ids, output.log_probs] for prompt, output in zip(prompts, outputs, strict=True)]


def main() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    written, found = Path(sys.argv[1]), []
    for cell in sys.argv[2:]:
        longest, _, directory = cell.partition(":")
        found.append(asyncio.run(sampled(directory, int(longest))))
        gc.collect()
        cleanup_dist_env_and_memory()
    written.write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    main()
