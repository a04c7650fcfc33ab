"""docs/models.md says what the results say, of every architecture."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.models_page import PROPERTIES, STRATEGIES, WAYS, rendered
from tests.models.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date_and_has_a_row_for_every_architecture():
    page = (ROOT / "docs" / "models.md").read_text()
    assert page == rendered(), "run python scripts/models_page.py"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == sorted(
        ARCHITECTURES,
        key=lambda name: list(dict.fromkeys(a.kind for a in ARCHITECTURES.values())).index(ARCHITECTURES[name].kind),
    )
    assert all(cell.strip() for row in rows for cell in row.strip("|").split(" | "))


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
