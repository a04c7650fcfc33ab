"""A kept step of a run: weights from its checkpoint, tokens that they generated from its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.checkpoint_engine.support import records
from verl.trainer.config.record import CONFIG_FILE
from verl.trainer.ppo.mismatch_probe import FOLDER
from verl.utils.config import ConfigError

MOST_SAMPLES = 6
INSERTED = -1
"""The version of tokens that no policy generated."""


@dataclass(frozen=True, kw_only=True)
class KeptStep:
    """What `mismatch` compares of a run."""

    model: Path
    engine: str
    """`rollout.name`."""
    sequences: list[tuple[list[int], list[int]]]
    log_probs: list[list[float | None] | None]
    """The run's engine's, of each sequence; None for what no policy generated."""
    trainer_log_probs: list[list[float | None] | None]
    """The run's trainer's with the same weights, of sequences that the probe kept."""
    temperature: float
    top_p: float
    top_k: int
    dtype: str
    exact: bool


def kept_step(run: Path, step: int) -> KeptStep:
    """Raises ConfigError if the run has not kept weights or samples of `step`, with the keys that keep them."""
    if not run.is_dir():
        raise ConfigError(f"{run} is no directory of a run")
    model = run / f"global_step_{step}" / "actor" / "huggingface"
    if not (model / "config.json").is_file() or not list(model.glob("*.safetensors")):
        names = [path.name.removeprefix("global_step_") for path in run.glob("global_step_*")]
        kept = sorted(int(name) for name in names if name.isdigit())
        raise ConfigError(
            f"{model} has no weights; checkpoints: {', '.join(map(str, kept)) or 'none'}. "
            "actor_rollout_ref.actor.checkpoint.save_contents must have hf_model, and trainer.save_freq keep the step"
        )
    rows = _samples(run, step)
    rollout = _rollout(run / CONFIG_FILE)
    return KeptStep(
        model=model,
        engine=str(rollout.get("name", "vllm")),
        sequences=[(row["prompt_ids"], row["response_ids"]) for row in rows],
        log_probs=[_generated(row) for row in rows],
        trainer_log_probs=[
            row.get("trainer_log_probs") if row.get("trainer_version") == step else None for row in rows
        ],
        temperature=float(rollout.get("temperature", 1.0)),
        top_p=float(rollout.get("top_p", 1.0)),
        top_k=int(rollout.get("top_k", -1)),
        dtype=str(rollout.get("dtype", "bfloat16")),
        exact=bool(rollout.get("exact", False)),
    )


def _samples(run: Path, step: int) -> list[Mapping[str, Any]]:
    """Those whose tokens the weights of `step` generated, what `trainer.mismatch_probe_freq` kept first."""
    found: list[Mapping[str, Any]] = []
    files = [path for path in run.glob("*/*.jsonl") if path.stem.isdigit()]
    files.sort(key=lambda path: (path.parent.name != FOLDER, int(path.stem)))
    for path in files:
        if int(path.stem) < step:
            continue
        try:
            rows = records.read(path, "sample")[0]
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{path}: {exc}") from exc
        for row in rows:
            versions = set(row.get("versions") or ()) - {INSERTED}
            whole = versions == {step} and row.get("prompt_ids") and row.get("response_ids")
            if whole and not any(_tokens(row) == _tokens(other) for other in found):
                found.append(row)
        if len(found) >= MOST_SAMPLES:
            break
    if not found:
        raise ConfigError(
            f"{run} has no sample that the weights of step {step} alone generated: trainer.rollout_data_dir below it "
            f"keeps them, mostly in the file of step {step + 1}, and trainer.mismatch_probe_freq the worst one"
        )
    return found[:MOST_SAMPLES]


def _tokens(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row["prompt_ids"], row["response_ids"]


def _generated(row: Mapping[str, Any]) -> list[float | None] | None:
    if not row.get("log_probs"):
        return None
    pairs = zip(row["log_probs"], row["versions"], strict=True)
    return [None if version == INSERTED else log_prob for log_prob, version in pairs]


def _rollout(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        rollout = values["actor_rollout_ref"]["rollout"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as exc:
        raise ConfigError(f"{path} is not the configuration of a run: {exc}") from exc
    return rollout if isinstance(rollout, Mapping) else {}
