import pickle

import pytest
import torch

from verl.protocol import DataProto
from verl.utils.dataset import RLHFDataset, build_dataloader
from verl.workers.config import DataConfig

BATCHES = 5  # of 20 samples, 4 each


@pytest.fixture
def make_loader(write, tokenizer):
    dataset = RLHFDataset([write([str(number) for number in range(20)])], tokenizer, DataConfig())

    def make(seed=1, **config):
        return build_dataloader(dataset, DataConfig(seed=seed, **config), batch_size=4, shuffle=True, drop_last=True)

    return make


def order(loader, epochs=1):
    return [batch["index"].tolist() for _ in range(epochs) for batch in loader]


def test_a_batch_becomes_a_dataproto(make_loader):
    batch = DataProto.from_dict(non_tensors=next(iter(make_loader())))
    assert len(batch) == 4
    assert {"prompt_ids", "raw_prompt", "data_source", "reward_model", "extra_info", "index"} <= set(
        batch.non_tensor_batch
    )
    assert isinstance(batch.non_tensor_batch["prompt_ids"][0], list)


def test_the_order_depends_on_the_seed_alone_and_changes_every_epoch(make_loader):
    first = order(make_loader(), epochs=2)
    assert first == order(make_loader(), epochs=2)
    assert first != order(make_loader(seed=2), epochs=2)
    assert first[:BATCHES] != first[BATCHES:]
    assert sorted(sum(first[:BATCHES], [])) == sorted(sum(first[BATCHES:], [])) == list(range(100, 120))


def consume(loader, count):
    """The indices of the next `count` batches, over epochs, and the state right after the last one."""
    seen = []
    while True:
        for batch in loader:
            seen.append(batch["index"].tolist())
            if len(seen) == count:
                return seen, pickle.dumps(loader.state_dict())


@pytest.mark.parametrize(("consumed", "workers"), [*((count, 0) for count in (1, 3, 4, 5, 6, 9, 10)), (3, 2), (5, 2)])
def test_a_restored_loader_goes_on_with_the_batches_that_would_have_come(make_loader, consumed, workers):
    uninterrupted = order(make_loader(), epochs=5)
    seen, state = consume(make_loader(dataloader_num_workers=workers), consumed)
    assert seen == uninterrupted[:consumed]
    restored = make_loader(dataloader_num_workers=workers)
    restored.load_state_dict(pickle.loads(state))
    count = 2 * BATCHES
    assert consume(restored, count)[0] == uninterrupted[consumed : consumed + count]


def test_a_state_taken_between_epochs_goes_on_with_the_next_epoch(make_loader):
    uninterrupted = order(make_loader(), epochs=3)
    loader = make_loader()
    order(loader)
    restored = make_loader()
    restored.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert order(restored, epochs=2) == order(loader, epochs=2) == uninterrupted[BATCHES:]


def test_the_global_random_state_neither_matters_nor_changes(make_loader):
    torch.manual_seed(1)
    first, state = order(make_loader(), epochs=2), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert order(make_loader(), epochs=2) == first
