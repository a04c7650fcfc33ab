"""`python -m verl_sync.for_verl`: whether verl, started here, takes our rollout adapter, and vLLM our engine."""

from __future__ import annotations

import sys
from importlib import metadata

from ..errors import ConfigError
from . import vllm_plugin
from .registration import ADAPTER, ENGINE, SWITCH, register, require_registered


def main() -> int:
    sys.stdout.write(f"verl {metadata.version('verl')}, verl-sync-engine {metadata.version('verl-sync-engine')}\n")
    try:
        require_registered()
        register()
        vllm_plugin.register()
    except (ConfigError, ImportError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    sys.stdout.write(f"verl makes {ADAPTER}; vLLM knows the engine {ENGINE}. Turn it on with\n    {SWITCH}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
