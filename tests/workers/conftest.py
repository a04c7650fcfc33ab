from __future__ import annotations

import pytest

from tests.workers.engine.rank_pool import RankPool


@pytest.fixture(scope="module")
def ranks():
    """`ranks.run(function, world_size, *arguments)`: up to four trainer ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """`models(architecture, tied)`: a model directory, made once."""
    from tests.workers.engine.engine_cases import tiny_model  # imports transformers, which most tests do without

    base = tmp_path_factory.mktemp("models")
    return lambda architecture, tied=False: tiny_model(base, architecture, tied)
