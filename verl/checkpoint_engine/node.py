r"""Run a rollout node for publishers on other hosts: they push weights into its memory for the servers of this host.

    python -m verl.checkpoint_engine.node --key-file sync.key      # makes the key; copy it to the publisher's host
    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \
        --gpu-memory-utilization 0.5 --weight-transfer-config '{"backend": "verl_arena"}'

    WeightPublisher(model, endpoints=["http://10.0.0.7:8000"], nodes=["10.0.0.7:7800"], node_key=Path("sync.key"))

Run it as the user of the servers. It frees the memory of a publisher that is gone; servers keep their weights.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import CheckpointEngineError, ConfigError
from .links.network import reached_at
from .support import envs
from .support.console import log_to_console, say
from .support.package import PACKAGE
from .support.signals import end_when_told

PORT = 7800
PROGRAM = f"python -m {PACKAGE}.node"


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        required=True,
        metavar="F",
        help="what publishers have to know; made if it is not there",
    )
    parser.add_argument(
        "--host", metavar="H", help="address to listen on (default: that of the default route); publishers need it"
    )
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="P", help=f"port to listen on; 0: a free one (default {PORT})"
    )
    return parser


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code. `program`: the name in the help."""
    options = _parser(program).parse_args(arguments)
    try:
        if not 0 <= options.port < 2**16:
            raise ConfigError(f"--port must be from 0 to {2**16 - 1}, not {options.port}")
        host = reached_at(options.host, None)
        from .publisher.node_key import key_in, make_key

        key_file = options.key_file.expanduser()
        made = make_key(key_file)
        key = key_in(key_file)
        say(f"the key is {'made:' if made else 'in'} {key_file}")
        from .publisher import node_server  # torch, which takes seconds

        node_server.logger.setLevel(logging.INFO)  # who comes and goes is all that there is to tell
        asyncio.run(node_server.serve(host, options.port, key, envs.shm_dir()))
    except (CheckpointEngineError, OSError) as exc:
        say(f"error: {exc}")
        return 2
    except KeyboardInterrupt:  # how this is meant to end
        say("stopped")
    return 0


if __name__ == "__main__":
    log_to_console()
    end_when_told()
    sys.exit(main())
