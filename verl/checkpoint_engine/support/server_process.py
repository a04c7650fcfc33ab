"""The process of an engine's server: it runs the module of its first argument, and ends with its parent process."""

from __future__ import annotations

import os
import runpy
import sys

from .lifetime import end_with


def main() -> None:
    end_with(os.getppid())
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
