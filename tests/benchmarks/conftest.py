from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def of_all_tests(forkserver):
    """Benchmarks start the server with what they need alone, if it does not run."""
