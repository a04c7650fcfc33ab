"""The wheel `verl-sync-engine`, built and installed once for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributions.environments import install


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("installed"))
