"""Serve adapters as tenants: train and sample LoRA adapters of one model with the client `tinker` from PyPI.

    verl-sync serve --model DIR

Each client trains an adapter of its own, with its own gradients and Adam state. Clients point at the server with
TINKER_BASE_URL=http://127.0.0.1:8000 and any TINKER_API_KEY that begins with tml-. Saved versions are below --output:
files of peft, named by their digest. Training and sampling both run on this machine's processor, in one thread, with
transformers and peft; vLLM does not sample here yet. Ends with Ctrl-C or SIGTERM. Exit code 2: it could not start;
130: ended by Ctrl-C or SIGTERM. docs/how-to/serve-adapters.md says what is served and what is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.support.console import log_to_console
from verl.utils.config import ConfigError

KEY_PREFIX = "tml-"
"""The client refuses keys without it."""
INTERRUPTED = 130
DTYPES = ("float32", "bfloat16")

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None, program: str = "python -m verl.tenants.command") -> int:
    """Serve until told to end; returns the exit code."""
    options = _parser(program).parse_args(arguments)
    try:
        return asyncio.run(_serve(options, _keys(options)))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ConfigError, CheckpointEngineError) as exc:
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
        lines = path.read_text().splitlines()
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

    from verl.tenants.base import Base
    from verl.tenants.checkpoints import Checkpoints
    from verl.tenants.http import application
    from verl.tenants.sampler import InProcessSampler
    from verl.tenants.service import Service, served_names

    if not (options.model / "config.json").is_file():
        raise ConfigError(f"--model {options.model} is no directory of a Hugging Face model: it has no config.json")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--output {options.output}: {exc}") from exc
    base = Base(options.model.resolve(), getattr(torch, options.dtype))
    names = served_names(options.model, options.name)
    service = Service(
        base,
        InProcessSampler(base),
        Checkpoints(options.output, options.name or str(options.model.resolve())),
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
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the base model (default: %(default)s)")
    return parser


def _number(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {low} to {high}")
        return int(text)

    return number


if __name__ == "__main__":
    from verl.checkpoint_engine.support.signals import end_when_told

    log_to_console()
    end_when_told()
    sys.exit(main())
