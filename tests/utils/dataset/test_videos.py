"""Videos of rows: how columns have them, what is refused by file and row, and how they pass between processes."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import HAS_TORCHVISION, encoded, in_bytes, noise, row, with_torchvision, write
from verl.trainer.plain_state import packed, unpacked
from verl.utils.builtin.seeing import make_tiny_seeing_model
from verl.utils.config import ConfigError
from verl.utils.dataset import RLHFDataset
from verl.utils.pictures import PictureError, Video, frame_limits, keep, keep_video, load_processor
from verl.workers.config import DataConfig

SAID = {
    "half a file": "video 0 is damaged, or none of mov,mp4",
    "half of its frames": "video 0 is damaged: it says that it has 2.0 s, and 0.2 s can be decoded",
    "a playlist": "video 0 is damaged, or none of",
    "a picture": "video 0 is damaged, or none of",
    "remote": "videos[0] is at 'https://x/y.mp4', and nothing is fetched: give the file",
    "no file": "videos[0] is at /no/such.mp4, where there is no file",
    "frames of two sizes": "video 0 has frames of (84, 56) and (28, 28) pixels",
    "a damaged frame": "video 0 has a frame 1 that is damaged, or none of BMP, GIF, JPEG, PNG, WEBP",
    "more frames than there are": "video 0 has 9 frames, which cannot be sampled",
    "more frames than the processor takes": "video 0 has 769 frames, more than the 768 of the processor",
    "fields": "videos[0] has total_pixels, and only video, bytes, path, video_url, fps, nframes",
    "twice sampled": "videos[0] is asked for wrongly: it: give fps, or num_frames, and not both",
    "more marks": "prompt has 2 places for videos, and videos has 1",
    "no mark": "prompt has 0 places for videos, and videos has 1",
    "its own token": "the chat template writes 1 tokens for videos where there are 0",
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.job
@pytest.mark.skipif(not HAS_TORCHVISION, reason="no torchvision: make vision")
def test_a_mistake_names_file_row_and_video_or_its_row_is_dropped(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.utils.dataset.video_rows", str(tmp_path)]
    ended = subprocess.run(program, env=with_torchvision(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert found["said"].keys() == SAID.keys()
    for number, (name, said) in enumerate(found["said"].items()):
        assert said.startswith(f"data.train_files: row 0 of {tmp_path / f'{number}.parquet'}: {SAID[name]}"), said
        assert "\n" not in said
    assert found["dropped"] == 1


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is here")
@pytest.mark.parametrize(
    ("architecture", "said"),
    [("qwen2_5_vl", "torchvision, which is not installed"), ("glm4v", "glm4v is trained with pictures, and not with")],
)
def test_a_model_that_gets_no_videos_refuses_them(tmp_path: Path, architecture: str, said: str) -> None:
    from transformers import AutoConfig, AutoTokenizer

    model = make_tiny_seeing_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(model)
    config.model_type = architecture
    processor = load_processor(model, config)
    assert processor is not None
    processor.model_type = architecture
    file = write(tmp_path / "d.parquet", [row("<video>?", videos=[{"video": in_bytes(noise(), noise(1))}])])
    with pytest.raises(ConfigError, match=f"row 0 of .*d.parquet: videos is not empty: .*{said}"):
        RLHFDataset(file, AutoTokenizer.from_pretrained(model), DataConfig(), processor)


FRAMES = [encoded(noise(number)) for number in range(3)]


@pytest.mark.parametrize(
    "given",
    [
        FRAMES,
        [{"bytes": frame, "path": None} for frame in FRAMES],
        [noise(number) for number in range(3)],
        {"type": "video", "video": [{"bytes": frame} for frame in FRAMES], "fps": None},
        {"video": FRAMES, "sample_fps": 2.0},
    ],
)
def test_frames_are_taken_as_pictures_are(given: Any) -> None:
    video = keep_video(given)
    assert video == keep_video(FRAMES)
    assert [file.digest for file in video.files] == [keep(frame).digest for frame in FRAMES]
    frames = video.open(lambda *_: [])
    assert (frames.pixels.shape, frames.indices, frames.total, frames.rate) == ((3, 56, 84, 3), [0, 1, 2], 3, 2.0)


def test_a_video_asks_for_what_the_run_does_not_say() -> None:
    run = frame_limits({"min_pixels": 9, "fps": 4, "videos_kwargs": {"max_pixels": 99, "fps": 1}})
    assert run == (1, None, 9, 99)
    assert keep_video({"video": FRAMES, "nframes": 2}).limited(run).limits == (None, 2, 9, 99)
    assert keep_video({"video": FRAMES}).limited(run).limits == run


@pytest.mark.parametrize("given", [{"fps": 0}, {"num_frames": 1.5}, {"fps": True}, {"fps": 1, "num_frames": 2}])
def test_wrong_numbers_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="data.mm_processor_kwargs"):
        frame_limits(given)
    with pytest.raises(PictureError, match="is asked for wrongly"):
        keep_video({"video": FRAMES} | given)


def test_videos_pass_to_processes_and_checkpoints_without_their_pixels() -> None:
    video = keep_video({"video": FRAMES, "sample_fps": 8.0}).limited(frame_limits({"max_pixels": 99}))
    assert isinstance(video, Video)
    assert unpacked(packed([video])) == [video]
    assert len(pickle.dumps(video)) < 2_000
    assert len({video.key, keep_video(FRAMES).key, keep_video(FRAMES[:2]).key, keep_video(FRAMES[::-1]).key}) == 4


@pytest.mark.skipif(find_spec("av") is not None, reason="PyAV is here")
def test_a_file_without_its_decoder_is_refused_with_what_to_install() -> None:
    with pytest.raises(PictureError, match=r"PyAV reads video files: pip install 'verl-sync\[video\]'"):
        keep_video(b"\0\0\0\x20ftypisom").open(lambda *_: [])
