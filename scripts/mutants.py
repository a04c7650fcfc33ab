"""Which tests find which mutants of some packages. `make mutants` calls it.

Cosmic Ray makes the mutants: each is one file with one change. It would run a command for each, which imports torch
and collects tests for many seconds. Here one process collects all tests once, and forks a child for each mutant: it
puts the code of the mutant into the functions that are loaded, and runs the tests that reach the changed lines, each
file of tests until its first red one. A mutant whose change runs at import gets a child that imports the project anew.

What is found is kept in build/mutants for this state of the code: a later call goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import inspect
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TextIO

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lab" / "mutants.md"
OURS = ("verl", "tests", "benchmarks", "recipe", "scripts", "examples", "conftest")
NOT_MADE = {"VariableReplacer", "VariableInserter"}
"""Operators of Cosmic Ray that want to be told a variable."""
PATIENCE_S = 8.0
"""A test that takes so much longer than five times its usual time has found the mutant by hanging."""
COMPILES_S = 60.0
"""The same for a file whose functions numba compiles in each child."""
ENOUGH = 2
"""So many files of tests, the quicker ones first, may find a mutant: others would add nothing."""
QUICK_S = 5.0
"""Files of tests that take no longer have no row of their own on the page."""


class Place(NamedTuple):
    """Where an operator of Cosmic Ray applies, and one of its changes there."""

    file: str
    line: int
    column: int
    operator: str
    occurrence: int


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
        "--sample", type=int, default=200, help="how many places of these packages; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="which places; default: %(default)s")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        help="of mutants; default: %(default)s. The first call runs all tests once before that",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=5,
        help="of tests, usually, for a mutant; default: %(default)s. With more, what has survived is tried again",
    )
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time; default: %(default)s")
    parser.add_argument("--page", action="store_true", help="write docs/lab/mutants.md")
    options = parser.parse_args(arguments)
    packages = [package.rstrip("/") for package in options.packages]
    for package in packages:
        if not (ROOT / package).exists():
            parser.error(f"{package} does not exist")
    sys.path.append(str(ROOT / ".venv" / "mutants"))  # last: nothing of it shall take another package's place
    tests = options.tests or sorted({tests_of(package) for package in packages})
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        trees = [copied_tree(Path(directory, f"tree-{number}")) for number in range(options.workers)]
        kept = ROOT / "build" / "mutants" / digest(trees[0], *packages, *tests, options.mark)
        kept.mkdir(parents=True, exist_ok=True)
        enter(trees[0])
        preload(trees[0], tests, options.mark)
        usual = usual_runs(trees[0], kept / "usual.json", packages, tests, options.mark)
        places = sampled(packages, options.sample, options.seed)
        work(trees, kept / "found.jsonl", places, usual, options, time.monotonic() + 60 * options.minutes)
    found = {place: one for place, one in read(kept / "found.jsonl").items() if place in set(places)}
    for place, one in found.items():
        if not one["found_by"]:
            print(f"survived: {place.file}:{place.line} {place.operator}: {one['was']}  ->  {one['now']}")
    asked = f"{options.sample} places, seed {options.seed}; {options.seconds:g} s of tests (`{options.mark}`) for each."
    told = f"{asked}\n\n{table(packages, found, usual)}"
    print(f"{told}\nall of it: {kept.relative_to(ROOT)}")
    if options.page:
        PAGE.write_text(BEGIN + told)
    return 0


def digest(tree: Path, *more: str) -> str:
    """Of all code but that of scripts, and of what is asked for."""
    state = hashlib.sha256("\0".join(more).encode())
    for file in sorted(tree.rglob("*.py")):
        name = file.relative_to(tree)
        if name.parts[0] in OURS and "scripts" not in name.parts:
            state.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return state.hexdigest()[:16]


def read(file: Path) -> dict[Place, dict[str, Any]]:
    """What was found of each place; the last try counts."""
    lines = file.read_text().splitlines() if file.exists() else ()
    return {Place(*one["place"]): one for one in map(json.loads, lines)}


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
                os.setpgrp()
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

    def events(self, patience_s: Callable[[], float | None]) -> Iterator[dict[str, Any] | None]:
        """Each event; None at last, if none came for so long, or it died. Afterwards its process group is gone."""
        rest = b""
        try:
            while True:
                ready = select.select([self._lines], [], [], patience_s())[0]
                got = self._lines.read(1 << 16) if ready else b""
                if not got:
                    yield None
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
    hypothesis.settings.register_profile("mutants", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    base = Path(os.environ["TMPDIR"], "pytest")
    flags = f"-q -p no:cacheprovider -p no:xdist --hypothesis-seed=0 --hypothesis-profile=mutants --basetemp={base}"
    pytest.main([*flags.split(), *arguments], plugins=[plugin])


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


def usual_runs(tree: Path, kept: Path, packages: Sequence[str], tests: Sequence[str], mark: str) -> dict[str, Usual]:
    """Every test once, on the code as it is. A test that is red then is left out."""

    def watch(events: TextIO) -> None:
        watched = Watched(packages)
        pytest_in_child(["-m", mark, *tests], watched)
        kept.write_text(json.dumps({"seconds": watched.seconds, "lines": watched.lines()}))

    log = tree.parent / "usual.log"
    if not kept.exists() and None in Child(watch, log).events(lambda: 3600):
        raise RuntimeError(f"the tests did not run: {log.read_text()[-2000:]}")
    found = json.loads(kept.read_text())
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


def sampled(packages: Sequence[str], number: int, seed: int) -> list[Place]:
    """That many places, in an order that does not depend on the number, with one change each."""
    from cosmic_ray.ast import ast_nodes, get_ast

    at: dict[tuple[Any, ...], list[Place]] = defaultdict(list)
    files = [path for name in packages for path in ([Path(name)] if Path(name).is_file() else Path(name).rglob("*.py"))]
    for file in sorted(set(files)):
        nodes = list(ast_nodes(get_ast(file.read_text())))
        for name, operator in operators().items():
            positions = (position for node in nodes for position in operator.mutation_positions(node))
            for occurrence, position in enumerate(positions):
                places = at[str(file), tuple(map(tuple, position)), name.split("_")[0]]
                places.append(Place(str(file), position[0][0], position[0][1], name, occurrence))
    chance = random.Random(seed)
    return [chance.choice(at[place]) for place in chance.sample(sorted(at), len(at))[:number]]


@functools.cache
def operators() -> dict[str, Any]:
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    return {name: provider[name]() for name in provider if name not in NOT_MADE}


def made(place: Place) -> str | None:
    """The file with that change. None if it is no program, or the same one."""
    from cosmic_ray.mutating import MutationVisitor

    source = Path(place.file).read_text()
    mutated = MutationVisitor.mutate_code(source, operators()[place.operator], place.occurrence)
    return mutated if mutated is not None and differs(source, mutated) else None


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


def statement(source: str, line: int) -> set[int]:
    holders = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not holders:
        return {line}
    inner = max(holders, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    body = getattr(inner, "body", None)
    last = body[0].lineno - 1 if body else inner.end_lineno or line
    return set(range(inner.lineno, max(last, inner.lineno, line) + 1))


def reaching(
    file: str, lines: set[int], usual: Mapping[str, Usual], seconds: float, tried_s: float = 0
) -> tuple[list[list[str]], int]:
    """The tests that run these lines, by file, quick files first, and how many more there are than `seconds` allow.

    Without those that were tried when `tried_s` were allowed.
    All tests of a file of the same name are taken, and of every other file the quickest, then the next of each. Lines
    that nothing runs in this process, as an import, a child or a function that numba compiled may do, are tried with
    all that run the file.
    """
    tests = [name for name, run in usual.items() if run.lines.get(file, set()) & lines]
    if not tests:
        tests = [name for name, run in usual.items() if run.lines.get(file)]
    of_file: dict[str, list[str]] = defaultdict(list)
    for name in sorted(tests, key=lambda name: usual[name].seconds):
        of_file[name.split("::")[0]].append(name)
    turns = sorted(
        (0 if has_name_of(tests_file, file) else turn, usual[name].seconds, name)
        for tests_file, names in of_file.items()
        for turn, name in enumerate(names)
    )

    def within(left_s: float) -> set[str]:
        taken = set()
        for _, duration, name in turns:
            if duration <= left_s:
                left_s -= duration
                taken.add(name)
        return taken

    chosen = within(seconds)
    new = chosen - within(tried_s)
    files = [[name for name in names if name in new] for names in of_file.values()]
    quick_first = sorted(filter(None, files), key=lambda names: sum(usual[name].seconds for name in names))
    return quick_first, len(tests) - len(chosen)


def has_name_of(tests_file: str, file: str) -> bool:
    tests_name, name = Path(tests_file).stem.removeprefix("test_"), Path(file).stem
    return tests_name in name or name in tests_name


class Judge:
    """In the child of a mutant: which tests run, in which order, and what is told of them."""

    def __init__(self, files: list[list[str]], events: TextIO) -> None:
        self._files, self._events = files, events
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
        if file in self._red or len(self._red) >= ENOUGH:
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


def judged(run: Callable[[TextIO], None], usual: Mapping[str, Usual], source: str) -> list[str]:
    """The tests that are red in a child, each file up to its first; one that hangs or ends the child is the last."""
    found: set[str] = set()
    now = "collection"
    patience_s = COMPILES_S if "from numba import" in source else PATIENCE_S
    for event in Child(run, Path(os.environ["TMPDIR"], "mutant.log")).events(
        lambda: patience_s + 5 * (usual[now].seconds if now in usual else PATIENCE_S)  # noqa: B023 of what runs
    ):
        if event is None:
            found.add(now)
        elif "starts" in event:
            now = event["starts"]
        else:
            found.add(event["red"])
    return sorted(found)


def judged_anew(files: list[list[str]], usual: Mapping[str, Usual], source: str) -> list[str]:
    """With the project imported in the child."""

    def run(events: TextIO) -> None:
        sys.dont_write_bytecode = True
        names = [names[0].split("::")[0] for names in files]
        pytest_in_child(["--continue-on-collection-errors", *names], Judge(files, events))

    return judged(run, usual, source)


class Collected:
    """In a process that has collected all tests: answers requests to judge a mutant with the functions that are loaded.

    A request is a line: the tests by file, the file that is the mutant now, and what was there. The answer is None if
    what has changed runs at import.
    """

    def __init__(self, requests: TextIO, answers: TextIO, usual: Mapping[str, Usual]) -> None:
        self._requests, self._answers, self._usual = requests, answers, usual

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        functions: dict[str, list[FunctionType]] = defaultdict(list)
        for function in (thing for thing in gc.get_objects() if isinstance(thing, FunctionType)):
            functions[function.__code__.co_filename].append(function)
        for line in self._requests:
            files, name, was = json.loads(line)
            file = str(Path(name).resolve())
            source = Path(file).read_text()
            new = replacements(compile(was, file, "exec"), compile(source, file, "exec"))
            found = None
            if new is not None:
                codes = [(one, new[one.__code__]) for one in functions[file] if one.__code__ in new]
                if codes or not functions[file]:
                    found = judged(functools.partial(self._run, session, files, codes), self._usual, source)
            print(json.dumps({"found": found}), file=self._answers)
        return True

    def _run(
        self,
        session: pytest.Session,
        files: list[list[str]],
        codes: list[tuple[FunctionType, CodeType]],
        events: TextIO,
    ) -> None:
        for function, code in codes:
            function.__code__ = code
        judge = Judge(files, events)
        session.config.pluginmanager.register(judge)
        judge.pytest_collection_modifyitems(session, session.items)
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def replacements(was: CodeType, now: CodeType) -> dict[CodeType, CodeType] | None:
    """For each function that has changed, its code. None if what runs at import has changed."""
    new: dict[CodeType, CodeType] = {}

    def alike(was: Any, now: Any) -> bool:
        if not isinstance(was, CodeType) or not isinstance(now, CodeType):
            return type(was) is type(now) and was == now
        function = bool(was.co_flags & inspect.CO_OPTIMIZED) and not was.co_name.startswith("<")
        if function and was != now:
            new[was] = now
        inside = len(was.co_consts) == len(now.co_consts) and all(
            alike(one, other) for one, other in zip(was.co_consts, now.co_consts, strict=True)
        )
        return function or (inside and was.co_code == now.co_code and was.co_names == now.co_names)

    return new if alike(was, now) else None


def work(
    trees: Sequence[Path],
    kept: Path,
    places: Sequence[Place],
    usual: Mapping[str, Usual],
    options: argparse.Namespace,
    ends: float,
) -> None:
    """Each tree takes its share of the places until the time is over, and adds what is found to the file."""
    known = read(kept)
    left = [
        place
        for place in places
        if place not in known
        or (known[place]["left"] and not known[place]["found_by"] and known[place]["seconds"] < options.seconds)
    ]
    children = []
    for number, tree in enumerate(trees):

        def share(events: TextIO, tree: Path = tree, number: int = number) -> None:
            enter(tree)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant of the same second and size would be the one before
            requests, ask = os.pipe()

            def collect(answers: TextIO) -> None:
                os.close(ask)
                with os.fdopen(requests) as lines:
                    tests = sorted({test.split("::")[0] for test in usual})
                    pytest_in_child(["-s", *tests], Collected(lines, answers, usual))

            collected = Child(collect, tree.parent / f"collected-{number}.log")
            os.close(requests)
            answers = collected.events(lambda: None)
            with kept.open("a", buffering=1) as results, os.fdopen(ask, "w", buffering=1) as asking:
                for place in left[number :: len(trees)]:
                    mutant = made(place) if time.monotonic() < ends else None
                    if mutant is not None:
                        tried_s = known[place]["seconds"] if place in known else 0
                        one = result(place, mutant, usual, options.seconds, tried_s, asking, answers)
                        print(json.dumps(one), file=results)

        children.append(Child(share, tree.parent / f"worker-{number}.log"))
    for child in children:
        for _ in child.events(lambda: None):
            raise RuntimeError("a worker died")


def result(
    place: Place,
    mutant: str,
    usual: Mapping[str, Usual],
    seconds: float,
    tried_s: float,
    asking: TextIO,
    answers: Iterator[dict[str, Any] | None],
) -> dict[str, Any]:
    started = time.monotonic()
    file = Path(place.file)
    source = file.read_text()
    lines = statement(source, place.line)
    files, left = reaching(place.file, lines, usual, seconds, tried_s)
    found: list[str] | None = []
    if files:
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()
        file.write_text(mutant)
        try:
            print(json.dumps([files, place.file, source]), file=asking)
            found = (next(answers) or {})["found"]
            if found is None:
                found = judged_anew(files, usual, mutant)
        finally:
            file.write_text(source)
    was, now = (text.splitlines()[place.line - 1].strip() for text in (source, mutant))
    return {
        "place": place,
        "was": was,
        "now": now,
        "runs": any(lines & run.lines.get(place.file, set()) for run in usual.values()),
        "tests": sum(map(len, files)),
        "left": left,
        "seconds": seconds,
        "found_by": found,
        "took_s": round(time.monotonic() - started, 2),
    }


BEGIN = """# Mutants

Which faults tests find, and which long files of tests find some that no other does: for people who add or remove tests.
`make mutants PACKAGE="..." ARGS=--page` writes this page. Cosmic Ray changes one place of the code, and the tests that
reach it run, quick files first, until two files are red. A survivor is a fault that nobody would see, or a change
without an effect, such as a shorter timeout. Jobs, which start engines or Ray, are not among the tests unless they are
asked for: most of what only they run survives here, and is counted as run by no test, as are lines that an import runs.

"""


def table(packages: Sequence[str], found: Mapping[Place, dict[str, Any]], usual: Mapping[str, Usual]) -> str:
    took: dict[str, float] = defaultdict(float)
    for test, run in usual.items():
        if run.lines:
            took[test.split("::")[0]] += run.seconds
    finds, alone = Counter[str](), Counter[str]()
    rows = {name: [0] * 6 for name in ("all", *packages)}
    for place, one in found.items():
        files = {test.split("::")[0] for test in one["found_by"]}
        finds.update(files)
        alone.update(files if len(files) == 1 else ())
        quick = any(took[file] <= QUICK_S for file in files)
        survived = 5 if one["left"] else 3 if one["runs"] else 4
        for name, row in rows.items():
            if name == "all" or place.file == name or place.file.startswith(f"{name}/"):
                for column in (0, 1, *([2] * quick)) if files else (0, survived):
                    row[column] += 1
    slow = sorted((file for file in took if took[file] > QUICK_S), key=lambda file: (-alone[file], -finds[file], file))
    return "\n".join(
        [
            f"| package | mutants | found | of these by a file of at most {QUICK_S:.0f} s | survived | survived: no "
            "test runs them | survived: further tests run them |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *(f"| `{name}` | {' | '.join(map(str, row))} |" for name, row in rows.items()),
            "",
            f"Files of tests that take more than {QUICK_S:.0f} s:",
            "",
            "| test file | seconds | mutants found | that only it finds |",
            "|---|---:|---:|---:|",
            *(f"| `{file}` | {took[file]:.0f} | {finds[file]} | {alone[file]} |" for file in slow if finds[file]),
            "",
            "And those that find none of these mutants: "
            + (", ".join(f"`{file}` ({took[file]:.0f} s)" for file in slow if not finds[file]) or "none")
            + ".",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
