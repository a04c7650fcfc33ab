import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_reward.py"


@pytest.fixture(scope="module")
def plot_reward():
    spec = importlib.util.spec_from_file_location("plot_reward", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_dir(tmp_path):
    records = [
        {"step": 0, "val-core/arithmetic/reward/mean@1": 0.1},
        {"step": 1, "critic/score/mean": 0.2},
        {"step": 2, "critic/score/mean": None},
        {"step": 3, "critic/score/mean": 0.4, "val-core/arithmetic/reward/mean@1": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_curves_hold_training_reward_per_step_and_held_out_reward_where_validated(plot_reward, run_dir):
    from verl.utils.tracking import read_metrics

    training, held_out = plot_reward.curves(read_metrics(run_dir / "metrics.jsonl"))
    assert training == {1: 0.2, 3: 0.4}
    assert held_out == {"arithmetic": {0: 0.1, 3: 0.5}}


def test_a_png_is_drawn_next_to_the_metrics(plot_reward, run_dir, capsys):
    import matplotlib.image

    assert plot_reward.main([str(run_dir)]) == 0
    output = run_dir / "reward.png"
    assert capsys.readouterr().out.strip() == str(output)
    image = matplotlib.image.imread(output)
    assert image.shape[0] > 400
    assert image[..., :3].min() < 0.5  # not an empty sheet


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "metrics.jsonl does not exist; runs write it with trainer.logger="),
        ("", "no reward in 0 records"),
        ("rubbish\n", "line 1: not a record of metrics"),
    ],
)
def test_unusable_metrics_are_a_clear_error(plot_reward, tmp_path, capsys, content, message):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    assert plot_reward.main([str(path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "reward.png").exists()


def test_the_command_line_explains_itself():
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    assert "reward curve" in done.stdout
