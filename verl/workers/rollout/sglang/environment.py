"""Environment variables of processes that run SGLang."""

from __future__ import annotations

TELLS = {"SGLANG_FORCE_STREAM_INTERVAL": "1"}
"""Schedulers tell the server of each token of responses that it does not stream; by default of every fiftieth."""


def environment(device: str) -> dict[str, str]:
    """By `device`, `cpu` or another. They must be set before SGLang is imported."""
    # The engine gets room for a token or two more than the model's context: it ends responses before it is full.
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if device == "cpu":
        # Each of its processes warns of kernels that there are for accelerators only.
        env["PYTHONWARNINGS"] = "ignore::UserWarning"
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    return env
