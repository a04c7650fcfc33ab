"""Serve adapters as tenants: train and sample LoRA adapters of one model with the client `tinker` from PyPI.

    verl-sync serve --model DIR

Each client trains an adapter of its own, with its own gradients and Adam state. Clients point at the server with
TINKER_BASE_URL=http://127.0.0.1:8000 and any TINKER_API_KEY that begins with tml-. Saved versions are below --output:
files of peft, named by their digest. Training runs on this machine's processor, in one thread, with transformers and
peft; vLLM samples beside it, where it can. Ends with Ctrl-C or SIGTERM. Exit code 2: it could not start; 130: ended by
Ctrl-C or SIGTERM. docs/how-to/serve-adapters.md says what is served and what is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint_engine.errors import BackendUnavailable, CheckpointEngineError
from verl.checkpoint_engine.support.console import log_to_console
from verl.utils.config import ConfigError
from verl.workers.rollout.errors import RolloutError

if TYPE_CHECKING:
    from verl.tenants.base import Base
    from verl.tenants.sampler import InProcessSampler, Sampler
    from verl.tenants.worker import Worker

KEY_PREFIX = "tml-"
"""The client refuses keys without it."""
INTERRUPTED = 130
DTYPES = ("float32", "bfloat16")
AUTO, VLLM, TRANSFORMERS = SAMPLERS = ("auto", "vllm", "transformers")

logger = logging.getLogger("verl.tenants.command")  # also where it is the main module


def main(arguments: Sequence[str] | None = None, program: str = "python -m verl.tenants.command") -> int:
    """Serve until told to end; returns the exit code."""
    options = _parser(program).parse_args(arguments)
    try:
        return asyncio.run(_serve(options, _keys(options)))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ConfigError, CheckpointEngineError, RolloutError) as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 2


def _keys(options: argparse.Namespace) -> dict[str, str] | None:
    if options.keys is not None:
        return read_keys(options.keys)
    if not _is_loopback(options.host):
        raise ConfigError(f"--host {options.host}: beyond this machine, --keys FILE is needed")
    return None


def read_keys(path: Path) -> dict[str, str]:
    """Key to owner, of a file with `OWNER KEY` in each line; '#' begins a comment. Raises ConfigError."""
    from verl.tenants.checkpoints import NAME

    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--keys {path}: {exc}") from exc
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not NAME.fullmatch(words[0]) or not words[1].startswith(KEY_PREFIX):
            raise ConfigError(
                f"--keys {path}, line {number}: OWNER KEY is asked, with a key that begins with {KEY_PREFIX}"
            )
        if words[1] in keys:
            raise ConfigError(f"--keys {path}, line {number}: the key is there already")
        keys[words[1]] = words[0]
    if not keys:
        raise ConfigError(f"--keys {path} has no key")
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _serve(options: argparse.Namespace, keys: dict[str, str] | None) -> int:
    import torch
    from aiohttp import web

    from verl.tenants.base import Base, whole_model
    from verl.tenants.checkpoints import Checkpoints
    from verl.tenants.http import application
    from verl.tenants.names import Names
    from verl.tenants.quota import Quota
    from verl.tenants.service import Service, served_names
    from verl.tenants.worker import Worker

    directory = whole_model(options.model)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--output {options.output}: {exc}") from exc
    base = Base(directory, getattr(torch, options.dtype))
    if options.max_context is not None:
        if options.max_context > base.context:
            raise ConfigError(f"--max-context {options.max_context}: the model takes {base.context} tokens")
        base.context = options.max_context
    names = served_names(options.model, options.name)
    checkpoints = Checkpoints(options.output, options.name or str(options.model.resolve()), most=options.max_versions)
    worker = Worker(most_beside=options.max_samples)
    service = Service(
        base,
        await _sampler(options, base, worker),
        checkpoints,
        Names(options.output, checkpoints),
        worker,
        quota=Quota(options.tokens_per_minute),
        names=names,
        max_tenants=options.max_tenants,
        max_rank=options.max_rank,
        alpha=options.lora_alpha,
    )
    runner = web.AppRunner(application(service, keys), access_log=None, shutdown_timeout=1.0)
    try:
        await runner.setup()
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as exc:
            raise ConfigError(f"--host {options.host} --port {options.port}: {exc.strerror}") from exc
        host, port = runner.addresses[0][:2]
        logger.info("serving %s at http://%s:%d (Ctrl-C ends it)", names[0], host, port)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
        service.close()
    return 0


async def _sampler(options: argparse.Namespace, base: Base, worker: Worker) -> Sampler:
    from verl.tenants.sampler import InProcessSampler

    own = InProcessSampler(base, worker)
    if options.sampler == TRANSFORMERS:
        return own
    try:
        return await _vllm(options, base, own)
    except (ConfigError, CheckpointEngineError, RolloutError) as exc:
        if options.sampler == VLLM:
            raise
        logger.warning("transformers samples, in the thread that trains: %s", exc)
        return own


async def _vllm(options: argparse.Namespace, base: Base, own: InProcessSampler) -> Sampler:
    """Raises ConfigError, BackendUnavailable or RolloutError, with the reason, if vLLM cannot sample."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from verl.tenants.vllm_engine import VLLMEngine, why_not, why_not_every
    except ImportError as exc:
        raise BackendUnavailable(
            f"--sampler vllm needs the package 'vllm': pip install 'verl-sync[cpu]' ({exc})"
        ) from exc
    from verl.tenants.engine_sampler import EngineSampler

    why = why_not(base, options.max_rank) or (why_not_every(base) if options.sampler == AUTO else None)
    if why is not None:
        raise ConfigError(f"--sampler vllm: {why}")

    def start() -> VLLMEngine:
        return VLLMEngine(base, slots=options.max_tenants, max_rank=options.max_rank, kv_cache_gib=options.kv_cache_gib)

    sampler = EngineSampler(start, own, base.tokenizer, base.vocabulary)
    await sampler.start()
    return sampler


def _parser(program: str) -> argparse.ArgumentParser:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog=program, description=f"{about}\n\n{rest}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a Hugging Face directory, with its tokenizer"
    )
    parser.add_argument("--name", help="what clients call it as base_model, beside DIR (default: DIR)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=_number(0, 65535), default=8000, help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("adapters"),
        metavar="DIR",
        help="where versions are saved (default: %(default)s)",
    )
    parser.add_argument(
        "--keys", type=Path, metavar="FILE", help="lines of OWNER KEY; an owner sees nothing of the others"
    )
    parser.add_argument(
        "--max-tenants",
        type=_number(1, 10_000),
        default=8,
        metavar="N",
        help="adapters in training at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-samples",
        type=_number(1, 10**6),
        metavar="N",
        help="requests to sample of an owner under way at once; clients send others again (default: no limit)",
    )
    parser.add_argument(
        "--max-versions", type=_number(1, 10**6), metavar="N", help="saved versions of an owner (default: no limit)"
    )
    parser.add_argument(
        "--tokens-per-minute",
        type=_number(1, 10**12),
        metavar="N",
        help="tokens that an owner trains and samples; clients wait for more (default: no limit)",
    )
    parser.add_argument(
        "--max-rank",
        type=_number(1, 10_000),
        default=128,
        metavar="N",
        help="the highest rank of an adapter (default: %(default)s)",
    )
    parser.add_argument(
        "--lora-alpha",
        type=_number(1, 10_000),
        default=32,
        metavar="N",
        help="an adapter counts N / rank times (default: %(default)s)",
    )
    parser.add_argument(
        "--sampler",
        choices=SAMPLERS,
        default=AUTO,
        help="auto: vllm if it can sample with every adapter of the model, else transformers (default: %(default)s)",
    )
    parser.add_argument(
        "--max-context",
        type=_number(2, 2**31),
        metavar="N",
        help="tokens of a sequence (default: what the model takes)",
    )
    parser.add_argument(
        "--kv-cache-gib",
        type=_gibibytes,
        default=1.0,
        metavar="X",
        help="memory of vLLM's cache, for at least one sequence of --max-context (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the base model (default: %(default)s)")
    return parser


def _number(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {low} to {high}")
        return int(text)

    return number


def _gibibytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 2**20:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


if __name__ == "__main__":
    from verl.checkpoint_engine.support.signals import end_when_told

    log_to_console()
    end_when_told()
    sys.exit(main())
