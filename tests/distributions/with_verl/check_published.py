"""Tensors that come one after the other, into an arena. Run against the wheel: see `test_for_verl.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from verl_sync.errors import IntegrityError, PlanError
from verl_sync.for_verl.published import PublishedWeights, verified


def weights(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(3000, 200, generator=made).to(torch.bfloat16),
        "layer": torch.randn(40, 7, generator=made).t(),
        "scale": torch.randn((), generator=made),
        "nothing": torch.empty(0, 4),
    }


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishedWeights]:
    monkeypatch.setenv("VERL_SHM_DIR", str(tmp_path))
    made = PublishedWeights(job="test", slots=2)
    yield made
    made.close()


def served(published: PublishedWeights, version: int) -> dict[str, torch.Tensor]:
    with verified(published.path, version) as tensors:
        return {name: tensor.clone() for name, tensor in tensors}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_every_version_arrives_bit_for_bit(published: PublishedWeights):
    for version in (1, 2, 3):
        published.publish(version, iter(weights(version).items()))
        assert same(served(published, version), weights(version))


def test_the_sender_may_use_its_memory_again_and_send_in_another_order(published: PublishedWeights):
    published.publish(1, iter(weights(1).items()))
    buffer = torch.empty(3000 * 200 * 4, dtype=torch.uint8)

    def reusing() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in reversed(weights(2).items()):
            place = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)
            yield name, place

    published.publish(2, reusing())
    assert same(served(published, 2), weights(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": None}, "not sent this time: layer"),
        ({"nothing": None}, "not sent this time: nothing"),
        ({"more": torch.ones(1)}, "more was not in the version before"),
        ({"layer": torch.ones(7, 41)}, r"layer, float32 of shape \(7, 40\), is now"),
        ({"layer": torch.ones(7, 40, dtype=torch.float16)}, "is now torch.float16"),
    ],
)
def test_a_version_of_another_model_is_refused_and_the_one_before_stays(
    published: PublishedWeights, change: dict[str, torch.Tensor | None], message: str
):
    published.publish(1, iter(weights(1).items()))
    changed = {name: tensor for name, tensor in (weights(2) | change).items() if tensor is not None}
    with pytest.raises(PlanError, match=message):
        published.publish(2, iter(changed.items()))
    assert same(served(published, 1), weights(1))
    published.publish(3, iter(weights(3).items()))
    assert same(served(published, 3), weights(3))


def test_a_tensor_that_is_sent_twice_is_refused(published: PublishedWeights):
    published.publish(1, iter(weights(1).items()))
    with pytest.raises(PlanError, match="embed is sent twice"):
        published.publish(2, [*weights(2).items(), *weights(2).items()])


def test_a_flipped_bit_and_an_old_version_are_noticed(published: PublishedWeights):
    published.publish(1, iter(weights(1).items()))
    with pytest.raises(IntegrityError), verified(published.path, 2):
        pass
    (slot,) = (path for path in Path(published.path).glob("slot-*") if path.suffix != ".manifest" and used(path))
    with slot.open("r+b") as file:
        file.seek(4711)
        (byte,) = file.read(1)
        file.seek(4711)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(IntegrityError, match="embed"), verified(published.path, 1):
        pass


def used(slot: Path) -> bool:
    return slot.with_name(slot.name + ".manifest").exists()
