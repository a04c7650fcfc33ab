"""What the command lines of all benchmarks have in common: their options, the folder of results, how they end."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
import typing
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.machine import describe_machine
from benchmarks.report import Report
from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.utils.config import ConfigError, choose_from, field_types

RESULTS = Path(__file__).parent / "results"
Settings = TypeVar("Settings")
Measured = dict[str, Any]


def parse(
    name: str,
    description: str | None,
    settings: type[Settings],
    arguments: Sequence[str] | None,
    *,
    files: str | None = "result.json, tables.md and plot.png",
) -> tuple[Settings, Path]:
    """The command line of `python -m benchmarks.<name>`: its settings and the folder for its `files`.

    `settings` is a dataclass of `option` fields (`verl.utils.config`), each an option of the command; lists take any
    number of values, and a field `overrides` takes the words that belong to no option. Ends with the parser's error for
    a value outside a field's choices or bounds, or one that the class refuses with ConfigError.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(description or "").split("\n\n")[0]
    )
    if files:
        default = RESULTS / time.strftime(f"{name}-%Y%m%d-%H%M%S")
        text = f"folder for {files} (default: benchmarks/results/<time>)"
        parser.add_argument("--output", type=Path, default=default, help=text)
    fields = dataclasses.fields(typing.cast("Any", settings))
    for field in fields:
        hint = field_types(typing.cast("Any", settings))[field.name]
        factory = field.default_factory
        shown: Any = {"default": field.default if factory is dataclasses.MISSING else factory()}
        if typing.get_origin(hint) is list:
            shown["nargs"] = "*"
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
        text = field.metadata["help"] + ("" if field.name == "overrides" else " (default: %(default)s)")
        parser.add_argument(_flag(field.name), type=kinds[0], help=text, **shown)
    values = vars(parser.parse_args(arguments))
    output = values.pop("output", RESULTS)
    for field in fields:
        given = values[field.name]
        for value in given if isinstance(given, list) else [given]:
            choices, bounds = field.metadata["choices"], field.metadata["bounds"]
            if choices and value not in choices:
                parser.error(f"{_flag(field.name)}: unknown {value!r}.{choose_from(value, choices)}")
            if isinstance(value, (int, float)) and value not in bounds:
                parser.error(f"{_flag(field.name)} must be {str(bounds) or 'finite'}, not {value:g}")
    try:
        return settings(**values), output
    except ConfigError as exc:
        parser.error(str(exc))


def _flag(name: str) -> str:
    return name if name == "overrides" else f"--{name.replace('_', '-')}"


def conduct(
    name: str,
    settings: Any,
    output: Path,
    measure: Callable[[], Measured | Coroutine[Any, Any, Measured]],
    report: Callable[[Measured], Report],
) -> int:
    """Measure, write `result.json` and the report, and print it. The exit code.

    To what `measure` finds are added the settings, unless it says others, and the machine.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        machine = describe_machine()
        found = measure()
        measured = found if isinstance(found, dict) else asyncio.run(found)
    except (CheckpointEngineError, ValueError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    machine["load_average_1min_at_the_end"] = os.getloadavg()[0]
    result = {"benchmark": name, "settings": dataclasses.asdict(settings), "machine": machine, **measured}
    (output / "result.json").write_text(json.dumps(result, indent=2, default=str) + "\n")
    written = report(result)
    before, after = machine["load_average_1min"], machine["load_average_1min_at_the_end"]
    where = f"{machine['processor']}, {machine['cores']} cores, load {before:.1f} before, {after:.1f} after"
    names = ["result.json", *written.write(output, where)]
    print(written.text(where))
    print("\n".join(str(output / name) for name in names))
    return 0


def program(
    name: str,
    description: str | None,
    settings: type[Settings],
    measure: Callable[[Settings], Measured | Coroutine[Any, Any, Measured]],
    report: Callable[[Measured], Report],
    *,
    plots: bool = True,
    threads: int | None = None,
) -> Callable[..., int]:
    """The `main` of `benchmarks.<name>`, of the words of its command line. `threads` are torch's, if it sets them."""

    def main(arguments: Sequence[str] | None = None) -> int:
        files = "result.json, tables.md and plot.png" if plots else "result.json and tables.md"
        chosen, output = parse(name, description, settings, arguments, files=files)
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        return conduct(name, chosen, output, lambda: measure(chosen), report)

    return main


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
