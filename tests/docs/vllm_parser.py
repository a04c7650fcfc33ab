"""vLLM's own parser of a server's command line, for `test_printed_servers.py`: imports vLLM, starts nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """The first argument is a file with a list of command lines, each a list of words. Ends as the parser does."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for words in json.loads(Path(sys.argv[1]).read_text()):
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        sys.stdout.write(f"{parsed.model} {parsed.gpu_memory_utilization}\n")


if __name__ == "__main__":
    main()
