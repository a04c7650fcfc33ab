"""docs/conformance.md."""

from __future__ import annotations

import pytest

from scripts.conformance_page import CANNOT, PAGE, REPOSITORY, rendered


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text() == rendered(), "run python scripts/conformance_page.py"


@pytest.mark.parametrize("what", CANNOT)
def test_a_fault_that_cannot_happen_here_names_a_test_that_exists(what):
    _, _, file, name = CANNOT[what]
    assert f"def {name}" in (REPOSITORY / file).read_text()
