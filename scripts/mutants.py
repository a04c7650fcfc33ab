"""Which tests find which mutants of a package, and in what time. `make mutants` calls it.

Cosmic Ray makes the mutants: each is one file with one change. It would run a command for each, which imports torch
for seconds. Here a process that has imported all but this project forks one child for each mutant; the child imports
the project, one file of which is the mutant, and runs the tests that reach the changed lines, each file of tests until
its first red one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lab" / "mutants.md"
RESULTS = ROOT / "build" / "mutants"
OURS = ("verl", "tests", "benchmarks", "recipe", "scripts", "examples", "conftest")
NOT_MADE = {"VariableReplacer", "VariableInserter"}
"""Operators of Cosmic Ray that want to be told a variable."""
PATIENCE_S = 60.0
"""A test that takes so much longer than ten times its usual time has found the mutant by hanging."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    lines: tuple[int, ...]
    """Of the statement, without its body."""
    operator: str
    source: str


@dataclasses.dataclass
class Usual:
    """A test on the code as it is."""

    seconds: float
    lines: dict[str, set[int]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    """By file of the package, those that it runs; those of fixtures that a file of tests shares are theirs all."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("packages", nargs="+", help="for instance verl/checkpoint_engine/plan, or one file")
    parser.add_argument("--tests", nargs="+", help="default: the directory in tests that has the package's name")
    parser.add_argument(
        "--mark", default="(not job)", help="which of these tests, as pytest's -m; default: %(default)s"
    )
    parser.add_argument(
        "--sample", type=int, default=200, help="how many mutants of each package; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="which mutants; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10, help="no new mutant after them; default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=20, help="of tests, usually, for a mutant; default: %(default)s"
    )
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time; default: %(default)s")
    parser.add_argument("--every-test", action="store_true", help="go on in a file after its first red test")
    parser.add_argument("--no-page", action="store_true", help="leave docs/lab/mutants.md as it is")
    options = parser.parse_args(arguments)
    packages = [package.rstrip("/") for package in options.packages]
    for package in packages:
        if not (ROOT / package).exists():
            parser.error(f"{package} does not exist")
    sys.path.append(str(ROOT / ".venv" / "mutants"))  # last: nothing of it shall take another package's place
    ends = time.monotonic() + 60 * options.minutes
    tests = options.tests or sorted({tests_of(package) for package in packages})
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        trees = [copied_tree(Path(directory, f"tree-{number}")) for number in range(options.workers)]
        enter(trees[0])
        preload(trees[0], tests, options.mark)
        usual = usual_runs(trees[0], packages, tests, options.mark)
        for number, package in enumerate(packages):
            mutants = sampled(package, options.sample, options.seed)
            share_s = max(0.0, ends - time.monotonic()) / (len(packages) - number)
            found = tried(trees, mutants, usual, options, time.monotonic() + share_s)
            tell(package, found, len(mutants), usual, options)
    return 0


def tell(
    package: str, found: list[dict[str, Any]], wanted: int, usual: dict[str, Usual], options: argparse.Namespace
) -> None:
    """On the console, in a file, and on the page."""
    print(f"{package}: {len(found)} of {wanted} mutants tried, {sum(bool(one['found_by']) for one in found)} found")
    for one in found:
        if not one["found_by"]:
            print(f"survived: {one['file']}:{one['line']} {one['operator']}: {one['was']}  ->  {one['now']}")
    seconds = {
        name: round(run.seconds, 3)
        for name, run in usual.items()
        if any(file == package or file.startswith(f"{package}/") for file in run.lines)
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept = RESULTS / f"{package.replace('/', '.')}-{options.seed}.json"
    kept.write_text(json.dumps({"mutants": found, "seconds": seconds}, indent=1))
    print(f"all of it: {kept.relative_to(ROOT)}")
    if found and not options.no_page:
        write_page(package, options.seed, found, seconds)


def tests_of(package: str) -> str:
    """The innermost directory of tests that has the package's name."""
    inner = Path("tests", *Path(package).with_suffix("").parts[1:])
    return next(str(path) for path in [inner, *inner.parents] if (ROOT / path).is_dir())


def copied_tree(tree: Path) -> Path:
    """What git knows of this repository, with its environment. Here files are replaced by mutants."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
    return tree


def enter(tree: Path) -> None:
    """From here on this process, and what it starts, imports the project from there."""
    os.chdir(tree)
    sys.path[:] = [
        str(tree),
        *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "scripts")),
    ]
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["TMPDIR"] = str(tree.parent / f"tmp-{tree.name}")
    tempfile.tempdir = None
    Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)


class Child:
    """A fork that runs `target(events)`, where it writes JSON, a line for each event."""

    def __init__(self, target: Callable[[TextIO], None], log: Path) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.setsid()
                os.close(reading)
                with log.open("w") as output:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                with os.fdopen(writing, "w", buffering=1) as events:
                    target(events)
                    print("null", file=events)  # the end: what it has left behind may hold the pipe open
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        self._lines = os.fdopen(reading, "rb", buffering=0)

    def events(self, patience_s: Callable[[], float]) -> Iterator[dict[str, Any] | None]:
        """Each event; None at last, if none came for so long. Afterwards all processes of its session are gone."""
        rest = b""
        try:
            while True:
                if not select.select([self._lines], [], [], patience_s())[0]:
                    yield None
                    return
                got = self._lines.read(1 << 16)
                if not got:
                    return
                *whole, rest = (rest + got).split(b"\n")
                for line in whole:
                    if line == b"null":
                        return
                    yield json.loads(line)
        finally:
            self._lines.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def pytest_in_child(arguments: Sequence[str], plugin: object) -> None:
    base = Path(os.environ["TMPDIR"], "pytest")
    flags = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", f"--basetemp={base}"]
    pytest.main([*flags, *arguments], plugins=[plugin])


def preload(tree: Path, tests: Sequence[str], mark: str) -> None:
    """Imports what these tests import and is not the project's."""

    def collect(events: TextIO) -> None:
        pytest_in_child(["--collect-only", "-m", mark, *tests], object())
        print(json.dumps([name for name in sys.modules if name.split(".")[0] not in OURS]), file=events)

    for names in Child(collect, tree.parent / "collected.log").events(lambda: 600):
        for name in names or ():
            with contextlib.suppress(Exception):
                importlib.import_module(name)


class Watched:
    """In the child that runs all tests once: their seconds, and the lines of the package that each runs."""

    def __init__(self, packages: Sequence[str]) -> None:
        import coverage

        self.seconds: dict[str, float] = defaultdict(float)
        self._coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[name for one in packages for name in (one, f"{one}/*")]
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        result = yield
        self._coverage.switch_context("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        self._coverage.switch_context(test.split("::")[0])
        result = yield
        self._coverage.switch_context(test)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.seconds[report.nodeid] = float("inf")

    def lines(self) -> dict[str, dict[int, list[str]]]:
        """By file and line, what ran it."""
        self._coverage.stop()
        data = self._coverage.get_data()
        return {
            str(Path(file).relative_to(Path.cwd())): data.contexts_by_lineno(file) for file in data.measured_files()
        }


def usual_runs(tree: Path, packages: Sequence[str], tests: Sequence[str], mark: str) -> dict[str, Usual]:
    """Every test once, on the code as it is. A test that is red then is left out."""

    def watch(events: TextIO) -> None:
        watched = Watched(packages)
        pytest_in_child(["-m", mark, *tests], watched)
        print(json.dumps({"seconds": watched.seconds, "lines": watched.lines()}), file=events)

    log = tree.parent / "usual.log"
    found = next(Child(watch, log).events(lambda: 3600), None)
    if found is None:
        raise RuntimeError(f"the tests did not run: {log.read_text()[-2000:]}")
    usual = {test: Usual(seconds) for test, seconds in found["seconds"].items()}
    in_file: dict[str, list[str]] = defaultdict(list)
    for test in usual:
        in_file[test.split("::")[0]].append(test)
    for file, lines in found["lines"].items():
        for line, contexts in lines.items():
            for test in (test for context in contexts for test in in_file.get(context, [context])):
                if test in usual:
                    usual[test].lines[file].add(int(line))
    red = [test for test, run in usual.items() if run.seconds == float("inf")]
    for test in red:
        print(f"red without a mutant, and left out: {test}")
        del usual[test]
    print(f"{len(usual)} tests, {sum(run.seconds for run in usual.values()):.0f} s")
    return usual


def sampled(package: str, number: int, seed: int) -> list[Mutant]:
    """That many of the places where an operator of Cosmic Ray applies, with one of its changes each."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import MutationVisitor
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    operators = {name: provider[name]() for name in provider if name not in NOT_MADE}
    path = Path(package)
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    places: dict[tuple[Any, ...], list[tuple[str, int]]] = defaultdict(list)
    for file in files:
        nodes = list(ast_nodes(get_ast(file.read_text())))
        for name, operator in operators.items():
            positions = (position for node in nodes for position in operator.mutation_positions(node))
            for occurrence, position in enumerate(positions):
                places[str(file), tuple(map(tuple, position)), name.split("_")[0]].append((name, occurrence))
    chance = random.Random(seed)
    mutants: list[Mutant] = []
    for place in chance.sample(sorted(places), len(places)):
        name, occurrence = chance.choice(places[place])
        file = Path(place[0])
        source = file.read_text()
        mutated = MutationVisitor.mutate_code(source, operators[name], occurrence)
        if mutated is not None and differs(source, mutated):
            line = place[1][0][0]
            mutants.append(Mutant(str(file), line, statement(source, line), name, mutated))
        if len(mutants) == number:
            break
    print(f"{len(mutants)} mutants of {len(places)} places in {len(files)} files")
    return mutants


def differs(source: str, mutated: str) -> bool:
    """Whether it is a program, and does other things: annotations are never evaluated."""

    def program(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            for name in ("annotation", "returns"):
                if hasattr(node, name):
                    setattr(node, name, None if name == "returns" or isinstance(node, ast.arg) else ast.Constant(None))
        compile(text, "mutant", "exec")
        return ast.dump(tree)

    with warnings.catch_warnings():
        warnings.simplefilter("error", SyntaxWarning)  # `is` with a literal: no fault that anybody makes
        try:
            return program(source) != program(mutated)
        except SyntaxError:
            return False


def statement(source: str, line: int) -> tuple[int, ...]:
    holders = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not holders:
        return (line,)
    inner = max(holders, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    body = getattr(inner, "body", None)
    last = body[0].lineno - 1 if body else inner.end_lineno or line
    return tuple(range(inner.lineno, max(last, inner.lineno, line) + 1))


def reaching(mutant: Mutant, usual: dict[str, Usual], seconds: float) -> list[list[str]]:
    """The tests that run its lines, by file, quick files first; of long files the quick tests, as far as `seconds` go.

    Lines that run as the module is imported, and those of functions that numba compiles, are reached by all that run
    any of it.
    """
    tests = [name for name, run in usual.items() if run.lines.get(mutant.file, set()) & set(mutant.lines)]
    if not tests:
        tests = [name for name, run in usual.items() if run.lines.get(mutant.file)]
    total = 0.0
    chosen: dict[str, list[str]] = defaultdict(list)
    for name in sorted(tests, key=lambda name: usual[name].seconds):
        total += usual[name].seconds
        if total <= seconds:
            chosen[name.split("::")[0]].append(name)
    return sorted(chosen.values(), key=lambda names: sum(usual[name].seconds for name in names))


class Judge:
    """In the child of a mutant: which tests run, in which order, and what is told of them."""

    def __init__(self, files: list[list[str]], events: TextIO, every_test: bool) -> None:
        self._files, self._events, self._every_test = files, events, every_test
        self._red: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        of_file: dict[str, list[pytest.Item]] = defaultdict(list)
        wanted = {name for names in self._files for name in names}
        for item in items:
            if item.nodeid in wanted:
                of_file[item.nodeid.split("::")[0]].append(item)
        items[:] = [item for names in self._files for item in of_file[names[0].split("::")[0]]]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        file = item.nodeid.split("::")[0]
        if file in self._red and not self._every_test:
            with contextlib.suppress(BaseException):
                item.session._setupstate.teardown_exact(nextitem)
            return True
        print(json.dumps({"starts": item.nodeid}), file=self._events)
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(report.nodeid)

    def _tell(self, test: str) -> None:
        self._red.add(test.split("::")[0])
        print(json.dumps({"red": test}), file=self._events)


def judged(files: list[list[str]], usual: dict[str, Usual], every_test: bool) -> list[str]:
    """The tests of these files that are red, each file up to its first; one that hangs is red."""
    found: set[str] = set()
    while files:
        now = files[0][0]

        def run(events: TextIO, files: list[list[str]] = files) -> None:
            sys.dont_write_bytecode = True
            names = [names[0].split("::")[0] for names in files]
            pytest_in_child(["--continue-on-collection-errors", *names], Judge(files, events, every_test))

        hung = False
        for event in Child(run, Path(os.environ["TMPDIR"], "mutant.log")).events(
            lambda: PATIENCE_S + 10 * usual[now].seconds  # noqa: B023 it is of the test that runs
        ):
            if event is None:
                hung = True
            elif "starts" in event:
                now = event["starts"]
            else:
                found.add(event["red"])
        if not hung:
            break
        found.add(now)
        done = next(number for number, names in enumerate(files) if names[0].split("::")[0] == now.split("::")[0])
        files = files[done + 1 :]
    return sorted(found)


def tried(
    trees: Sequence[Path], mutants: list[Mutant], usual: dict[str, Usual], options: argparse.Namespace, ends: float
) -> list[dict[str, Any]]:
    """Each tree takes its share of the mutants until the time is over."""
    children = []
    shares = [mutants[number :: len(trees)] for number in range(len(trees))]
    for number, (tree, share) in enumerate(zip(trees, shares, strict=True)):

        def work(events: TextIO, tree: Path = tree, share: list[Mutant] = share) -> None:
            enter(tree)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant of the same second and size would be the one before
            for mutant in share:
                if time.monotonic() > ends:
                    break
                print(json.dumps(result(tree, mutant, usual, options)), file=events)

        children.append(Child(work, tree.parent / f"worker-{number}.log"))
    return [event for child in children for event in child.events(lambda: 3600) if event is not None]


def result(tree: Path, mutant: Mutant, usual: dict[str, Usual], options: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    file = tree / mutant.file
    source = file.read_text()
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
        compiled.unlink()
    files = reaching(mutant, usual, options.seconds)
    file.write_text(mutant.source)
    try:
        found = judged(files, usual, options.every_test)
    finally:
        file.write_text(source)
    was, now = (lines[0] if lines else "" for lines in changed(source, mutant.source))
    return {
        "file": mutant.file,
        "line": mutant.line,
        "operator": mutant.operator,
        "was": was.strip(),
        "now": now.strip(),
        "tests": sum(map(len, files)),
        "found_by": found,
        "took_s": round(time.monotonic() - started, 1),
    }


def changed(source: str, mutated: str) -> tuple[list[str], list[str]]:
    before, after = source.splitlines(), mutated.splitlines()
    while before and after and before[0] == after[0]:
        del before[0], after[0]
    while before and after and before[-1] == after[-1]:
        del before[-1], after[-1]
    return before, after


BEGIN = """# Mutants

Which tests find which faults. `make mutants PACKAGE=...` writes the section of that package: Cosmic Ray changes one
place of the code, and the tests that reach it run. Seconds are those of the tests that reach the package, watched.
"""


def write_page(package: str, seed: int, found: list[dict[str, Any]], seconds: dict[str, float]) -> None:
    """Puts the section of the package into the page, and leaves the others."""
    _, *sections = (PAGE.read_text() if PAGE.exists() else BEGIN).split("\n## ")
    sections = [one for one in sections if one.split("\n")[0] != f"`{package}`"]
    sections.append(section(package, seed, found, seconds))
    PAGE.write_text("\n## ".join([BEGIN, *(one.strip("\n") + "\n" for one in sorted(sections))]))


def section(package: str, seed: int, found: list[dict[str, Any]], seconds: dict[str, float]) -> str:
    files_of = [{test.split("::")[0] for test in one["found_by"]} for one in found]
    finds, alone = (
        Counter(file for files in files_of for file in files),
        Counter(next(iter(files)) for files in files_of if len(files) == 1),
    )
    took: dict[str, float] = defaultdict(float)
    for test, duration in seconds.items():
        took[test.split("::")[0]] += duration
    number, reached = sum(map(bool, files_of)), sum(bool(one["tests"]) for one in found)
    lines = [
        f"`{package}`",
        "",
        f"{len(found)} mutants (seed {seed}): {number} found, {len(found) - reached} that no test of these reaches.",
        "",
        "| test file | seconds | mutants found | that only it finds |",
        "|---|---:|---:|---:|",
        *(
            f"| `{file}` | {took[file]:.1f} | {finds[file]} | {alone[file]} |"
            for file in sorted(took, key=lambda file: (-alone[file], -finds[file], file))
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
