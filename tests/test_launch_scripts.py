"""What the launch scripts in `examples` and `recipe` start, without starting it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from verl.trainer import main_ppo
from verl.trainer.ppo import run
from verl.utils.device import any_device
from verl.workers.config import PPOConfig

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.relative_to(ROOT) for folder in ("examples", "recipe") for path in (ROOT / folder).rglob("*.sh"))
TABLE = re.compile(r"^\| .+ \| `(\S+)` \| \[.+\]\(.+\) \|$", re.MULTILINE)
GOALS = [Path("examples", script) for script in TABLE.findall((ROOT / "examples" / "README.md").read_text())]


def command_of(script: Path, directory: Path, *arguments: str, **places: str) -> list[str]:
    """The words with which `script` starts Python. `places` are MODEL, TRAIN and VAL; by default such do not exist."""
    python, words = directory / "python", directory / "words"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {words}\n')
    python.chmod(0o755)
    places = {"MODEL": "/models/a", "TRAIN": "/data/train.parquet", "VAL": "/data/val.parquet"} | places
    subprocess.run([script, *arguments], cwd=ROOT, env=os.environ | places | {"PYTHON": str(python)}, check=True)
    return words.read_text().splitlines()


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in GOALS], ids=str)
def test_a_launch_script_starts_a_run_whose_configuration_is_valid(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dash_m, module, *words = command_of(script, tmp_path, "trainer.seed=7")
    assert dash_m == "-m"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [module, *words])
    monkeypatch.setattr(main_ppo, "end_when_told", lambda: None)
    monkeypatch.setattr(main_ppo, "end_within", lambda *_: None)
    started: list[PPOConfig] = []
    monkeypatch.setattr(run, "train", lambda config, trainer, _starting: started.append(trainer.adapted(config)))
    with any_device():
        importlib.import_module(module).main()

    (config,) = started
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    assert trainer.seed == 7, "what the user says comes last"
    assert config.algorithm.adv_estimator == ("gae" if "ppo_trainer" in script.parts else "grpo")
    assert trainer.device == ("cuda" if "gpu" in script.name else None)
    if "gpu" in script.name:
        assert actor.strategy == ("megatron" if "megatron" in script.name else "fsdp2")
        assert trainer.nnodes == (2 if "multinode" in script.name else 1)


def test_each_of_the_ten_goals_has_a_folder_with_a_script():
    assert len({script.parent for script in GOALS}) == 10
    assert [script for script in GOALS if not (ROOT / script).is_file()] == []


def test_the_first_page_of_the_documents_links_to_the_page_of_each_goal():
    table, index = (ROOT / "examples" / "README.md").read_text(), (ROOT / "docs" / "index.md").read_text()
    pages = re.findall(r"\]\(\.\./docs/(\S+)\) \|$", table, re.MULTILINE)
    assert len(pages) == len(GOALS)
    assert [page for page in pages if f"]({page})" not in index] == []


@pytest.mark.job  # a second each
@pytest.mark.cells(3)
@pytest.mark.parametrize("script", [script for script in GOALS if script.suffix == ".sh"], ids=str)
def test_the_script_of_a_goal_passes_its_check(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A built-in model and built-in data stand in for the user's."""
    model = "builtin:tiny-qwen3-moe" if "moe" in script.name else "builtin:tiny-qwen2"
    places = {"MODEL": model, "TRAIN": "builtin:arithmetic", "VAL": "builtin:arithmetic"}
    _, module, *words = command_of(script, tmp_path, "--check", **places)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [module, *words])
    monkeypatch.setattr(main_ppo, "end_when_told", lambda: None)
    monkeypatch.setattr(main_ppo, "end_within", lambda *_: None)
    with any_device():
        importlib.import_module(module).main()
    printed = capsys.readouterr()
    assert printed.out.endswith("nothing was started\n")
    assert "error" not in printed.err
    strategy = "megatron" if "megatron" in script.name else "fsdp2"
    assert re.search(rf"on {'cuda' if 'gpu' in script.name else 'cpu'}, {strategy}\b", printed.out)
    assert f"({2 if 'multinode' in script.name else 1} x " in printed.out


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "gpu" in script.name], ids=str)
def test_a_launch_script_says_which_path_it_needs(script: Path):
    done = subprocess.run(
        [ROOT / script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "MODEL: a Hugging Face directory" in done.stderr or "TRAIN: a parquet file" in done.stderr


@pytest.mark.parametrize("folder", sorted({script.parent for script in SCRIPTS}), ids=str)
def test_the_readme_beside_launch_scripts_names_all_of_them(folder: Path):
    named = set(re.findall(r"^\| `(\w+\.sh)` \|", (ROOT / folder / "README.md").read_text(), re.MULTILINE))
    assert named == {script.name for script in SCRIPTS if script.parent == folder}
