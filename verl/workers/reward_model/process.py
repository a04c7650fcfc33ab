"""The process of one engine: vLLM's server, which ends with the process that started it.

The command `vllm` asks for the version of a package of that name, which builds for CPU do not have; this module of vLLM
takes the same options.
"""

from __future__ import annotations

import os
import runpy

from verl.checkpoint_engine.support.lifetime import end_with


def main() -> None:
    end_with(os.getppid())
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
