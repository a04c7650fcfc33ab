"""Data files in verl's schema from the files of public data sets, which nothing here downloads.

    python -m verl.utils.data prepare gsm8k --from train.parquet --to data/gsm8k/train.parquet
    python -m verl.utils.data prepare math --from test.jsonl --split test --to data/math/test.parquet
    python -m verl.utils.data prepare geo3k --from train.parquet --to data/geo3k/train.parquet
    python -m verl.utils.data prepare verifiers --environment NAME --to data/NAME
    python -m verl.utils.data prepare nemo_gym --from train.jsonl --to data/NAME/train.parquet

`gsm8k` reads the columns question and answer, of which the truth is the number after the last `####`; `math` reads
problem and solution, of which it is what the last `\\boxed{...}` holds; `geo3k` reads problem, answer and images.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.utils.config import ConfigError
from verl.utils.dataset.files import Rows
from verl.utils.dataset.seen import MARK
from verl.utils.environments.nemo_gym import nemo_gym_samples
from verl.utils.environments.samples import ENTRY_FILE, entry, environment_samples
from verl.utils.environments.source import Source
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.gsm8k import extract_solution
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

SUFFIXES = (".parquet", ".jsonl")
ENOUGH = 1.0
"""The least score of a right answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the rows of one data set become samples."""

    data_source: str
    """The source, which selects the rule that scores responses."""
    question: str
    solution: str
    """Like `question`, the name of a column."""
    instruction: str
    """The text after every question, with the form of answers that the rule expects."""
    truth: Callable[[str], str | None]
    """Returns the answer in a solution, or None."""
    form: str
    """The form that a solution without an answer lacks, for the error."""
    response: str = "{}"
    """A right response, with the solution in the place of the braces."""
    pictures: str | None = None
    """The column of those that a question's `<image>` marks stand for, in their order."""


def number_at_the_end(solution: str) -> str | None:
    """The number at the end of GSM8K's own solutions; some have spaces or a currency there, and a further line."""
    before, mark, last = solution.rpartition("####")
    line = last.strip().splitlines()[0] if mark and last.strip() else ""
    return extract_solution(f"{before}#### {line.strip().lstrip('$')}") if line else None


def what_is_boxed(solution: str) -> str | None:
    box = last_boxed_only_string(solution)
    return None if box is None or box.startswith("\\fbox") else remove_boxed(box)


RECIPES = {
    "gsm8k": Recipe(
        data_source="openai/gsm8k",
        question="question",
        solution="answer",
        instruction="Reason step by step, then give the final number on a line of its own that begins with ####.",
        truth=number_at_the_end,
        form="number after ####",
    ),
    "math": Recipe(
        data_source="DigitalLearningGmbH/MATH-lighteval",
        question="problem",
        solution="solution",
        instruction="Reason step by step, then give the final answer inside \\boxed{}.",
        truth=what_is_boxed,
        form="\\boxed{...}",
    ),
    "geo3k": Recipe(
        data_source="hiyouga/geometry3k",
        question="problem",
        solution="answer",
        instruction="Reason step by step within <think> </think> tags, then give the final answer inside \\boxed{}.",
        truth=str.strip,
        form="text",
        response="<think></think>\\boxed{{}}",
        pictures="images",
    ),
}


def prepared(recipe: Recipe, rows: Rows, split: str, instruction: str | None = None) -> list[dict[str, Any]]:
    """Samples in verl's schema. Raises ConfigError, naming the first row, for rows without a question or an answer."""
    asked = recipe.instruction if instruction is None else instruction
    samples: list[dict[str, Any]] = []
    wrong: list[str] = []
    for index, row in enumerate(rows.read(0, len(rows))):
        question, solution = row[recipe.question], row[recipe.solution]
        if problem := _problem(recipe, question, solution) or _miscounted(recipe, row):
            wrong.append(f"{rows.place(index)}: {problem}")
            continue
        samples.append(
            {
                "data_source": recipe.data_source,
                "prompt": [{"role": "user", "content": f"{question} {asked}".strip()}],
                **({"images": row[recipe.pictures]} if recipe.pictures else {}),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": recipe.truth(solution)},
                "extra_info": {"split": split, "index": index, "question": question, "answer": solution},
            }
        )
    if wrong:
        more = f" ({len(wrong)} of {len(rows)} rows are like that)" if len(wrong) > 1 else ""
        raise ConfigError(f"{wrong[0]}{more}")
    return samples


def _problem(recipe: Recipe, question: Any, solution: Any) -> str:
    for column, value in ((recipe.question, question), (recipe.solution, solution)):
        if not isinstance(value, str) or not value.strip():
            return f"column {column!r} is {'null' if value is None else repr(value)[:80]}, not text"
    return "" if recipe.truth(solution) else f"column {recipe.solution!r} has no {recipe.form}: {solution[-80:]!r}"


def _miscounted(recipe: Recipe, row: dict[str, Any]) -> str:
    if recipe.pictures is None:
        return ""
    marks, given = row[recipe.question].count(MARK), len(row[recipe.pictures] or ())
    return "" if marks == given else f"column {recipe.question!r} has {marks} marks {MARK} for {given} pictures"


def unrewarded(recipe: Recipe, samples: Sequence[dict[str, Any]]) -> int:
    """The number of the data set's own solutions that the rule does not score as right."""
    count = 0
    for sample in samples:
        response = recipe.response.replace("{}", sample["extra_info"]["answer"])
        score = default_compute_score(sample["data_source"], response, sample["reward_model"]["ground_truth"])
        count += (score["score"] if isinstance(score, dict) else score) < ENOUGH
    return count


def write(samples: Sequence[dict[str, Any]], path: Path) -> None:
    """Write Parquet or JSON Lines, by the file's name. Replaces an existing file once all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(list(samples)), part)
        else:
            part.write_text("".join(f"{json.dumps(sample, ensure_ascii=False)}\n" for sample in samples), "utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.utils.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prepare = commands.add_parser("prepare", help="make a data file for training", description="Make a data file.")
    names = prepare.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in RECIPES:
        recipe = _add_file_options(names.add_parser(name, help=f"the data set {RECIPES[name].data_source}"))
        recipe.add_argument(
            "--instruction", metavar="TEXT", help="text after every question, instead of the answer format of the rule"
        )
    rows = _add_file_options(names.add_parser("nemo_gym", help="rows for a resources server of NeMo-Gym"))
    rows.add_argument("--agent", default="nemo_gym", metavar="NAME", help="their agent loop (default nemo_gym)")
    what = "an environment of the package verifiers: its data, and its entry for agent_loop_config_path"
    _add_environment_options(names.add_parser("verifiers", help=what, description=what))
    return parser


def _add_environment_options(prepare: argparse.ArgumentParser) -> None:
    prepare.add_argument("--environment", required=True, metavar="NAME", help="as verifiers.load_environment takes it")
    prepare.add_argument("--arguments", type=_json, default={}, metavar="JSON", help="those of the environment")
    prepare.add_argument("--python", metavar="FILE", help="the interpreter that has it (default: this one)")
    prepare.add_argument("--to", type=Path, metavar="DIR", help="of train.parquet, test.parquet and agents.yaml")
    prepare.add_argument("--limit", type=_count, default=1_000_000, metavar="N", help="samples of a split at most")
    prepare.add_argument(
        "--test-size",
        type=_count,
        metavar="N",
        help="samples to hold out if the environment has none for evaluation (default: a tenth, at most 100)",
    )
    prepare.add_argument("--force", action="store_true", help="replace files that are there")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {exc}") from exc


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _add_file_options(prepare: argparse.ArgumentParser) -> argparse.ArgumentParser:
    prepare.add_argument(
        "--from", dest="source", type=Path, required=True, metavar="FILE", help="a local parquet or JSON Lines file"
    )
    prepare.add_argument(
        "--to", type=Path, metavar="FILE", help="to write, *.parquet or *.jsonl (default data/NAME/SPLIT.parquet)"
    )
    prepare.add_argument("--split", default="train", help="what extra_info.split says (default train)")
    prepare.add_argument("--force", action="store_true", help="replace a file that is there")
    return prepare


def _check(source: Path, target: Path, *, force: bool) -> None:
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"--to {target}: the name has to end in {' or '.join(SUFFIXES)}")
    if not source.is_file():
        raise ConfigError(f"--from {source}: no such file. Data sets are not downloaded")
    if target.exists() and not force:
        raise ConfigError(f"--to {target} is there; --force replaces it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 2, with one line on stderr, for data that cannot be prepared."""
    options = _parser().parse_args(arguments)
    if options.name == "verifiers":
        return _prepare_environment(options)
    target: Path = options.to or Path("data", options.name, f"{options.split}.parquet")
    recipe = RECIPES.get(options.name)
    try:
        _check(options.source, target, force=options.force)
        if recipe is None:
            samples = nemo_gym_samples(options.source, options.split, options.agent)
        else:
            columns = [recipe.question, recipe.solution, *([recipe.pictures] if recipe.pictures else [])]
            rows = Rows([options.source], columns)
            samples = prepared(recipe, rows, options.split, options.instruction)
        write(samples, target)
    except (ConfigError, OSError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    sys.stdout.write(f"{target}: {len(samples)} samples of {samples[0]['data_source'] if samples else options.name}\n")
    if recipe is not None and (count := unrewarded(recipe, samples)):
        sys.stderr.write(f"warning: the rule gives no full reward to {count} of the data set's own solutions\n")
    return 0


def _check_absent(paths: Sequence[Path], *, force: bool) -> None:
    for path in paths:
        if path.exists() and not force:
            raise ConfigError(f"{path} is there; --force replaces it")


def _prepare_environment(options: argparse.Namespace) -> int:
    """As `main`."""
    folder: Path = options.to or Path("data", options.environment.split("/")[-1])
    try:
        python = options.python and os.path.abspath(Path(options.python).expanduser())
        source = Source.of(
            "prepare", environment=options.environment, arguments=options.arguments, python=python or None
        )
        found = {split: folder / f"{split}.parquet" for split in ("train", "test")}
        _check_absent((*found.values(), folder / ENTRY_FILE), force=options.force)
        source.check("prepare")
        samples = environment_samples(source, options.limit, options.test_size)
        for split, path in found.items():
            write(samples[split], path)
        (folder / ENTRY_FILE).write_text(yaml.safe_dump([entry(source)], sort_keys=False), "utf-8")
    except (ConfigError, OSError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    for split, path in found.items():
        sys.stdout.write(f"{path}: {len(samples[split])} samples of {source.environment}\n")
    sys.stdout.write(f"{folder / ENTRY_FILE}: its agent loop {source.loop_name!r}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
