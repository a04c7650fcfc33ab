import hashlib
import multiprocessing

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.utils.builtin.one_build import Recipe, make_once
from verl.utils.builtin import builtin_data, builtin_model
from verl.utils.builtin.arithmetic import ArithmeticRecipe, make_arithmetic
from verl.utils.builtin.cache import cached_directory
from verl.utils.builtin.warmup import TinyQwen2Recipe, TinyQwen3MoeRecipe, make_warm_model
from verl.utils.config import ConfigError
from verl.utils.reward_score import default_compute_score


def test_the_built_in_data_have_verls_schema_and_disjoint_splits(builtin_files):
    rows = {split: pq.read_table(path).to_pylist() for split, path in builtin_files.items()}
    questions = {split: {row["prompt"][0]["content"] for row in rows[split]} for split in rows}
    assert len(questions["test"]) == len(rows["test"]) == 256
    assert not questions["train"] & questions["test"]
    for split, split_rows in rows.items():
        row = split_rows[5]
        left, right = row["prompt"][0]["content"].rstrip("=").split("+")
        assert row == {
            "data_source": "builtin/arithmetic",
            "prompt": [{"role": "user", "content": f"{left}+{right}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(int(left) + int(right))},
            "extra_info": {"split": split, "index": 5},
        }


def test_the_same_recipe_gives_the_same_data(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_arithmetic(tmp_path / name, ArithmeticRecipe())
    assert (tmp_path / "a/train.parquet").read_bytes() == (tmp_path / "b/train.parquet").read_bytes()


@pytest.mark.parametrize("kind", [TinyQwen2Recipe, TinyQwen3MoeRecipe])
def test_the_same_recipe_gives_the_same_model(tmp_path, kind):
    recipe = kind(max_adding_steps=2, habit_steps=1)
    digests = set()
    for name in ("a", "b"):
        make_warm_model(tmp_path / name, recipe)
        torch.manual_seed(99)  # the second build starts from another global state
        digests.add(hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_warm_up_leaves_the_callers_threads_and_random_state_alone(tmp_path):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    make_warm_model(tmp_path / "model", TinyQwen2Recipe(max_adding_steps=1, habit_steps=0))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_the_built_in_model_answers_some_held_out_problems_and_leaves_room(builtin_model_dir, builtin_files):
    model = AutoModelForCausalLM.from_pretrained(builtin_model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_dir)
    rows = pq.read_table(builtin_files["test"]).to_pylist()
    inputs = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    torch.manual_seed(0)
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        output = model.generate(**inputs, max_new_tokens=8, **sampling)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = [
            default_compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
            for row, text in zip(rows, texts, strict=True)
        ]
        assert 0.2 < sum(scores) / len(scores) < 0.6
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 4e6


def test_names_that_are_not_built_in_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'builtin:tiny-qwen2'"):
        builtin_model("builtin:tiny-qwen3")
    with pytest.raises(ConfigError, match="Did you mean 'builtin:arithmetic'"):
        builtin_data("builtin:arithmetics", "train")


def test_a_failed_build_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path))

    def fails(directory):
        (directory / "half").write_text("x")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        cached_directory("thing", Recipe(), fails)
    made = cached_directory("thing", Recipe(), lambda directory: (directory / "whole").write_text("x"))
    assert [path.name for path in made.iterdir()] == ["whole"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [made]


def test_another_recipe_is_another_directory_and_the_same_is_not_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path))
    built = []
    directories = [
        cached_directory("thing", Recipe(value=value), lambda directory: built.append(directory)) for value in (1, 1, 2)
    ]
    assert directories[0] == directories[1] != directories[2]
    assert len(built) == 2


def test_processes_that_start_at_once_share_one_build(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=make_once, args=(str(tmp_path), results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    builders = {results.get(timeout=300) for _ in workers}
    for worker in workers:
        worker.join(10)
    assert len(builders) == 1


def test_a_cache_that_cannot_be_made_names_the_variable_that_moves_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="VERL_CACHE_DIR"):
        cached_directory("thing", Recipe(), lambda directory: None)
