"""Whatever happens to model, publisher and server between pushes: after each push the server computes with what the
model holds, or the push raised, and the server computes with the version that it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint_engine.publisher.random_pushes import one_rank, run_with_stand_in
from tests.checkpoint_engine.publisher.victims import Victims


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    with one_rank(), Victims() as victims:
        yield victims


@pytest.mark.parametrize("seed", range(20))
def test_a_push_is_what_the_model_holds_or_an_error_and_the_server_says_the_truth(
    seed: int, victims: Victims, shm: Path
):
    run_with_stand_in(seed, victims, shm)
