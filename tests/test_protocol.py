import pickle

import numpy as np
import pytest
import ray
import torch

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto


def make(size=4, **meta):
    return DataProto.from_dict(
        tensors={"a": torch.arange(size), "b": torch.arange(size * 3.0).reshape(size, 3)},
        non_tensors={"uid": [f"u{i}" for i in range(size)], "raw_prompt": [[{"role": "user"}]] * size},
        meta_info=meta,
    )


def rows(data):
    return data.batch["a"].tolist(), data.non_tensor_batch["uid"].tolist()


def test_lists_of_equal_length_stay_one_object_per_sample():
    data = DataProto.from_dict(non_tensors={"raw_prompt": [["x", "y"], ["z", "w"]], "m": np.ones((2, 3))})
    assert len(data) == 2
    assert data.non_tensor_batch["raw_prompt"].shape == (2,)
    assert data.non_tensor_batch["raw_prompt"][1] == ["z", "w"]
    assert data.non_tensor_batch["m"].shape == (2,)
    assert data.non_tensor_batch["m"][0].tolist() == [1, 1, 1]


def test_sizes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"\{'a': 2, 'b': 3\}"):
        DataProto.from_dict(tensors={"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"\{'a': None\}"):
        DataProto.from_dict(tensors={"a": torch.tensor(1)})
    with pytest.raises(ValueError, match=r"'uid'\] has 3 entries, the batch has 2"):
        DataProto.from_dict(tensors={"a": torch.zeros(2)}, non_tensors={"uid": [1, 2, 3]})


def test_from_single_dict_sorts_tensors_from_objects():
    data = DataProto.from_single_dict({"a": torch.zeros(2), "uid": ["x", "y"]}, meta_info={"step": 1})
    assert set(data.batch.keys()) == {"a"}
    assert list(data.non_tensor_batch) == ["uid"]
    assert data.meta_info == {"step": 1}


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [1, 2]),
        ([3, 0, 0], [3, 0, 0]),
        (np.array([2]), [2]),
        (torch.tensor([1, -1]), [1, 3]),
        ([], []),
        (np.array([True, False, False, True]), [0, 3]),
        (torch.tensor([False, True, False, False]), [1]),
    ],
)
def test_an_index_selects_the_same_samples_of_tensors_and_objects(index, expected):
    assert rows(make(step=1)[index]) == (expected, [f"u{i}" for i in expected])
    assert make(step=1)[index].meta_info == {"step": 1}


def test_bad_indices_are_told_apart():
    with pytest.raises(TypeError, match="one-dimensional array"):
        make()[[[1]]]
    with pytest.raises(IndexError, match="sample 4 of 4"):
        make()[4]
    with pytest.raises(IndexError, match=r"positions 0..4 for 4 samples"):
        make()[[0, 4]]
    with pytest.raises(IndexError, match="mask of 2 entries for 4"):
        make()[[True, False]]


def test_select_and_pop_take_the_named_parts():
    data = make(step=1, temperature=0.5)
    selected = data.select(batch_keys=["a"], non_tensor_batch_keys=["uid"])
    assert set(selected.batch.keys()) == {"a"}
    assert list(selected.non_tensor_batch) == ["uid"]
    popped = data.pop(batch_keys=["a"], non_tensor_batch_keys=["uid"], meta_info_keys=["step"])
    assert rows(popped) == rows(selected)
    assert popped.meta_info == {"step": 1}
    assert set(data.batch.keys()) == {"b"}
    assert list(data.non_tensor_batch) == ["raw_prompt"]
    assert data.meta_info == {"temperature": 0.5}


def test_a_missing_key_is_named_and_nothing_is_popped():
    data = make()
    with pytest.raises(KeyError, match=r"batch has no \['c'\]; it has \['a', 'b'\]"):
        data.pop(batch_keys=["a", "c"])
    assert "a" in data.batch.keys()  # noqa: SIM118 (a TensorDict is no dict)
    with pytest.raises(KeyError, match="non_tensor_batch has no"):
        data.select(non_tensor_batch_keys=["nothing"])


def test_union_adds_keys_in_place_and_returns_itself():
    data, scores = make(), DataProto.from_dict(tensors={"score": torch.ones(4)}, meta_info={"step": 2})
    assert data.union(scores) is data
    assert set(data.batch.keys()) == {"a", "b", "score"}
    assert data.meta_info == {"step": 2}
    data.union(DataProto(meta_info={"more": [float("nan")]}))
    assert set(scores.batch.keys()) == {"score"}


def test_union_refuses_other_values_under_the_same_key_and_other_lengths():
    other = make()
    other.batch["a"] = other.batch["a"] + 1
    with pytest.raises(ValueError, match=r"batch has other values under \['a'\]"):
        make().union(other)
    with pytest.raises(ValueError, match=r"meta_info has other values under \['step'\]"):
        make(step=1).union(make(step=2))
    with pytest.raises(ValueError, match="union of 4 samples with 3 samples"):
        make().union(make(3))
    same = DataProto.from_dict(tensors={"x": torch.tensor([float("nan")] * 4)}, non_tensors={"o": [np.ones(2)] * 4})
    copy = pickle.loads(pickle.dumps(same))
    assert len(same.union(copy)) == 4


def test_chunk_split_and_concat_are_inverse():
    data = make(6, step=1)
    for parts in (data.chunk(3), data.split(4)):
        assert rows(DataProto.concat(parts)) == rows(data)
    assert [len(part) for part in data.split(4)] == [4, 2]
    with pytest.raises(ValueError, match="6 samples cannot be split into 4 equal chunks"):
        data.chunk(4)


def test_concat_collects_metrics_and_refuses_what_differs():
    parts = [make(2, metrics={"loss": 1.0, "n": [1, 2]}, step=3), make(2, metrics={"loss": 2.0, "n": [3]})]
    joined = DataProto.concat(parts)
    assert joined.meta_info == {"step": 3, "metrics": {"loss": [1.0, 2.0], "n": [1, 2, 3]}}
    with pytest.raises(ValueError, match=r"other values under \['step'\]"):
        DataProto.concat([make(step=1), make(step=2)])
    with pytest.raises(ValueError, match=r"part 1 differs from part 0: \{'b': \('torch.float32 \[3\]', 'missing'\)\}"):
        DataProto.concat([make(), make().select(batch_keys=["a"])])
    wide = DataProto.from_dict(tensors={"a": torch.zeros(1, 5)})
    with pytest.raises(ValueError, match=r"float32 \[4\]', 'torch.float32 \[5\]'"):
        DataProto.concat([DataProto.from_dict(tensors={"a": torch.zeros(1, 4)}), wide])


def test_repeat_interleaved_and_not():
    assert make(2).repeat(2).batch["a"].tolist() == [0, 0, 1, 1]
    assert rows(make(2).repeat(2, interleave=False)) == ([0, 1, 0, 1], ["u0", "u1", "u0", "u1"])


def test_reorder_permutes_in_place():
    data = make()
    assert data.reorder(torch.tensor([3, 1, 0, 2])) is data
    assert rows(data) == ([3, 1, 0, 2], ["u3", "u1", "u0", "u2"])
    with pytest.raises(ValueError, match="permutation of 4 samples"):
        data.reorder([0, 0, 1, 2])


@pytest.mark.parametrize(("size", "divisor", "pad"), [(4, 2, 0), (5, 4, 3), (1, 4, 3), (3, 8, 5)])
def test_padding_repeats_from_the_start_and_unpadding_undoes_it(size, divisor, pad):
    padded, pad_size = pad_dataproto_to_divisor(make(size), divisor)
    assert pad_size == pad
    assert padded.batch["a"].tolist() == [i % size for i in range(size + pad)]
    assert rows(unpad_dataproto(padded, pad_size)) == rows(make(size))


def test_an_empty_batch_cannot_be_padded():
    assert len(DataProto()) == 0
    with pytest.raises(ValueError, match="empty batch"):
        pad_dataproto_to_divisor(DataProto(), 2)


def test_a_pickled_chunk_carries_its_own_rows_only():
    data = DataProto.from_dict(tensors={"x": torch.zeros(1000, 1000)})
    assert len(pickle.dumps(data[:1])) < 10_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 0), (0, 3)])
def test_every_dtype_and_shape_survives_pickling(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    copy = pickle.loads(pickle.dumps(DataProto.from_dict(tensors={"x": tensor})))
    assert copy.batch["x"].dtype == dtype
    assert torch.equal(copy.batch["x"], tensor)
    assert len(copy) == shape[0]


def test_strided_views_with_gradient_arrive_detached():
    tensor = torch.arange(12.0, requires_grad=True).reshape(3, 4).t()
    copy = pickle.loads(pickle.dumps(DataProto.from_dict(tensors={"x": tensor})))
    assert torch.equal(copy.batch["x"], tensor.detach())
    assert not copy.batch["x"].requires_grad


def test_what_comes_out_of_the_object_store_is_writable(ray_cluster):
    data = DataProto.from_dict(tensors={"x": torch.zeros(1000, 1000)}, non_tensors={"uid": list(range(1000))})
    copy = ray.get(ray.put(data))
    copy.batch["x"] += 1
    copy.non_tensor_batch["uid"][0] = "changed"
    assert float(copy.batch["x"].sum()) == 1e6
    assert float(data.batch["x"].sum()) == 0


def test_a_number_selects_one_sample():
    item = make(step=1)[np.int64(-1)]
    assert (item.batch["a"].item(), item.batch["b"].tolist()) == (3, [9.0, 10.0, 11.0])
    assert item.non_tensor_batch == {"uid": "u3", "raw_prompt": [{"role": "user"}]}
    assert item.meta_info == {"step": 1}


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (lambda data: data.slice(1, 3), [1, 2]),
        (lambda data: data.slice(end=1), [0]),
        (lambda data: data.slice(step=-2), [3, 1]),
        (lambda data: data.select_idxs([2, 2]), [2, 2]),
        (lambda data: data.select_idxs(torch.tensor([True, False, True, False])), [0, 2]),
        (lambda data: data.repeat(repeat_times=2, interleave=True), [0, 0, 1, 1, 2, 2, 3, 3]),
        (lambda data: data.repeat(), [0, 0, 1, 1, 2, 2, 3, 3]),
        (lambda data: data.sample_level_repeat(torch.tensor([0, 2, 1, 0])), [1, 1, 2]),
        (lambda data: data.padding(2, "last"), [0, 1, 2, 3, 3, 3]),
        (lambda data: data.split(split_size=3)[1], [3]),
        (lambda data: data.chunk(chunks=2)[1], [2, 3]),
        (lambda data: DataProto.concat(data=data.chunk(4)), [0, 1, 2, 3]),
        (lambda data: pad_dataproto_to_divisor(data, size_divisor=3)[0], [0, 1, 2, 3, 0, 1]),
        (lambda data: DataProto.from_tensordict(data.to_tensordict()), [0, 1, 2, 3]),
        (lambda data: data.to("cpu"), [0, 1, 2, 3]),
        (lambda data: data.select(["a"], ["uid"], deepcopy=True), [0, 1, 2, 3]),
    ],
)
def test_verls_methods_and_keywords(select, expected):
    chosen = select(make(step=1))
    assert rows(chosen) == (expected, [f"u{i}" for i in expected])
    assert chosen.meta_info == {"step": 1}


def test_rename_gives_tensors_other_names_in_place():
    data = make()
    assert data.rename("a", "c") is data
    assert list(data.rename(["b", "c"], ["c", "b"]).batch.keys()) == ["b", "c"]
    assert data.batch["b"].tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError, match=r"batch has no \['a'\]"):
        data.rename("a", "d")
    for new in ("c", ["d", "e"]):
        with pytest.raises(ValueError, match="one name of its own"):
            data.rename("b", new)


def test_an_iterator_gives_every_sample_once_per_epoch_in_an_order_that_the_seed_decides():
    def order(**arguments):
        return [part.batch["a"].tolist() for part in make(step=1).make_iterator(2, epochs=2, **arguments)]

    assert order() == [[0, 1], [2, 3]] * 2
    shuffled = order(seed=3, dataloader_kwargs={"shuffle": True})
    assert shuffled == order(seed=3, dataloader_kwargs={"shuffle": True}) != order()
    assert sorted(sum(shuffled[:2], [])) == sorted(sum(shuffled[2:], [])) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4 samples cannot be split into mini-batches of 3"):
        make().make_iterator(3, epochs=1)


def test_samples_survive_the_disk(tmp_path):
    make(step=1).save_to_disk(tmp_path / "batch.pkl")
    loaded = DataProto.load_from_disk(tmp_path / "batch.pkl")
    assert (rows(loaded), loaded.meta_info) == (rows(make()), {"step": 1})


def test_a_padded_batch_may_be_cut_into_parts_that_differ():
    data = DataProto.from_dict({"a": torch.arange(5)}, auto_padding=True)
    assert data.is_padding_enabled()
    assert [len(part) for part in data.chunk(2)] == [3, 2]
    assert not make().is_padding_enabled()


def test_columns_unfold_into_samples_and_the_rest_is_repeated():
    data = DataProto.from_dict(
        tensors={"pair": torch.arange(12).reshape(2, 2, 3), "label": torch.tensor([7, 8])},
        non_tensors={"texts": [["a", "b", "c", "d"], ["e", "f"]], "uid": ["u0", "u1"]},
        meta_info={"step": 1},
    )
    unfolded = data.unfold_column_chunks(2, split_keys=["pair", "texts"])
    assert torch.equal(unfolded.batch["pair"], torch.arange(12).reshape(4, 1, 3))
    assert unfolded.batch["label"].tolist() == [7, 7, 8, 8]
    assert unfolded.non_tensor_batch["texts"].tolist() == [["a", "b"], ["c", "d"], ["e"], ["f"]]
    assert unfolded.non_tensor_batch["uid"].tolist() == ["u0", "u0", "u1", "u1"]
    assert unfolded.meta_info == {"step": 1}
    assert data.unfold_column_chunks(3).batch["label"].tolist() == [7, 7, 7, 8, 8, 8]
    assert len(data) == 2


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("b", ValueError, r"'b' \[4, 3\] cannot be cut into 2 parts"),
        ("a", ValueError, r"'a' \[4\] cannot be cut"),
        ("raw_prompt", ValueError, "'raw_prompt' has an object of 1 elements"),
        ("c", KeyError, r"there is no \['c'\] to unfold"),
    ],
)
def test_what_does_not_unfold_is_named(key, error, message):
    with pytest.raises(error, match=message):
        make().unfold_column_chunks(2, [key])


def test_a_batch_that_was_changed_directly_can_be_checked():
    data = make()
    data.check_consistency()
    data.non_tensor_batch["late"] = np.array(["x"], dtype=object)
    with pytest.raises(ValueError, match=r"non_tensor_batch\['late'\] has 1 entries, the batch has 4"):
        data.check_consistency()


def test_a_batch_says_what_is_in_it(capsys):
    data = make(step=1)
    assert data.get_data_info().splitlines() == [
        "batch['a']: Tensor [4] torch.int64",
        "batch['b']: Tensor [4, 3] torch.float32",
        "non_tensor_batch['uid']: ndarray of 4: str",
        "non_tensor_batch['raw_prompt']: ndarray of 4: list of 1: dict {role: str}",
        "meta_info['step']: int",
    ]
    large = DataProto.from_dict({"a": torch.zeros(2, 2**19)})
    large.print_size("before")
    assert capsys.readouterr().out == "before, size of batch: 0.003906 GiB, size of non_tensor_batch: 0.000000 GiB\n"
