from __future__ import annotations

import pytest

from tests.workers.engine.engine_cases import tiny_model
from tests.workers.engine.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """`models(architecture, tied)`: a model directory, made once."""
    base = tmp_path_factory.mktemp("models")
    return lambda architecture, tied=False: tiny_model(base, architecture, tied)
