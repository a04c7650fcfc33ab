"""An engine of ours that reads a tiny model of a family from disk, and what it answers to prompts with videos.

    python -m tests.workers.rollout.video_process ANSWERS FAMILY vllm|hf

Writes a JSON object: `answers`, [tokens, log-probs] of each of PROMPTS, `expected`, the same by transformers alone,
`scored`, the log-probs of the same tokens by the trainer's inputs, and `inputs`, what differs between those that vLLM
was given and those that its own processor makes (`hf`: nothing). The last prompt has a video that goes on for longer
than its frames are wide, which transformers alone places otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

LENGTH = 8
LONG = -1
"""The place of the long video among PROMPTS."""


def prompts() -> list[tuple[list[Any], list[dict[str, Any]]]]:
    """Pictures, and videos, which follow them in the text."""
    from tests.pictures import noise
    from tests.videos import in_frames, scenes

    clip = in_frames(scenes(5), 8.0)
    return [
        ([], []),
        ([], [clip]),
        ([noise(1), noise(2, 112, 56)], [clip, in_frames(scenes(4, 3, 112, 56), 8.0)]),
        ([noise(3)], []),
        ([], [in_frames(scenes(16, 2, 56, 28), 2.0)]),
    ]


def prompt_of(directory: Path, images: list[Any], videos: list[Any]) -> str:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    kinds = ["image"] * len(images) + ["video"] * len(videos)
    parts = [part for kind in kinds for part in ({"type": kind}, {"type": "text", "text": "and"})]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": f"{len(parts)}?"}]}
    return str(tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))


def requests(directory: Path) -> list[tuple[list[int], list[Any]]]:
    """Ids, and pictures and videos, of each of PROMPTS."""
    from transformers import AutoTokenizer

    from tests.seeing import processor_of
    from verl.utils.pictures import keep, keep_video

    processor, tokenizer = processor_of(directory), AutoTokenizer.from_pretrained(directory)
    found = []
    for images, videos in prompts():
        media = [*map(keep, images), *map(keep_video, videos)]
        expanded = processor.expanded(prompt_of(directory, images, videos), [processor.text(each) for each in media])
        found.append((list(tokenizer.encode(expanded, add_special_tokens=False)), media))
    return found


def computed_in(directory: Path, name: str) -> str:
    from tests.workers.rollout.seen_process import dtype_of

    return dtype_of(directory) if name == "vllm" else "float32"


def engine_class(name: str) -> Any:
    if name == "vllm":
        from verl.workers.rollout.vllm.engine import VLLMEngine

        return VLLMEngine
    from verl.workers.rollout.hf.engine import HFEngine

    return HFEngine


async def answered(directory: Path, name: str) -> dict[str, Any]:
    from tests.seeing import as_a_whole
    from verl.utils.model import read_hf_config
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.engine import EngineSpec
    from verl.workers.rollout.records import SamplingOptions

    kind = read_hf_config(directory, trust_remote_code=False).model_type
    dtype = computed_in(directory, name)
    config = RolloutConfig(name=name, dtype=dtype, cpu_kvcache_gib=0.1, load_format="auto")
    model = HFModelConfig(path=str(directory), **as_a_whole(kind))
    spec = EngineSpec(name="e", engine="", config=config, model=model, device="cpu", max_model_len=768, seed=0)
    engine: Any = engine_class(name)(spec)
    option = SamplingOptions(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    try:
        await engine.start()
        calls = [
            engine.generate(ids, option, str(number), media) for number, (ids, media) in enumerate(requests(directory))
        ]
        outputs = await asyncio.gather(*calls)
        found: dict[str, Any] = {"answers": [[output.token_ids, output.log_probs] for output in outputs]}
        found["inputs"] = differences(engine, directory) if name == "vllm" else []
    finally:
        await engine.shutdown()
    return found


def differences(engine: Any, directory: Path) -> list[str]:
    """Between ids, places and inputs of `prompt_with` and those of vLLM's own processor."""
    import numpy as np
    import torch
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    from tests.seeing import processor_of
    from tests.workers.rollout.seen_process import whole_processor
    from verl.utils.pictures import keep_video
    from verl.workers.rollout.vllm.pictures import prompt_with

    theirs: Any = engine._llm.renderer.get_mm_processor()
    processor = theirs.info.get_hf_processor()
    processor.image_processor = whole_processor(directory).image_processor

    def same(theirs: Any, ours: Any) -> bool:
        """In the dtype of the model, to which vLLM's processor rounds at once, and the model else."""
        wanted = torch.as_tensor(theirs)
        return torch.equal(wanted, torch.as_tensor(ours).to(wanted.dtype))

    found = []
    for (images, videos), (ids, media) in zip(prompts(), requests(directory), strict=True):
        if not media:
            continue
        given: Any = prompt_with(ids, media, processor_of(directory))
        opened = [keep_video(video).open(lambda *_: []) for video in videos]
        of_videos = [
            (
                np.asarray(frames.pixels),
                {
                    "fps": frames.rate,
                    "total_num_frames": frames.total,
                    "frames_indices": list(frames.indices),
                    "duration": frames.total / frames.rate,
                    "do_sample_frames": False,
                },
            )
            for frames in opened
        ]
        data = {"image": images, "video": of_videos}
        asked = ProcessorInputs(
            processor.tokenizer.encode(prompt_of(directory, images, videos), add_special_tokens=False),
            theirs.info.parse_mm_data({kind: each for kind, each in data.items() if each}),
            {"do_sample_frames": False} if videos else {},
        )
        made = theirs.apply(asked, TimingContext(enabled=False))
        what = f"{len(images)} pictures and {len(videos)} videos: "
        if made["prompt_token_ids"] != given["prompt_token_ids"]:
            found.append(what + "ids")
        for kind in given["mm_placeholders"]:
            places = [[p.extract_embeds_range() for p in each["mm_placeholders"][kind]] for each in (made, given)]
            if places[0] != places[1]:
                found.append(f"{what}places of {kind} {places}")
            for one, other in zip(made["mm_kwargs"][kind], given["mm_kwargs"][kind], strict=True):
                wanted, own = one.get_data(), other.get_data()
                wanted.pop("timestamps", None)  # of which only vLLM's own processor writes text
                if wanted.keys() != own.keys():
                    found.append(f"{what}names {sorted(wanted)}, not {sorted(own)}")
                found += [what + name for name in wanted.keys() & own.keys() if not same(wanted[name], own[name])]
    return found


def scored(directory: Path, dtype: str, answers: list[Any]) -> tuple[list[Any], list[Any]]:
    """What transformers generates, and its log-probs of the tokens of `answers`; and those of the trainer's inputs."""
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.seeing import processor_of
    from tests.videos import by_transformers
    from verl.workers.hf.seeing import Sight

    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(directory, dtype=getattr(torch, dtype)).float().eval()
    processor = processor_of(directory)
    alone, ours = [], []
    for (images, videos), (ids, media), (tokens, _) in zip(prompts(), requests(directory), answers, strict=True):
        given = by_transformers(directory, prompt_of(directory, images, videos), images, videos)
        assert given["input_ids"][0].tolist() == ids
        generated = model.generate(**given, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        whole = torch.tensor([[*ids, *tokens]])
        kinds = given["mm_token_type_ids"]
        given |= {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        given["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, LENGTH)], dim=1)
        seen = Sight(processor=processor, pictures=[media]).of(model, whole, torch.ones_like(whole))
        with torch.no_grad():
            by_itself = model(**given).logits
            with seen.embedded(model):
                by_trainer = model(**seen.inputs).logits
        of_tokens = [
            logits[0, len(ids) - 1 : -1].log_softmax(-1).gather(-1, whole[0, len(ids) :, None])[:, 0].tolist()
            for logits in (by_itself, by_trainer)
        ]
        alone.append([generated[0, len(ids) :].tolist(), of_tokens[0]])
        ours.append(of_tokens[1])
    return alone, ours


def main() -> None:
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    from tests.videos import make_with_videos

    written, family, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    directory = make_with_videos(written.with_name("model"), family, seed=1)  # no answer of which has a token for media
    found = asyncio.run(answered(directory, name))
    found["expected"], found["scored"] = scored(directory, computed_in(directory, name), found["answers"])
    written.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
