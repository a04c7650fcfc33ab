"""Keeps the sequence on whose tokens engine and trainer agree least, for `verl-sync mismatch RUN_DIR --step N`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl.checkpoint_engine.support import records
from verl.protocol import DataProto, tensors_of

FOLDER = "mismatch"


class MismatchProbe:
    """Writes `<output_dir>/mismatch/<step>.jsonl` with the worst sequence of every `frequency`-th version of the
    weights: of those versions `trainer.save_freq` keeps the weights, too.

    The line has the columns of a file of samples, and `trainer_log_probs`, by the weights of `trainer_version`. Costs
    one pass over the log-probs of a batch, on the driver.
    """

    def __init__(self, output_dir: str | Path, frequency: int) -> None:
        """`frequency` below 1: never."""
        self._folder = Path(output_dir) / FOLDER
        self._frequency = frequency

    def keep(self, step: int, batch: DataProto) -> None:
        """Look at a batch with log-probs of both sides. A step that is repeated replaces its file."""
        tensors = tensors_of(batch)
        if self._frequency < 1 or "rollout_versions" not in tensors:
            return
        generated, versions = tensors["response_mask"].bool(), tensors["rollout_versions"]
        newest = torch.where(generated, versions, -1).amax(-1)
        one_version = ((versions == newest[:, None]) | ~generated).all(-1)
        looked_at = one_version & (newest > 0) & (newest % self._frequency == 0)
        if not bool(looked_at.any()):
            return
        differences = (tensors["old_log_probs"].exp() - tensors["rollout_log_probs"].exp()).abs()
        largest = torch.where(generated & looked_at[:, None], differences, -1.0).amax(-1)
        row = _row(batch, int(largest.argmax()))
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{step}.jsonl"
        path.unlink(missing_ok=True)
        records.append(path, [records.encoded({"step": step, "trainer_version": step - 1, **row})])


def _row(batch: DataProto, index: int) -> dict[str, Any]:
    """Without padding. What no policy generated has the version -1, and null for log-probs."""
    tensors = tensors_of(batch)
    attended = tensors["attention_mask"][index].bool()
    of_prompt, of_response = attended.split((tensors["prompts"].shape[1], tensors["responses"].shape[1]))
    generated = tensors["response_mask"][index].bool()[of_response]

    def response(key: str) -> Any:
        return tensors[key][index][of_response]

    def log_probs(key: str) -> list[float | None]:
        pairs = zip(response(key).tolist(), generated.tolist(), strict=True)
        return [value if known else None for value, known in pairs]

    return {
        "uid": batch.non_tensor_batch["uid"][index],
        "prompt_ids": tensors["prompts"][index][of_prompt].tolist(),
        "response_ids": response("responses").tolist(),
        "response_mask": generated.long().tolist(),
        "versions": torch.where(generated, response("rollout_versions"), -1).tolist(),
        "log_probs": log_probs("rollout_log_probs"),
        "trainer_log_probs": log_probs("old_log_probs"),
    }
