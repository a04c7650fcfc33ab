"""Compare a family that sees videos with transformers alone, on ranks that find torchvision as this process does.

python -m tests.workers.engine.video_process FAMILY FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.pictures import in_bytes, noise, row
from tests.seeing import as_a_whole
from tests.videos import by_transformers, in_file, in_frames, make_with_videos, scenes
from tests.workers.engine.rank_pool import RankPool
from tests.workers.engine.test_seeing import (
    NUM_RESPONSE,
    PACKED_WHERE_THEY_CAN_BE,
    RECOMPUTED,
    SINGLE,
    TEMPERATURE,
    WHOLE,
    MicroBatchLimits,
    batch_of_rows,
    compare_a_step,
    log_probs,
)
from verl.protocol import DataProto

CLIP = in_frames(scenes(5), rate=8.0)
"""Its steps in time are no further apart than the tokens of a row: see `test_what_follows_a_long_video`."""
MEDIA: list[tuple[str, list[Any], list[Any]]] = [
    ("none", [], []),
    ("<image>?", [noise(1)], []),
    ("<video>?", [], [CLIP]),
    ("<image> and <video> and <image>?", [noise(2, 112, 56), noise(3)], [in_file(scenes(20, 1, 140, 28))]),
    ("<video> or <video>?", [], [in_frames(scenes(4, 2), 8.0), in_frames(scenes(6, 3, 112, 56), 8.0)]),
    ("again <video>, <image>", [noise(1)], [CLIP]),
    ("", [], []),
    ("", [], []),
]
"""Of four ranks the first sees no video, and the last one nothing."""
WAYS: tuple[tuple[int, MicroBatchLimits, dict[str, Any]], ...] = (
    (1, WHOLE, {}),
    (1, WHOLE, {"model": PACKED_WHERE_THEY_CAN_BE}),
    (4, SINGLE, {"model": RECOMPUTED}),
    (4, WHOLE, {"model": PACKED_WHERE_THEY_CAN_BE, "strategy": "fsdp"}),
)


def alone(model: Any, directory: Path, data: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies by transformers: prompts, patches and positions of its own making."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    found, entropies = torch.zeros(len(data), NUM_RESPONSE), torch.zeros(len(data), NUM_RESPONSE)
    for number, (text, images, videos) in enumerate(MEDIA):
        pieces = f"{number}: {text}".replace("<image>", "\0<image>\0").replace("<video>", "\0<video>\0").split("\0")
        parts = [{"type": each[1:-1]} if each.startswith("<") else {"type": "text", "text": each} for each in pieces]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": [part for part in parts if part.get("text") != ""]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        given = by_transformers(directory, prompt, images, videos)
        ids = data.batch["input_ids"][number][data.batch["attention_mask"][number].bool()][None]
        count = int(data.batch["response_mask"][number].sum())
        assert given["input_ids"].tolist() == ids[:, :-count].tolist(), text
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        kinds = given["mm_token_type_ids"]
        given["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, count)], dim=1)
        logits = model(**given).logits[0, -count - 1 : -1] / TEMPERATURE
        distribution = logits.log_softmax(-1)
        found[number, :count] = distribution.gather(-1, ids[0, -count:, None])[:, 0]
        entropies[number, :count] = -(distribution.exp() * distribution).sum(-1)
    return found, entropies


def main() -> None:
    family, folder = sys.argv[1], Path(sys.argv[2])
    model = make_with_videos(folder / "model", family)
    rows = [
        row(f"{number}: {text}", in_bytes(*images), videos=videos)
        for number, (text, images, videos) in enumerate(MEDIA)
    ]
    data = batch_of_rows(rows, model, folder)
    with torch.no_grad():
        whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
        expected = alone(whole, model, data)
    ranks = RankPool(4)
    try:
        for world_size, limits, given in WAYS:
            options = {**given, "model": given.get("model", {}) | as_a_whole(family)}
            results = ranks.run(log_probs, world_size, model, data, limits, options)
            for place in (0, 1):
                found = torch.cat([result[place] for result in results])
                torch.testing.assert_close(found, expected[place], atol=1e-4, rtol=0.0)
            compare_a_step(ranks, model, data, world_size, limits, options, alone=alone)
    finally:
        ranks.close()
    sys.stdout.write(f"{family} is right in {len(WAYS)} ways\n")


if __name__ == "__main__":
    main()
