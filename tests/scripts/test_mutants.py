import pytest

from scripts import mutants
from scripts.mutants import Mutant, Usual

SOURCE = """
def half(number: int | None) -> int:
    if number is None:
        return 0
    return number // 2
"""


@pytest.mark.parametrize(
    ("was", "now", "differs"),
    [
        ("// 2", "* 2", True),
        ("int | None", "int + None", False),  # annotations are never evaluated
        ("// 2", "//", False),  # is no program
        ("is None", "is 0", False),  # Python itself warns
    ],
)
def test_a_mutant_is_a_program_that_does_something_else(was, now, differs):
    assert mutants.differs(SOURCE, SOURCE.replace(was, now)) == differs


def test_a_test_reaches_a_mutant_if_it_runs_that_statement_or_what_the_import_runs():
    assert [mutants.statement(SOURCE, line) for line in (3, 4)] == [(3,), (4,)]
    usual = {
        "a.py::slow": Usual(3.0, {"half.py": {3, 5}}),
        "b.py::quick": Usual(0.1, {"half.py": {3, 4}}),
        "c.py::other": Usual(0.1, {"other.py": {4}}),
    }
    at = {line: Mutant("half.py", line, (line,), "", "") for line in (3, 4, 1)}
    assert mutants.reaching(at[3], usual, 20) == [["b.py::quick"], ["a.py::slow"]]
    assert mutants.reaching(at[3], usual, 1) == [["b.py::quick"]]
    assert mutants.reaching(at[4], usual, 20) == [["b.py::quick"]]
    assert mutants.reaching(at[1], usual, 20) == [["b.py::quick"], ["a.py::slow"]]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def judged(*files):
    chosen = [[f"{file}::{name}" for name in names] for file, *names in files]
    return mutants.judged(chosen, {name: Usual(0.0) for names in chosen for name in names}, every_test=False)


def test_each_file_runs_up_to_its_first_red_test(tree):
    (tree / "test_a.py").write_text("def test_ok(): pass\ndef test_red(): assert 0\ndef test_red_too(): assert 0\n")
    (tree / "test_b.py").write_text("import nothing_of_this_name\ndef test_of_it(): pass\n")
    (tree / "test_c.py").write_text("def test_not_chosen(): assert 0\ndef test_chosen(): pass\n")
    files = [("test_a.py", "test_ok", "test_red", "test_red_too"), ("test_b.py", "test_of_it")]
    assert judged(*files, ("test_c.py", "test_chosen")) == ["test_a.py::test_red", "test_b.py"]


def test_a_test_that_hangs_is_red_and_ends(tree, monkeypatch):
    (tree / "test_a.py").write_text("import time\ndef test_hangs(): time.sleep(600)\n")
    monkeypatch.setattr(mutants, "PATIENCE_S", 0.5)
    assert judged(("test_a.py", "test_hangs")) == ["test_a.py::test_hangs"]


def test_the_page_keeps_the_sections_of_other_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "PAGE", tmp_path / "mutants.md")
    found = [
        {"found_by": ["tests/a.py::one", "tests/a.py::two"], "tests": 3},
        {"found_by": ["tests/a.py::one", "tests/b.py::one"], "tests": 3},
        {"found_by": [], "tests": 0},
    ]
    for package in ("verl/b", "verl/a", "verl/b"):
        mutants.write_page(package, 7, found, {"tests/a.py::one": 1.0, "tests/a.py::two": 0.5, "tests/b.py::one": 2.0})
    text = mutants.PAGE.read_text()
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# Mutants", "## `verl/a`", "## `verl/b`"]
    assert text.count("3 mutants (seed 7): 2 found, 1 that no test of these reaches.") == 2
    assert text.count("| `tests/a.py` | 1.5 | 2 | 1 |\n| `tests/b.py` | 2.0 | 1 | 0 |\n") == 2
