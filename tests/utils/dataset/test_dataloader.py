import json
import pickle

import pytest
import torch

from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.utils.dataset import RLHFDataset, build_dataloader, fingerprint
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


@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("consumed", [3, 5])
def test_the_position_does_not_depend_on_the_number_of_loader_processes(make_loader, consumed, workers):
    uninterrupted = order(make_loader(), epochs=3)
    state = consume(make_loader(dataloader_num_workers=workers[0]), consumed)[1]
    restored = make_loader(dataloader_num_workers=workers[1])
    restored.load_state_dict(json.loads(json.dumps(pickle.loads(state))))
    assert consume(restored, 4)[0] == uninterrupted[consumed : consumed + 4]


def test_with_another_batch_size_no_sample_comes_twice(write, tokenizer):
    dataset = RLHFDataset([write([str(number) for number in range(20)])], tokenizer, DataConfig())
    loaders = [build_dataloader(dataset, DataConfig(), batch_size=size, shuffle=True) for size in (4, 5)]
    seen, state = consume(loaders[0], 3)
    loaders[1].load_state_dict(pickle.loads(state))
    rest = order(loaders[1])
    assert [len(batch) for batch in rest] == [5, 3]
    assert sorted(sum(seen + rest, [])) == list(range(100, 120))


@pytest.fixture
def saved_and_other(tmp_path, write, tokenizer):
    """The state of a loader after three batches, and a loader of other data."""

    def make(rows=20, source="a", seed=1, shuffle=True, **config):
        data = DataConfig(seed=seed, **config)
        dataset = RLHFDataset([write([str(number) for number in range(rows)])], tokenizer, data)
        return build_dataloader(dataset, data, batch_size=4, shuffle=shuffle, drop_last=True, source=source)

    return consume(make(), 3)[1], make


OTHER = [
    ({"rows": 8}, "20 training samples, not 8"),
    ({"rows": 24}, "20 training samples, not 24"),
    ({"seed": 2}, "data.seed=1, not 2"),
    ({"shuffle": False}, "data.shuffle=True, not False"),
    ({"source": "b"}, "the hash a, not b"),
]


@pytest.mark.parametrize(("other", "words"), OTHER)
def test_a_position_in_other_data_is_an_error_that_names_the_difference(saved_and_other, other, words):
    state, make = saved_and_other
    for act in ("check", "load_state_dict"):
        with pytest.raises(ConfigError, match=f"{words}.*resume_other_data=new_epoch"):
            getattr(make(**other), act)(pickle.loads(state))


@pytest.mark.parametrize(("other", "words"), OTHER)
def test_a_new_epoch_of_other_data_is_begun_and_told_if_it_is_asked_for(saved_and_other, caplog, other, words):
    state, make = saved_and_other
    loader = make(**other, resume_other_data="new_epoch")
    loader.check(pickle.loads(state))
    loader.load_state_dict(pickle.loads(state))
    assert f"{words}: a new epoch begins" in caplog.text
    assert order(loader) == order(make(**other), epochs=2)[len(loader) :]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"_snapshot": {}},
        {"epoch": 0, "position": 0},
        {"epoch": -1, "position": 0, "data": {}},
        {"epoch": True, "position": 0, "data": {}},
        {"epoch": 0, "position": "4", "data": {}},
        {"epoch": 0, "position": 0, "data": []},
        {"epoch": 0, "position": 21, "data": {"rows": 20, "seed": 1, "shuffle": True, "source": ""}},
    ],
)
def test_what_is_no_position_is_an_error(make_loader, state):
    with pytest.raises(ConfigError, match=r"no position in the data|after 21 samples of an epoch that has 20"):
        make_loader().load_state_dict(state)


def test_a_fingerprint_depends_on_content_and_order_and_not_on_places(tmp_path):
    for name, text in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / name).write_text(text)
    of = lambda names: fingerprint([tmp_path / name for name in names])  # noqa: E731
    assert of("ab") == of("cb") != of("ba")
    assert of("a") != of("b")
