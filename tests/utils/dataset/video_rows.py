"""Read rows with videos as a job does, where torchvision and av are.

    python -m tests.utils.dataset.video_rows FOLDER

Writes a JSON object: `said`, of each of WRONG what the driver says, and `dropped`, the rows that are left where such
rows are dropped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.pictures import encoded, in_bytes, noise, row, write
from tests.seeing import processor_of
from tests.videos import in_file, in_frames, make_with_videos, movie, scenes
from verl.utils.config import ConfigError
from verl.utils.dataset import RLHFDataset
from verl.workers.config import DataConfig

PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:1/x.ts\n#EXT-X-ENDLIST\n"
MKV = movie(scenes(20), "matroska")
WRONG: dict[str, Any] = {
    "half a file": row("<video>?", videos=[{"bytes": movie(scenes(9))[:2000]}]),
    "half of its frames": row("<video>?", videos=[{"bytes": MKV[: len(MKV) // 3], "nframes": 20}]),
    "a playlist": row("<video>?", videos=[{"bytes": PLAYLIST}]),
    "a picture": row("<video>?", videos=[{"bytes": encoded(noise())}]),
    "remote": row("<video>?", videos=[{"video": "https://x/y.mp4"}]),
    "no file": row("<video>?", videos=["/no/such.mp4"]),
    "frames of two sizes": row("<video>?", videos=[in_frames([noise(), noise(1, 28, 28)], 2.0)]),
    "a damaged frame": row("<video>?", videos=[[{"bytes": encoded(noise())}, {"bytes": b"x"}]]),
    "more frames than there are": row("<video>?", videos=[{"bytes": movie(scenes(9)), "nframes": 90}]),
    "more frames than the processor takes": row("<video>?", videos=[in_frames(scenes(1) * 769, 2.0)]),
    "fields": row("<video>?", videos=[{"video": "x.mp4", "total_pixels": 9}]),
    "twice sampled": row("<video>?", videos=[{"video": "x.mp4", "fps": 1, "nframes": 9}]),
    "more marks": row("<video><video>?", videos=[in_file(scenes(9))]),
    "no mark": row("?", videos=[in_file(scenes(9))]),
    "its own token": row("<|video_pad|>?", videos=[]),
}


def main() -> None:
    folder = Path(sys.argv[1])
    model = make_with_videos(folder / "model", "qwen2_5_vl")
    processor, tokenizer = processor_of(model), AutoTokenizer.from_pretrained(model)
    good = row("<video> or <image>?", in_bytes(noise()), videos=[in_file(scenes(9))])

    def read(file: Path, **options: Any) -> RLHFDataset:
        return RLHFDataset(file, tokenizer, DataConfig(max_prompt_length=400, **options), processor)

    said = {}
    for number, (name, wrong) in enumerate(WRONG.items()):
        try:
            read(write(folder / f"{number}.parquet", [wrong]))
            said[name] = ""
        except ConfigError as exc:
            said[name] = str(exc)
    kept = read(write(folder / "both.parquet", [good, WRONG["half a file"]]), filter_overlong_prompts=True)
    sys.stdout.write(json.dumps({"said": said, "dropped": len(kept)}) + "\n")


if __name__ == "__main__":
    main()
