from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """`checkpoints(name)`: the directory of an architecture, in float32, made once."""
    from tests.models.architectures import ARCHITECTURES, write_checkpoint  # imports transformers

    base = tmp_path_factory.mktemp("architectures")

    def find(name: str):
        directory = base / name
        if not directory.exists():
            write_checkpoint(ARCHITECTURES[name], directory)
        return directory

    return find
