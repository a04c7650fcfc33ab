"""Exact mode: whether engine and trainer agree bit for bit on every step of whole runs, and what that costs.

    python -m benchmarks.exact

Each case trains a family's tiny model in a command of its own. `default` and `exact` are the same job without and with
`rollout.exact`, and are compared in seconds and rewards; the other cases have what is most likely to break the
agreement. A run that is complete in `--output` is not repeated, so that cases may be added one by one.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.command import conduct, parse, progress
from benchmarks.modes import MODES, run
from benchmarks.report import Panel, Report, table, target, verdict
from verl.utils.builtin import builtin_model, make_tiny_model
from verl.utils.builtin.arithmetic import ArithmeticRecipe, problems, question, rows
from verl.utils.builtin.warmup import TinyQwen2Recipe
from verl.utils.config import ConfigError, option
from verl.utils.tracking import METRICS_FILE, read_metrics

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
BUILTIN = {"qwen2": "builtin:tiny-qwen2", "qwen3_moe": "builtin:tiny-qwen3-moe"}
"""Those that have learned to add; the others have random weights."""
COST_TARGET = 1.3
BLOCK = 128
"""Tokens of a block of vLLM's cache on CPUs. A prefix is shared from one block on."""
LONGEST_PROMPT, LONG_RESPONSE = 210, 40
PREEMPTING_GIB = 6 * BLOCK / 2**20
"""Room for six blocks of these models, 1 KiB for each token. A step has eight requests, which grow to two blocks."""
SMOOTHED = 5
"""Steps of which the curve of rewards shows the mean."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a family is trained."""

    mode: str = "hybrid"
    ranks: int = 2
    exact: bool = True
    long: bool = False
    """Prompts of up to `LONGEST_PROMPT` tokens that share their beginnings."""
    overrides: tuple[str, ...] = ()
    what: str = ""

    def arguments(self) -> list[str]:
        return [
            f"trainer.n_gpus_per_node={self.ranks}",
            f"actor_rollout_ref.rollout.exact={str(self.exact).lower()}",
            *self.overrides,
        ]


KEPT = (
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
)
CASES = {
    "default": Case(exact=False, what="hybrid, two ranks, without exact mode"),
    "exact": Case(what="hybrid, two ranks, packed rows"),
    "preempted": Case(
        ranks=1,
        long=True,
        overrides=(
            f"actor_rollout_ref.rollout.cpu_kvcache_gib={PREEMPTING_GIB}",
            "actor_rollout_ref.rollout.max_num_batched_tokens=1",  # as few as a prompt has
            "actor_rollout_ref.rollout.temperature=0.7",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        ),
        what="hybrid, one rank, prompts in chunks, a cache too small for all, temperature 0.7, micro-batches of 3",
    ),
    "greedy": Case(
        ranks=1,
        long=True,
        overrides=(
            "actor_rollout_ref.rollout.do_sample=false",
            "actor_rollout_ref.rollout.max_num_batched_tokens=1",
        ),
        what="hybrid, one rank, greedy, prompts in chunks",
    ),
    "one_step_off": Case(
        mode="one_step_off_policy",
        long=True,
        overrides=(
            "actor_rollout_ref.rollout.max_num_seqs=7",
            "actor_rollout_ref.rollout.enable_chunked_prefill=false",
            "actor_rollout_ref.model.use_remove_padding=false",
            *KEPT,
        ),
        what="one step off, two ranks, 7 requests at a time, no chunks, padded rows",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    families: list[str] = option(list(FAMILIES), "models to train", choices=FAMILIES)
    cases: list[str] = option(list(CASES), "what to run", choices=tuple(CASES))
    steps: int = option(30, "trainer steps of a run", least=2)
    warm_up: int = option(5, "first steps, whose seconds do not count", least=0)
    prompts: int = option(16, "prompts per step; an eighth of them where they are long", least=8)
    responses: int = option(8, "responses per prompt; half of them where prompts are long", least=2)
    timeout_s: float = option(900.0, "of one run", above=0)
    overrides: list[str] = option([], "key=value words for all runs; they come before --families")

    def __post_init__(self) -> None:
        if self.warm_up >= self.steps:
            raise ConfigError(f"--steps {self.steps} leaves none after --warm-up {self.warm_up}")

    def arguments(self, case: Case, model: Path, data: Path, output: Path) -> list[str]:
        prompts, responses = (self.prompts // 8, self.responses // 2) if case.long else (self.prompts, self.responses)
        of_prompts = (
            f"data.train_files={data}",
            f"data.max_prompt_length={LONGEST_PROMPT}",
            f"data.max_response_length={LONG_RESPONSE}",
            "actor_rollout_ref.rollout.ignore_eos=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01",  # no answer is right
        )
        return [
            f"trainer.default_local_dir={output}",
            f"trainer.rollout_data_dir={output / 'samples'}",
            f"trainer.total_training_steps={self.steps}",
            "trainer.device=cpu",
            "trainer.logger=[console,jsonl]",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.resume_mode=disable",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.optim.lr=2e-4",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            "actor_rollout_ref.rollout.name=vllm",
            f"actor_rollout_ref.rollout.n={responses}",
            f"data.train_batch_size={prompts}",
            "data.val_files=builtin:arithmetic",
            "data.val_max_samples=8",  # after the last step
            *(of_prompts if case.long else ("data.train_files=builtin:arithmetic", "data.max_response_length=8")),
            "algorithm.adv_estimator=grpo",
            *case.arguments(),
            *self.overrides,
        ]


# -- models and data --------------------------------------------------------------------------------------------------


def model_of(family: str, folder: Path) -> Path:
    """The built-in model of a family, or one of the same shapes with random weights below `folder`."""
    if family in BUILTIN:
        return builtin_model(BUILTIN[family])
    recipe = TinyQwen2Recipe()
    return make_tiny_model(
        folder / family,
        family,
        tie_word_embeddings=True,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        layers=recipe.layers,
        heads=recipe.heads,
        kv_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_position_embeddings,
    )


def make_long_prompts(path: Path) -> None:
    """Additions with solved ones before them, from the same text on: many prompts share their first block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    recipe, chooser = ArithmeticRecipe(), random.Random(0)
    solved = "".join(f"{question(left, right)}{left + right};" for left, right in problems(recipe, "test"))
    made = rows(recipe, "train")
    for row in made:
        asked = row["prompt"][0]
        asked["content"] = solved[: chooser.randrange(60, LONGEST_PROMPT - 10)] + asked["content"]
    pq.write_table(pa.Table.from_pylist(made), path)


# -- what is measured -------------------------------------------------------------------------------------------------


def measure(settings: Settings, output: Path) -> dict[str, Any]:
    """Run what is not complete in `output`; everything that the JSON file holds."""
    data = output / "long.parquet"
    make_long_prompts(data)
    measured: dict[str, dict[str, Any]] = {}
    for family in settings.families:
        model = model_of(family, output / "models")
        measured[family] = {}
        for name in settings.cases:
            case, directory = CASES[name], output / f"{family}-{name}"
            if not _complete(directory, settings.steps):
                arguments = settings.arguments(case, model, data, directory)
                run(f"{family}, {name}", MODES[case.mode], arguments, settings.timeout_s)
            found = _analyse(directory, settings.warm_up)
            if case.mode != "hybrid":
                progress(f"{family}, {name}: scoring again")
                found |= scored_again(directory, model)
            measured[family][name] = found
    return {"measured": measured, "targets": _targets(measured)}


def _complete(directory: Path, steps: int) -> bool:
    path = directory / METRICS_FILE
    return path.exists() and max((record["step"] for record in read_metrics(path)), default=0) >= steps


def _analyse(directory: Path, warm_up: int) -> dict[str, Any]:
    records = [record for record in read_metrics(directory / METRICS_FILE) if record["step"]]
    counted = [record for record in records if record["step"] > warm_up]

    def seconds(name: str) -> float:
        return float(median(record[f"timing_s/{name}"] for record in counted))

    return {
        "steps": len(records),
        "tokens": sum(_length(row) for row in _samples(directory)),
        "diff_max": [record["training/rollout_probs_diff_max"] for record in records],
        "diff_mean": [record["training/rollout_probs_diff_mean"] for record in records],
        "ppo_kl": [record["actor/ppo_kl"] for record in records],
        "grad_norm": [record["actor/grad_norm"] for record in records],
        "rewards": [record["critic/score/mean"] for record in records],
        "fastest_s": min(record["timing_s/step"] for record in counted),
        **{f"{name}_s": seconds(name) for name in ("step", "gen", "old_log_prob", "update_actor")},
    }


def _samples(directory: Path) -> list[dict[str, Any]]:
    paths = sorted((directory / "samples").glob("*.jsonl"), key=lambda path: int(path.stem))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def _length(row: dict[str, Any]) -> int:
    return len(row["response_ids"])


def scored_again(directory: Path, model: Path) -> dict[str, Any]:
    """How many log-probs of the engine differ from those of the weights that generated them, read from checkpoints.

    transformers' model of a checkpoint scores each sequence by itself, as a trainer in exact mode does.
    """
    import torch

    from verl.mismatch.places import LOGITS
    from verl.mismatch.trainer import TrainersModel
    from verl.utils.torch_functional import logprobs_from_logits

    by_version = defaultdict(list)
    for row in _samples(directory):
        (version,) = set(row["versions"])
        by_version[version].append(row)
    tokens, differing = 0, 0
    for version, of_version in by_version.items():
        weights = directory / f"global_step_{version}" / "actor" / "huggingface" if version else model
        trainer = TrainersModel(weights, "bfloat16", exact=True)
        for row in of_version:
            whole = [*row["prompt_ids"], *row["response_ids"]]
            logits = trainer.run(whole)[LOGITS][len(row["prompt_ids"]) - 1 : -1]
            ours = logprobs_from_logits(logits, torch.tensor(row["response_ids"]))
            differing += int((ours != torch.tensor(row["log_probs"])).sum())
            tokens += _length(row)
    return {"versions": len(by_version), "scored_again": tokens, "scored_differently": differing}


def _targets(measured: dict[str, Any]) -> dict[str, Any]:
    """Of each family of which both jobs were run."""
    both = {family: found for family, found in measured.items() if {"default", "exact"} <= found.keys()}
    return {family: target(_ratio(found), COST_TARGET, "at most") for family, found in both.items()}


def _ratio(found: dict[str, Any], of: str = "step_s") -> float:
    return float(found["exact"][of] / found["default"][of])


# -- what is reported -------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> Report:
    """Seconds of a step without and with exact mode, whether anything differed, and rewards."""
    measured, settings = result["measured"], result["settings"]
    jobs = [
        {
            "family": f"`{family}`",
            "case": name,
            "ratio": _ratio(found) if name == "exact" and "default" in found else None,
            "of_fastest": _ratio(found, "fastest_s") if name == "exact" and "default" in found else None,
            "diff": fmean(found[name]["diff_mean"]),
            "most": max(found[name]["diff_max"]),
            **found[name],
        }
        for family, found in measured.items()
        for name in ("default", "exact")
        if name in found
    ]
    title = (
        f"{settings['steps']} steps of {settings['prompts']} prompts with {settings['responses']} responses, medians "
        f"after the first {settings['warm_up']}"
    )
    columns = {
        "family": "{family}",
        "": "{case}",
        "step, s": "{step_s:.3f}",
        "ratio": "{ratio:.2f}",
        "fastest step, s": "{fastest_s:.3f}",
        "ratio of these": "{of_fastest:.2f}",
        "generation, s": "{gen_s:.3f}",
        "log-probs, s": "{old_log_prob_s:.3f}",
        "update, s": "{update_actor_s:.3f}",
        "`rollout_probs_diff_mean`": "{diff:.5f}",
        "largest `rollout_probs_diff_max`": "{most:.5f}",
    }
    proofs = [
        _proof(family, name, found[name]) for family, found in measured.items() for name in found if CASES[name].exact
    ]
    curves = {
        name: _smoothed(found[name]["rewards"])
        for found in list(measured.values())[:1]
        for name in ("default", "exact")
        if name in found
    }
    parts = [table(title, columns, jobs)] if jobs else []
    if proofs:
        parts.append(table("", {key: f"{{{key}}}" for key in proofs[0]}, proofs))
    parts += [
        verdict(f"{family}: step in exact mode / default", "{:.2f}", row) for family, row in result["targets"].items()
    ]
    panels = [Panel(kind="lines", series=curves, x="step", y=f"reward, mean of {SMOOTHED} steps")] if curves else []
    return Report(parts, panels, title=f"{next(iter(measured), '')}: rewards")


def _proof(family: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A row: what differed in a run."""
    again = found.get("scored_again")
    if again is None:
        compared, differing = f"{found['tokens']}", f"{sum(each != 0 for each in found['diff_max'])} steps"
        kl = max(map(abs, found["ppo_kl"]))
    else:  # later batches are one version old
        compared, differing = f"{again}", f"{found['scored_differently']} tokens"
        kl = abs(found["ppo_kl"][0])
    return {
        "family": f"`{family}`",
        "run": CASES[name].what,
        "steps": f"{found['steps']}",
        "tokens": compared,
        "differing": differing,
        "largest `ppo_kl`": f"{kl:g}",
        "smallest `grad_norm`": f"{min(found['grad_norm']):.2g}",
    }


def _smoothed(rewards: list[float]) -> list[tuple[int, float]]:
    return [(step, fmean(rewards[max(0, step - SMOOTHED) : step])) for step in range(1, len(rewards) + 1)]


def main(arguments: list[str] | None = None) -> int:
    files = "result.json, tables.md, plot.png and the runs"
    settings, output = parse("exact", __doc__, Settings, arguments, files=files)
    return conduct("exact", settings, output, lambda: measure(settings, output), report)


if __name__ == "__main__":
    sys.exit(main())
