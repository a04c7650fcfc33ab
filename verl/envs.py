"""Every environment variable that the project reads, with its default. Nothing else reads os.environ.

Those of the checkpoint engine are in `verl/checkpoint_engine/support/envs.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir() -> Path:
    """`VERL_CACHE_DIR`: the directory of built-in models and data. Default `~/.cache/verl-sync`."""
    return Path(os.environ.get("VERL_CACHE_DIR", "~/.cache/verl-sync")).expanduser()


def files_for() -> str:
    """`VERL_FILES_FOR`: who may read what this process writes, as `trainer.files_for` says. Default `user`."""
    return os.environ.get("VERL_FILES_FOR", "user")


def ray_address() -> str:
    """`RAY_ADDRESS`: the Ray that a run joins without `ray_kwargs.ray_init.address`. Default: none."""
    return os.environ.get("RAY_ADDRESS", "")


def ray_tmpdir() -> str:
    """`RAY_TMPDIR`: below it a Ray that a run starts has its sockets and logs. Default: below `TMPDIR`, or below `/tmp`
    if `TMPDIR` is too long for sockets."""
    return os.environ.get("RAY_TMPDIR", "")


def shows_tracebacks() -> bool:
    """`VERL_TRACEBACK=1`: errors in users' code have their traceback. Default: one line."""
    return os.environ.get("VERL_TRACEBACK", "") not in ("", "0")


def supervised_since() -> float | None:
    """`VERL_SUPERVISED_SINCE`, which `--supervised` sets for a driver that it starts again: when the command began, in
    seconds since 1970. What the output directory got since then is this job's."""
    since = os.environ.get("VERL_SUPERVISED_SINCE")
    return float(since) if since else None


def raylet_pid() -> int | None:
    """`RAY_RAYLET_PID`, which Ray sets in its workers: the process that manages Ray's workers on this machine."""
    pid = os.environ.get("RAY_RAYLET_PID")
    return int(pid) if pid else None


def vllm_logging_level(default: str) -> str:
    """`VLLM_LOGGING_LEVEL`, passed on to vLLM's processes."""
    return os.environ.get("VLLM_LOGGING_LEVEL", default)


def otlp_endpoint() -> str:
    """`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT`: where OpenTelemetry's SDK sends spans."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((value for name in names if (value := os.environ.get(name))), "")


def of_a_program(variables: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a program that this process starts, with `variables`."""
    return {**os.environ, **variables}


def reach_without_proxy(host: str) -> None:
    """Add `host` to `NO_PROXY` and `no_proxy`, for the HTTP clients of this process and of programs that it starts."""
    names = ("NO_PROXY", "no_proxy")
    known = next((value for name in names if (value := os.environ.get(name))), "")
    for name in names:
        hosts = os.environ.get(name) or known
        if host not in hosts.split(","):
            os.environ[name] = f"{hosts},{host}" if hosts else host
