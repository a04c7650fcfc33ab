"""`python -m verl_sync.for_verl`: whether verl, started here, takes our rollout adapter, and vLLM our engine."""

from __future__ import annotations

import sys
from importlib import metadata

from ..errors import ConfigError
from . import vllm_plugin
from .registration import ADAPTER, ENGINE, SWITCH, register, require_registered

INSTALL = {"verl": "verl==0.9.1", "verl-sync-engine": "verl_sync_engine-*.whl"}
"""What the adapter was tried with. verl's own ranges exclude the libraries that it runs with here."""


def main() -> int:
    try:
        versions = [f"{name} {metadata.version(name)}" for name in ("verl", "verl-sync-engine")]
    except metadata.PackageNotFoundError as exc:
        sys.stderr.write(f"error: {exc.name} is not installed here: pip install --no-deps {INSTALL[exc.name]}\n")
        return 1
    sys.stdout.write(f"{', '.join(versions)}\n")
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
