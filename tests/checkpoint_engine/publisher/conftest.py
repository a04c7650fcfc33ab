from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.workers.engine.rank_pool import RankPool


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_SHM_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(function, world_size, *arguments)`: two ranks that publish."""
    from tests.workers.engine.rank_pool import RankPool  # not where the tests of the other distribution run

    pool = RankPool(2)
    yield pool
    pool.close()
