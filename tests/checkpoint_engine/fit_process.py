"""Asks vLLM whether checkpoints fit a model, without an engine.

    python -m tests.checkpoint_engine.fit_process MODEL CHECKPOINTS

CHECKPOINTS is a JSON file with a list of them (name -> [dtype, shape]). Prints what is refused about each, null for
nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.errors import ActivationError

Checkpoint = dict[str, tuple[str, list[int]]]


def main() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=sys.argv[1], dtype="float32", load_format="dummy", skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()
    with tempfile.NamedTemporaryFile() as store, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store.name}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    answers = [refusal(config, checkpoint) for checkpoint in json.loads(Path(sys.argv[2]).read_text())]
    sys.stdout.write("\n" + json.dumps(answers))


def refusal(config: Any, checkpoint: Checkpoint) -> str | None:
    from verl.checkpoint_engine.engines.vllm.fit import fit_of

    try:
        fit_of(config, checkpoint).require(checkpoint)
    except ActivationError as exc:
        return exc.message
    return None


if __name__ == "__main__":
    main()
