"""vLLM 0.32: its registry of models."""

from __future__ import annotations

from typing import Any


def inspect_models_here() -> None:
    """Have vLLM look at a model's class in this process. It starts another one, with 6 s of imports, so that none of
    them takes a CUDA device before the engine forks."""
    from vllm.model_executor.models import registry

    private: Any = registry
    if hasattr(private, "_run_in_subprocess"):
        private._run_in_subprocess = lambda look: look()
