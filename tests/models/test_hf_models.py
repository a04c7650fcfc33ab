"""Every architecture in the hf engine: what it says of each token is what transformers says of the sequence alone."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models import cases
from tests.models.architectures import ARCHITECTURES, NOT_COMPUTED
from verl.utils.config import ConfigError

CHANGE_LATER = frozenset({"doge", "minimax", "phi3-longrope", "llama-dynamic"})
"""transformers says something else of a token once others follow it: `doge` chooses keys of the whole row, positions
are stretched as the longest one asks, and the decay of `minimax` is a buffer, which the random checkpoint fills beyond
its diagonal, too."""


@pytest.mark.cells(8)
@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_log_probs_of_decoded_tokens_are_those_of_the_sequence_alone(name, checkpoints, record_property):
    if name in NOT_COMPUTED:
        record_property("refused", NOT_COMPUTED[name])
        with pytest.raises(ConfigError, match=NOT_COMPUTED[name]):
            await cases.decoded(checkpoints(name), cases.ORDERS)
        return
    model = cases.reference(checkpoints(name))[0]
    for together in await cases.decoded(checkpoints(name), cases.ORDERS):
        for prompt, output in together:
            if name in CHANGE_LATER:
                expected = cases.foretold_as_it_grows(lambda: copy.deepcopy(model), prompt, output.token_ids)
            else:
                expected = cases.foretold(model, prompt, output.token_ids)
            torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-4)


def test_names_are_of_architectures_that_exist():
    assert ARCHITECTURES.keys() >= CHANGE_LATER
