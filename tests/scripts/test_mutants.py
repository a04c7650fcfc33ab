import pytest

from scripts import mutants
from scripts.mutants import Place, Usual

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
    assert [mutants.statement(SOURCE, line) for line in (3, 4)] == [{3}, {4}]
    usual = {
        "a.py::slow": Usual(3.0, {"half.py": {3, 5}}),
        "b.py::quick": Usual(0.1, {"half.py": {3, 4}}),
        "c.py::other": Usual(0.1, {"other.py": {4}}),
    }
    assert mutants.reaching("half.py", {3}, usual, 20) == ([["b.py::quick"], ["a.py::slow"]], 0)
    assert mutants.reaching("half.py", {3}, usual, 1) == ([["b.py::quick"]], 1)
    assert mutants.reaching("half.py", {3}, usual, 20, tried_s=1) == ([["a.py::slow"]], 0)
    assert mutants.reaching("half.py", {4}, usual, 20) == ([["b.py::quick"]], 0)
    assert mutants.reaching("half.py", {1}, usual, 20) == ([["b.py::quick"], ["a.py::slow"]], 0)
    usual |= {f"test_half.py::{name}": Usual(0.4, {"half.py": {3}}) for name in ("first", "second")}
    chosen = [["b.py::quick"], ["test_half.py::first", "test_half.py::second"]]
    assert mutants.reaching("half.py", {3}, usual | {"b.py::next": Usual(0.2, {"half.py": {3}})}, 1) == (chosen, 2)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def judged(*files):
    chosen = [[f"{file}::{name}" for name in names] for file, *names in files]
    return mutants.judged_anew(chosen, {name: Usual(0.0) for names in chosen for name in names}, "")


def test_each_file_runs_up_to_its_first_red_test_until_two_files_are_red(tree):
    (tree / "test_a.py").write_text("def test_ok(): pass\ndef test_red(): assert 0\ndef test_red_too(): assert 0\n")
    (tree / "test_b.py").write_text("import nothing_of_this_name\ndef test_of_it(): pass\n")
    (tree / "test_c.py").write_text("def test_not_chosen(): assert 0\ndef test_chosen(): pass\n")
    (tree / "test_d.py").write_text("def test_red(): assert 0\n")
    chosen, red = ("test_c.py", "test_chosen"), ("test_d.py", "test_red")
    files = [("test_a.py", "test_ok", "test_red", "test_red_too"), ("test_b.py", "test_of_it")]
    assert judged(chosen, *files, red) == ["test_a.py::test_red", "test_b.py"]
    assert judged(chosen, files[0], red) == ["test_a.py::test_red", "test_d.py::test_red"]


def test_a_test_that_hangs_is_red_and_ends(tree, monkeypatch):
    (tree / "test_a.py").write_text("import time\ndef test_hangs(): time.sleep(600)\n")
    monkeypatch.setattr(mutants, "PATIENCE_S", 0.5)
    assert judged(("test_a.py", "test_hangs")) == ["test_a.py::test_hangs"]


@pytest.mark.parametrize(
    ("was", "now", "functions"),
    [
        ("// 2", "* 2", ["half"]),
        ("(number: int | None)", "(number: int | None = 1)", None),
        ("def half", "LIMIT = 1\n\ndef half", None),
    ],
)
def test_a_mutant_within_a_function_needs_no_import(was, now, functions):
    codes = [compile(source, "half.py", "exec") for source in (SOURCE, SOURCE.replace(was, now))]
    new = mutants.replacements(*codes)
    assert functions == (new if new is None else [code.co_name for code in new])


def test_the_table_has_a_row_for_each_package_and_for_each_long_file():
    lines = {"verl/a/x.py": {1}}
    usual = {"tests/a.py::one": Usual(7.0, lines), "tests/a.py::two": Usual(0.5, lines)}
    usual |= {"tests/b.py::one": Usual(2.0, lines), "tests/c.py::elsewhere": Usual(9.0)}
    by = [["tests/a.py::one", "tests/a.py::two"], ["tests/a.py::one", "tests/b.py::one"], [], [], []]
    left, runs = [0, 0, 0, 0, 3], [True, True, True, False, False]
    found = {
        Place(f"verl/{name}/x.py", line, 0, "AddNot", 0): {"found_by": by[line], "runs": runs[line], "left": left[line]}
        for line, name in enumerate("aabbb")
    }
    told = mutants.table(["verl/a", "verl/b"], found, usual)
    assert "| `verl/a` | 2 | 2 | 1 | 0 | 0 | 0 |\n| `verl/b` | 3 | 0 | 0 | 1 | 1 | 1 |\n" in told
    assert "| `tests/a.py` | 8 | 2 | 1 |\n" in told
    assert "tests/b.py" not in told
    assert "tests/c.py" not in told
