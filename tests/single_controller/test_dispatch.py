import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.single_controller.dispatch import plan, registrations


def batch(size, **meta):
    return DataProto.from_dict(
        tensors={"x": torch.arange(size)}, non_tensors={"uid": list(range(size))}, meta_info=meta
    )


def spread(mode, *args, world_size=2, **kwargs):
    return plan(mode, args, kwargs, world_size=world_size, label="actor.step")


def test_one_to_all_gives_everyone_the_same_and_returns_a_list():
    made = spread(Dispatch.ONE_TO_ALL, 1, key="v")
    assert made.calls == {0: ((1,), {"key": "v"}), 1: ((1,), {"key": "v"})}
    assert made.collect(["a", "b"]) == ["a", "b"]


def test_rank_zero_runs_alone_and_its_result_is_the_result():
    made = spread(Dispatch.RANK_ZERO, 1)
    assert made.calls == {0: ((1,), {})}
    assert made.collect(["a"]) == "a"


def test_all_to_all_takes_one_entry_per_rank():
    assert spread(Dispatch.ALL_TO_ALL, ["a", "b"], key=(1, 2)).calls == {
        0: (("a",), {"key": 1}),
        1: (("b",), {"key": 2}),
    }
    with pytest.raises(ValueError, match=r"actor.step: a list of 3 entries for 2 ranks"):
        spread(Dispatch.ALL_TO_ALL, [1, 2, 3])
    with pytest.raises(TypeError, match=r"one entry per rank, not int"):
        spread(Dispatch.ALL_TO_ALL, 5)


@pytest.mark.parametrize(("size", "parts"), [(6, [2, 2, 2]), (4, [1, 1, 2]), (2, [0, 1, 1]), (0, [0, 0, 0])])
def test_dp_compute_cuts_lists_evenly_and_joins_the_results_in_order(size, parts):
    made = spread(Dispatch.DP_COMPUTE, list(range(size)), world_size=3, scale=2)
    assert [len(args[0]) for args, _ in made.calls.values()] == parts
    assert made.collect([[value * kwargs["scale"] for value in args[0]] for args, kwargs in made.calls.values()]) == [
        value * 2 for value in range(size)
    ]


def test_dp_compute_refuses_what_it_cannot_cut_or_join():
    with pytest.raises(ValueError, match=r"differ in length: \{'argument 0': 2, 'other': 3\}"):
        spread(Dispatch.DP_COMPUTE, [1, 2], other=[1, 2, 3])
    with pytest.raises(TypeError, match=r"none of the arguments is a list | tuple"):
        spread(Dispatch.DP_COMPUTE, 1)
    with pytest.raises(TypeError, match=r"every rank must return a list | tuple; got \{1: 'int'\}"):
        spread(Dispatch.DP_COMPUTE, [1, 2]).collect([[1], 2])


def test_batches_are_chunked_and_concatenated():
    made = spread(Dispatch.DP_COMPUTE_PROTO, batch(4), 7, other=batch(4))
    assert made.calls[1][0][0].batch["x"].tolist() == [2, 3]
    assert made.calls[1][0][1] == 7
    assert made.calls[1][1]["other"].batch["x"].tolist() == [2, 3]
    joined = made.collect([made.calls[rank][0][0] for rank in (0, 1)])
    assert joined.non_tensor_batch["uid"].tolist() == [0, 1, 2, 3]


def test_a_batch_that_does_not_divide_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"actor.step: 5 samples do not divide over 2 ranks; set meta_info\['auto_pad"):
        spread(Dispatch.DP_COMPUTE_PROTO, batch(5))


@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_auto_padding_pads_for_the_ranks_and_unpads_the_result(size):
    made = spread(Dispatch.DP_COMPUTE_PROTO, batch(size, auto_padding=True), world_size=4)
    lengths = {len(args[0]) for args, _ in made.calls.values()}
    assert lengths == {-(-size // 4)}
    joined = made.collect([args[0] for args, _ in made.calls.values()])
    assert joined.batch["x"].tolist() == list(range(size))


def test_a_padded_batch_must_come_back_whole_or_without_samples():
    made = spread(Dispatch.DP_COMPUTE_PROTO, batch(3, auto_padding=True))
    with pytest.raises(ValueError, match="3 samples padded to 4 came back as 2"):
        made.collect([batch(1), batch(1)])
    assert made.collect([DataProto(meta_info={"metrics": {"a": rank}}) for rank in (0, 1)]).meta_info == {
        "metrics": {"a": [0, 1]}
    }


def test_batches_for_metrics_are_never_padded():
    with pytest.raises(ValueError, match="5 samples do not divide over 2 ranks$"):
        spread(Dispatch.DP_COMPUTE_METRIC, batch(5, auto_padding=True))
    made = spread(Dispatch.DP_COMPUTE_METRIC, batch(4))
    assert made.collect([{"loss": 1.0}, {"loss": 2.0}]) == [{"loss": 1.0}, {"loss": 2.0}]


def test_batches_need_batches_of_one_length():
    with pytest.raises(TypeError, match="none of the arguments is a DataProto"):
        spread(Dispatch.DP_COMPUTE_PROTO, {"x": 1})
    with pytest.raises(ValueError, match=r"differ in length: \{'argument 0': 2, 'argument 1': 4\}"):
        spread(Dispatch.DP_COMPUTE_PROTO, batch(2), batch(4))
    with pytest.raises(TypeError, match=r"every rank must return a DataProto; got \{0: 'NoneType'\}"):
        spread(Dispatch.DP_COMPUTE_PROTO, batch(2)).collect([None, batch(1)])


def test_an_override_keeps_the_registration_of_its_base():
    class Base:
        @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
        def save(self): ...

        @register()
        def init_model(self): ...

    class Derived(Base):
        def save(self): ...

    found = registrations(Derived)
    assert found["save"].dispatch_mode is Dispatch.RANK_ZERO
    assert not found["save"].blocking
    assert found["init_model"].blocking


def test_register_refuses_what_is_no_dispatch_mode():
    with pytest.raises(TypeError, match=r"dispatch_mode='rank_zero'\): use one of Dispatch.ONE_TO_ALL"):
        register(dispatch_mode="rank_zero")
