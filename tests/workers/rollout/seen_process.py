"""An engine of ours that is sent versions of a model that sees, and what it answers to prompts with pictures.

    python -m tests.workers.rollout.seen_process ENGINE ANSWERS RANKS MODEL ...

ENGINE is `vllm` or `sglang`, with RANKS tensor-parallel ranks. Versions are 1, 2, ... of the models in their order.
Writes a JSON object: `checks` of the engine by version, `answers`, [tokens, log-probs] by version of each of PROMPTS,
`expected`, the same by transformers alone, `kept`, the distance from transformers of an answer that began with the last
version and ended with the first one, and `refused`, what it said of requests that cannot be answered. Of vLLM `inputs`,
too: what differs between those that it was given and those that its own processor makes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

LENGTH = 12
IN_BFLOAT16 = ("qwen3_5", "qwen3_5_moe")
"""What vLLM computes in nothing else on a CPU."""
VERSIONS = (1, 2)
KEPT_LENGTH = 60
ATTEMPTS = 40
"""To change the version while an answer is under way."""


def engine_of(name: str, models: dict[int, Path], ranks: int) -> Any:
    from tests.seeing import as_a_whole
    from verl.utils.model import read_hf_config
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.engine import EngineSpec

    config = RolloutConfig(
        name=name,
        dtype=dtype_of(models[1]),
        cpu_kvcache_gib=0.1,
        tensor_model_parallel_size=ranks,
        checkpoint_engine={"check_engine": "always"},
        engine_kwargs={"vllm": {"block_size": 32}} if name == "vllm" else {},  # so that pictures fill blocks
    )
    model = HFModelConfig(
        path=str(models[1]), **as_a_whole(read_hf_config(models[1], trust_remote_code=False).model_type)
    )
    spec = EngineSpec(name="e", engine="", config=config, model=model, device="cpu", max_model_len=512, seed=0)
    if name == "vllm":
        from verl.workers.rollout.vllm.engine import VLLMEngine

        return VLLMEngine(spec)
    from verl.workers.rollout.sglang.engine import SGLangEngine

    return SGLangEngine(spec)


async def answered(engine: Any, models: dict[int, Path], trainer: Any, gone: Any) -> dict[str, Any]:
    """`gone`: a picture whose file is not there any more."""
    from tests.pictures import noise
    from tests.workers.rollout.test_seeing import PROMPTS, prompt_ids
    from verl.utils.pictures import keep
    from verl.workers.rollout.errors import RolloutError
    from verl.workers.rollout.records import SamplingOptions

    async def serve(version: int, mode: str = "abort") -> Any:
        trainer.commit(version)
        await engine.pause(mode)
        checked = await engine.activate(trainer.arena_path, version)
        await engine.resume()
        return checked

    found: dict[str, Any] = {"checks": [], "answers": [], "refused": []}
    option = SamplingOptions(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    try:
        await engine.start()
        for version in models:
            checked = await serve(version)
            found["checks"].append(checked.found if checked else "")
            calls = [
                engine.generate(prompt_ids(models[1], images), option, f"{version}-{number}", [keep(i) for i in images])
                for number, images in enumerate(PROMPTS)
            ]
            outputs = await asyncio.gather(*calls)
            found["answers"].append([[output.token_ids, output.log_probs] for output in outputs])
        found["inputs"] = differences(engine, models[1]) if engine._spec.config.name == "vllm" else []
        found["kept"] = await kept(engine, serve, models[1])
        for ids, picture in (([3, 4], keep(noise())), (prompt_ids(models[1], PROMPTS[2]), gone)):
            try:
                await engine.generate(ids, option, "r", [picture])
            except RolloutError as exc:
                found["refused"].append(str(exc))
    finally:
        await engine.shutdown()
    return found


async def kept(engine: Any, serve: Any, directory: Path) -> Any:
    """Tokens and log-probs of an answer of the last version that went on with the first one, and where that began."""
    from tests.seeing import processor_of
    from tests.workers.rollout.test_seeing import PROMPTS, prompt_ids
    from verl.utils.pictures import keep
    from verl.workers.rollout.records import SamplingOptions

    option, images = SamplingOptions(max_tokens=KEPT_LENGTH, ignore_eos=True), PROMPTS[0]
    marks = set(processor_of(directory).token_ids.values())
    for attempt in range(ATTEMPTS):
        begun = asyncio.ensure_future(
            engine.generate(prompt_ids(directory, images), option, f"kept-{attempt}", [keep(i) for i in images])
        )
        await asyncio.sleep(0.02 * attempt)
        await serve(VERSIONS[0], "keep")
        output = await begun
        if len(output.weight_versions) == 2 and not marks & {
            *output.token_ids
        }:  # which transformers takes for pictures
            return output.token_ids, output.log_probs, output.weight_versions[1].start
        await serve(VERSIONS[-1])
    raise AssertionError("no answer was under way when the version changed")


def dtype_of(directory: Path) -> str:
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    return "bfloat16" if kind in IN_BFLOAT16 else "float32"


def whole_processor(directory: Path) -> Any:
    """That of transformers, which computes patches with PIL."""
    from transformers import AutoImageProcessor, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(directory)
    pictures: Any = AutoImageProcessor
    processor.image_processor = pictures.from_pretrained(directory, backend="pil")
    return processor


def differences(engine: Any, directory: Path) -> list[str]:
    """Between ids, places and inputs of the pictures of `prompt_with` and those of vLLM's own processor."""
    import torch
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    from tests.seeing import processor_of
    from tests.workers.rollout.test_seeing import PROMPTS, prompt_ids, prompt_text
    from verl.utils.pictures import keep
    from verl.workers.rollout.vllm.pictures import prompt_with

    theirs: Any = engine._llm.renderer.get_mm_processor()
    processor = theirs.info.get_hf_processor()
    processor.image_processor = whole_processor(directory).image_processor
    found = []
    for images in filter(None, PROMPTS):
        given: Any = prompt_with(prompt_ids(directory, images), [keep(i) for i in images], processor_of(directory))
        asked = ProcessorInputs(
            processor.tokenizer.encode(prompt_text(directory, images), add_special_tokens=False),
            theirs.info.parse_mm_data({"image": images}),
        )
        made = theirs.apply(asked, TimingContext(enabled=False))
        what = f"{len(images)} pictures: "
        if made["prompt_token_ids"] != given["prompt_token_ids"]:
            found.append(what + "ids")
        places = [[p.extract_embeds_range() for p in each["mm_placeholders"]["image"]] for each in (made, given)]
        if places[0] != places[1]:
            found.append(f"{what}places {places}")
        for one, other in zip(made["mm_kwargs"]["image"], given["mm_kwargs"]["image"], strict=True):
            wanted, own_ones = one.get_data(), other.get_data()
            if wanted.keys() != own_ones.keys():
                found.append(f"{what}names {sorted(wanted)}, not {sorted(own_ones)}")
            for name in wanted.keys() & own_ones.keys():
                own = own_ones[name]
                filled = torch.zeros_like(wanted[name])  # llava_next: up to the most tiles of a picture, and cut again
                filled[tuple(map(slice, own.shape))] = own
                if not torch.equal(wanted[name], filled):
                    found.append(what + name)
    return found


def alone(directory: Path, answers: list[Any]) -> list[Any]:
    """What transformers generates, and its log-probs of the tokens of `answers`, for each of PROMPTS, in order."""
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.workers.rollout.test_seeing import PROMPTS, prompt_text

    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(directory, dtype=getattr(torch, dtype_of(directory))).float().eval()
    processor = whole_processor(directory)
    found = []
    for images, (tokens, _) in zip(PROMPTS, answers, strict=False):
        given = dict(
            processor(
                text=[prompt_text(directory, images)],
                images=[images] if images else None,
                return_tensors="pt",
                add_special_tokens=False,
            )
        )
        length = len(tokens)
        generated = model.generate(**given, max_new_tokens=length, do_sample=False, eos_token_id=None)
        count = given["input_ids"].shape[1]
        added = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, length, dtype=torch.long)}
        for name in given.keys() & {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}:
            given[name] = torch.cat([given[name], added.get(name, torch.zeros(1, length, dtype=torch.long))], dim=1)
        with torch.no_grad():
            distribution = model(**given).logits[0, count - 1 : -1].log_softmax(-1)
        own = distribution.gather(-1, added["input_ids"][0][:, None])[:, 0]
        found.append([generated[0, count:].tolist(), own.tolist()])
    return found


def main() -> None:
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    from transformers import AutoModelForImageTextToText

    from tests.pictures import noise
    from tests.workers.rollout.conftest import Trainer
    from verl.utils.pictures import keep

    gone = keep(noise(9))
    Path(gone.path).unlink()
    engine, written, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    models = dict(enumerate(map(Path, sys.argv[4:]), 1))
    trainer = Trainer(models, AutoModelForImageTextToText)
    try:
        found = asyncio.run(answered(engine_of(engine, models, ranks), models, trainer, gone))
        found["expected"] = [alone(models[version], found["answers"][version - 1]) for version in models]
        tokens, log_probs, start = found["kept"]
        old, new = (alone(models[version], [[tokens, log_probs]])[0][1] for version in (VERSIONS[-1], VERSIONS[0]))
        expected = [*old[:start], *new[start:]]
        found["kept"] = max(abs(one - other) for one, other in zip(log_probs, expected, strict=True))
        written.write_text(json.dumps(found))
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
