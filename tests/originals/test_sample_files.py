"""The file of samples of a step against PyPI's verl: where it is, and what its lines call things."""

from __future__ import annotations

import json
from pathlib import Path

from tests.originals.original import VERL, computed, differences
from tests.trainer.ppo.test_samples import write
from verl.trainer.ppo.samples import SampleWriter

NAMES = {"input": "prompt", "output": "response", "gts": "ground_truth", "score": "score", "step": "step"}
"""verl's -> ours."""


def test_samples_have_other_names_in_a_file_of_the_same_name(tmp_path: Path) -> None:
    assert differences()["files of `rollout_data_dir` and `validation_data_dir`"]["why"]
    told = {"acc": [1]}
    given = {"inputs": ["1+1"], "outputs": ["2"], "gts": ["2"], "scores": [0.5], "reward_extra_infos_dict": told}
    name, line = computed("write_samples.py", given, VERL)
    write(SampleWriter(tmp_path), 3, ["a"], extra=told)  # type: ignore[no-untyped-call]
    [ours] = map(json.loads, (tmp_path / name).read_text().splitlines())
    assert line.keys() == {*NAMES, "acc"}
    named = {key: ours[name] for key, name in NAMES.items()} | {"input": ours["prompt"][0]["content"]}
    assert named == {key: line[key] for key in NAMES}
    assert ours["reward"] == {"acc": line["acc"]}
