"""What the command lines of all benchmarks have in common: the parser, the folder of results, how they end."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.utils.config import did_you_mean

RESULTS = Path(__file__).parent / "results"


def make_parser(name: str, description: str, files: str = "result.json and plot.png") -> argparse.ArgumentParser:
    """Of `python -m benchmarks.<name>`, whose module has `description` as the first paragraph of its docstring."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description.split("\n\n")[0])
    default = RESULTS / time.strftime(f"{name}-%Y%m%d-%H%M%S")
    parser.add_argument(
        "--output", type=Path, default=default, help=f"folder for {files} (default: benchmarks/results/<time>)"
    )
    return parser


def require_known(parser: argparse.ArgumentParser, option: str, names: Iterable[str], known: Collection[str]) -> None:
    """End with the parser's error for the first of `names` that is not `known`."""
    for name in names:
        if name not in known:
            parser.error(f"{option}: unknown {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")


def run(
    output: Path,
    measure: Callable[[], dict[str, Any]],
    *,
    print_table: Callable[[dict[str, Any]], None],
    draw: Callable[[dict[str, Any], Path], object] | None = None,
    pictures: Sequence[str] = (),
) -> int:
    """Measure, write `result.json` and what `draw` draws (`plot.png`), print the table. The exit code.

    `pictures`: files in `output` that `measure` has drawn.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        result = measure()
    except (CheckpointEngineError, ValueError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    written = ["result.json", *pictures]
    if draw is not None:
        draw(result, output / "plot.png")
        written.append("plot.png")
    print_table(result)
    for name in written:
        print(output / name)
    return 0


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
