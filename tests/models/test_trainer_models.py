"""Every architecture in the training engines: what is trained, computed, sent and exported is what the checkpoint says.

A cell of the matrix is right, or the build refuses by name and REFUSED says why. scripts/models_page.py makes
docs/models.md of a run of this file.
"""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch

from tests.models import cases
from tests.models.architectures import ARCHITECTURES, NOT_COMPUTED, write_checkpoint
from tests.models.cases import Built, differences

REFUSED = NOT_COMPUTED
"""Architecture: what its refusal says, in the words of the message. Every property of its row is then "refused"."""

STRETCHED = frozenset({"phi3-longrope", "llama-dynamic"})
"""A buffer of each is of the longest sequence of the last call, and the build has called it."""

# Of two days, each tries every architecture with one of them: what they share is all but how parameters are cut.
pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.cells(4, by="cell")]
STRATEGIES = ("fsdp2", "fsdp")
# Neighbours have their reference in common.
CELLS = [(strategy, name) for name in ARCHITECTURES for strategy in STRATEGIES]


@pytest.fixture(scope="module")
def references(checkpoints):
    """`references(name)`: transformers' own model in float32, eager."""
    return functools.lru_cache(maxsize=1)(lambda name: cases.reference(checkpoints(name))[0])


@pytest.fixture(scope="module")
def rounded_files(tmp_path_factory):
    """`rounded_files(name)`: the tensors of the architecture's checkpoint in bfloat16."""

    @functools.lru_cache(maxsize=1)
    def tensors(name: str) -> dict[str, torch.Tensor]:
        directory = tmp_path_factory.mktemp("bfloat16")
        write_checkpoint(ARCHITECTURES[name], directory, dtype=torch.bfloat16)
        return cases.file_tensors(directory)

    return tensors


@pytest.fixture(scope="module", params=CELLS, ids=lambda cell: "-".join(cell))
def cell(request) -> tuple[str, str]:
    """Strategy and architecture. All properties of one are tested in a row, so that it is built once."""
    return request.param


@pytest.fixture(scope="module")
def attempt(cell, checkpoints) -> Built:
    strategy, name = cell
    return cases.build(checkpoints(name), strategy)


@pytest.fixture
def built(cell, attempt, record_property) -> Built | None:
    """None: it is refused, as REFUSED says."""
    expected = REFUSED.get(cell[1])
    if attempt.refusal is None:
        assert expected is None, f"{cell[1]} can be built now: delete its entry in REFUSED"
        return attempt
    assert expected is not None, f"refused: {attempt.refusal}"
    assert expected in str(attempt.refusal)
    record_property("refused", expected)
    return None


def test_parameters_and_buffers_equal_those_of_transformers(built, cell, references):
    if built is not None:
        if cell[1] in STRETCHED:
            cases.log_probs(built.engine, cases.padded_batch()[[cases.SHORTEST]])
        expected = cases.parameters_and_buffers(references(cell[1]))
        assert differences(cases.parameters_and_buffers(built.model), expected) == []


def test_log_probs_equal_the_eager_reference_packed_and_in_rows_that_were_padded(built, cell, references):
    if built is not None:
        data = cases.padded_batch()
        expected = cases.reference_log_probs(references(cell[1]), data)
        for neighbours, offset in product(cases.NEIGHBOURHOODS, cases.OFFSETS):
            together, rows = cases.placed(data, neighbours, offset)
            found = cases.log_probs(built.engine, together)
            assert (found - expected[rows]).abs().amax(1).tolist() == pytest.approx([0.0] * len(rows), abs=1e-4)


def test_the_weight_source_has_the_bytes_of_the_checkpoint(built):
    if built is not None:
        sent = cases.sent(built.engine, "float32")
        file = cases.file_tensors(built.directory)
        kept = {name for name in file if name.startswith(cases.EXTRA)} - sent.keys()
        assert differences(sent, {name: tensor for name, tensor in file.items() if name not in kept}) == []


def test_the_weight_source_casts_all_but_what_stays_in_float32(built, cell, references, rounded_files):
    if built is not None:
        whole, rounded = cases.file_tensors(built.directory), dict(rounded_files(cell[1]))
        sent = cases.sent(built.engine, "bfloat16")
        for name, tensor in sent.items():
            if tensor.dtype == torch.float32 and cases.may_stay_wide(references(cell[1]), name):
                rounded[name] = whole[name]
        kept = {name for name in rounded if name.startswith(cases.EXTRA)} - sent.keys()
        assert differences(sent, {name: tensor for name, tensor in rounded.items() if name not in kept}) == []


def test_an_export_has_the_tensors_of_the_source_and_transformers_loads_them_all(built, cell, references, tmp_path):
    if built is not None:
        built.engine.export_hf(tmp_path)
        assert differences(cases.file_tensors(tmp_path), cases.file_tensors(built.directory)) == []
        model, info = cases.reference(tmp_path)
        assert info == {}
        expected = cases.parameters_and_buffers(references(cell[1]))
        assert differences(cases.parameters_and_buffers(model), expected) == []


def test_gradients_of_one_micro_batch_are_those_row_by_row_tensor_by_tensor(built, cell, references):
    """The last property of a cell: it changes the weights, and what the optimizer remembers."""
    if built is not None:
        data = cases.padded_batch()
        expected = cases.reference_gradients(references(cell[1]), data)
        weights = {name: tensor.clone() for name, tensor in built.engine.snapshot().items()}
        for offset in cases.OFFSETS:
            placed, _ = cases.placed(data, range(len(data)), offset)
            assert cases.other_gradients(cases.gradients(built.engine, placed), expected) == {}
            built.engine.restore(weights)


def test_gradients_of_the_right_norm_that_are_others_are_told():
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 2.0])}
    turned = {"a": torch.tensor([4.0, 3.0]), "b": torch.tensor([0.0, 2.0])}
    assert cases.other_gradients(expected, expected) == {}
    assert cases.other_gradients(turned, expected).keys() == {"a"}
    with pytest.raises(AssertionError, match="no gradients of"):
        cases.other_gradients({"a": expected["a"]}, expected)


def test_refusals_are_of_architectures_that_exist():
    assert REFUSED.keys() | STRETCHED <= ARCHITECTURES.keys()
