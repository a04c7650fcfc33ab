"""Rows with pictures against PyPI's verl: marks become the same parts, with the same pictures, or both refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.originals.original import VERL, computed, differences
from tests.pictures import in_bytes, noise, row, write
from verl.utils.builtin.seeing import make_tiny_seeing_model
from verl.utils.config import ConfigError
from verl.utils.dataset import RLHFDataset
from verl.utils.pictures import Picture, load_processor
from verl.workers.config import DataConfig

ONE, TWO = in_bytes(noise(1)), in_bytes(noise(1), noise(2, 56, 28))
MESSAGES = [{"role": "system", "content": "look"}, {"role": "user", "content": "<image>\na <image>"}]
ROWS = {
    "in front": row("<image>what?", ONE),
    "two": row(" a <image> b<image>", TWO),
    "side by side": row("<image><image>", TWO),
    "several messages": row([*MESSAGES, {"role": "assistant", "content": "no"}], TWO),
    "fewer marks": row("what?", ONE),
    "more marks": row("<image><image>?", ONE),
    "none": row("what?", []),
    "video": row("<video><image>?", ONE),
    "a mark and no pictures": row("<image>what?", []),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seeing_model(tmp_path_factory.mktemp("model"))


def ours(file: Path, model: Path) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    seeing = load_processor(model, AutoConfig.from_pretrained(model))
    try:
        found = RLHFDataset(
            file, AutoTokenizer.from_pretrained(model), DataConfig(max_prompt_length=200), processor=seeing
        )[0]["raw_prompt"]
    except ConfigError as exc:
        return {"error": str(exc)}
    return [
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [{name: _shown(value) for name, value in part.items()} for part in message["content"]],
        }
        for message in found
    ]


def _shown(value: Any) -> Any:
    return value.digest if isinstance(value, Picture) else value


def test_rows_become_the_messages_that_verl_makes_of_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "cache"))
    files = {name: write(tmp_path / f"{number}.parquet", [each]) for number, (name, each) in enumerate(ROWS.items())}
    theirs = computed("see_rows.py", [str(file) for file in files.values()], VERL)
    for (name, file), expected in zip(files.items(), theirs, strict=True):
        found = ours(file, model)
        if name == "a mark and no pictures":
            assert differences()["a mark without a picture"]["why"]
            assert expected == [{"role": "user", "content": "<image>what?"}]
            assert "prompt has 1 places for pictures, and images has 0" in found["error"]
            continue
        assert ("error" in found) == ("error" in expected), (name, found, expected)
        if "error" not in expected:
            assert found == expected, name
