"""What a collective call keeps of the errors with which it ends."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt
import pytest

from verl.checkpoint_engine.parameter_server.collective_calls import release_frames


def failing_with(memory: npt.NDArray[np.uint8]) -> ValueError:
    with pytest.raises(ValueError, match="cannot reshape") as caught:
        memory.reshape(3)
    return caught.value


def test_errors_that_lead_back_to_each_other_let_go_of_what_their_frames_held():
    memory = np.zeros(8, np.uint8)
    alive = weakref.ref(memory)
    first, second = failing_with(memory), failing_with(memory)
    first.__cause__, second.__context__ = second, first
    del memory
    assert alive() is not None
    release_frames(first)
    assert alive() is None
