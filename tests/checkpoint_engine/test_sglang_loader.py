"""What a rank of SGLang finds out while its model's loaders copy a version: nothing of it may be lost or made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint_engine.kept_process import commit, plan_of
from verl.checkpoint_engine.compat.sglang import stay_paused_while
from verl.checkpoint_engine.engines.sglang import loader
from verl.checkpoint_engine.engines.sglang.fit import fit_of
from verl.checkpoint_engine.engines.sglang.orders import (
    Order,
    Report,
    checked,
    fitted,
    held_digest,
    read_reports,
    reports_of,
    write_report,
)
from verl.checkpoint_engine.errors import ActivationError, ConfigError
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.committed import committed_digest

VERSION = {"q": torch.randn(4, 3), "k": torch.randn(2, 3), "norm": torch.randn(3), "head": torch.randn(5, 3)}
TORN = Report(torn=True)
ORDER = Order(reports="", arena_path="/arena", version=7, check=True)


class Model(torch.nn.Module):
    """Fuses q and k, turns the head, and has a loader that can be told to forget or to take no notice."""

    def __init__(self, forgets: str = "", norm_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(6, 3))
        self.norm = torch.nn.Parameter(torch.zeros(3, dtype=norm_dtype))
        self.head = torch.nn.Parameter(torch.zeros(3, 5))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64), persistent=False)
        self._forgets = forgets

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self._forgets:
                continue
            if name == "q":
                self.qk.data[:4].copy_(tensor)
            elif name == "k":
                self.qk.data.narrow(0, 4, 2).copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)
            elif name == "head":
                self.head.data.copy_(tensor.t().contiguous())


def loaded(model: torch.nn.Module, version: dict[str, torch.Tensor] = VERSION) -> Report:
    return loader.check_while_loading(model, lambda: version.items())


def test_a_version_that_fills_the_model_and_is_taken_whole_is_right():
    model = Model()
    report = loaded(model)
    assert report == Report()
    assert torch.equal(model.qk, torch.cat([VERSION["q"], VERSION["k"]]))
    assert torch.equal(model.head, VERSION["head"].t())
    assert "every value of the model" in checked({0: report}, ORDER).found


@pytest.mark.parametrize(("forgotten", "holes"), [("k", "qk"), ("head", "head")])
def test_a_value_that_no_tensor_reaches_is_named_and_the_tensor_that_nobody_took(forgotten: str, holes: str):
    report = loaded(Model(forgets=forgotten))
    assert (report.unfilled, report.unread) == ([holes], [forgotten])
    with pytest.raises(ActivationError, match=f"rank 0: no tensor fills {holes}; the model takes nothing from"):
        checked({0: report}, ORDER)


def test_a_tensor_that_the_model_does_not_know_is_named():
    report = loaded(Model(), VERSION | {"mtp.head": torch.randn(2)})
    assert (report.unfilled, report.unread) == ([], ["mtp.head"])


def test_a_tensor_that_is_there_twice_counts_as_taken():
    assert loaded(Model(), VERSION | {"tied": VERSION["head"].clone()}) == Report()


def test_tensors_that_share_their_memory_are_told_apart():
    slot = torch.randn(12)
    parts = {"q": slot[:0].reshape(0, 3), **VERSION, "norm": slot[3:6], "other": slot[6:9]}
    assert loaded(Model(), parts).unread == ["other"]


def test_a_version_with_a_nan_is_loaded_as_it_is():
    broken = VERSION | {"norm": torch.full((3,), torch.nan)}
    assert loaded(Model(), broken) == Report()


def test_a_tensor_that_another_rank_takes_is_no_problem():
    reports = {0: Report(unread=["expert.0", "mtp"]), 1: Report(unread=["expert.1", "mtp"])}
    with pytest.raises(ActivationError, match="the model takes nothing from mtp$"):
        checked(reports, ORDER)


def test_what_the_model_keeps_wide_and_came_rounded_is_refused():
    version = {name: tensor.bfloat16() for name, tensor in VERSION.items()}
    model = Model().bfloat16()
    model.norm.data = model.norm.data.float()
    report = loaded(model, version)
    assert report.widened == ["norm"]
    with pytest.raises(ActivationError, match="keeps norm in float32, but they came rounded"):
        checked({0: report}, ORDER)


def test_integers_that_nothing_was_copied_into_are_named():
    model = Model()
    model.scale = torch.nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    assert loaded(model).unfilled == ["scale"]


def shapes(version: dict[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(held.dtype).removeprefix("torch."), [*held.shape]) for name, held in version.items()}


class Strict(Model):
    """Its loader asks for shapes, as SGLang's do, cuts what a rank has a part of, and may want values."""

    def __init__(self, wants: Callable[[torch.Tensor], object] = bool) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self._wants = wants

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "scale":
                self._wants(tensor)
                self.scale.data.fill_(tensor.item())
            elif name == "q":
                self.qk.data.narrow(0, 0, 4).copy_(tensor.narrow(0, 0, 4))
            elif name == "norm":
                assert self.norm.data.shape == tensor.shape
                self.norm.data.copy_(tensor)
            elif name == "gate":
                raise KeyError(name)
            elif name == "head":  # as SGLang does on CPUs
                self.head.data.narrow(0, tensor.shape[1], 3 - tensor.shape[1]).zero_()
                self.head.data.narrow(0, 0, tensor.shape[1]).copy_(tensor.t())
            else:
                super().load_weights([(name, tensor)])


FITS = shapes(VERSION) | {"scale": ("float32", [])}


def without(*names: str) -> dict[str, tuple[str, list[int]]]:
    return {name: held for name, held in FITS.items() if name not in names}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (FITS, ""),
        (without("k"), "no tensor fills qk"),
        (without("scale"), "no tensor fills scale"),
        (FITS | {"norm": ("float32", [5])}, r"norm \[5\] is refused in norm \[3\]"),
        (FITS | {"head": ("float32", [5, 4])}, r"head \[5, 4\] is refused in head \[3, 5\] \(.*\)"),
        (FITS | {"head": ("float32", [5, 2])}, "no tensor fills head"),
        (FITS | {"q": ("float32", [6, 3])}, r"it takes a part of q \[6, 3\] and leaves the rest"),
        (FITS | {"gate": ("float32", [2])}, r"gate \[2\] is refused \(KeyError: 'gate'\)"),
        (FITS | {"mtp": ("float32", [2])}, r"it takes nothing from mtp \[2\]"),
        (FITS | {"q": ("int8", [4, 3])}, "q is int8, and its place in the model is not"),
        (FITS | {"norm": ("bfloat16", [3])}, "norm is bfloat16, and SGLang keeps it in float32"),
        (FITS | {"norm": ("float32", [5]), "gate": ("float32", [2])}, "model, 2 problems: norm .*; gate"),
    ],
)
def test_how_a_version_would_fit_is_found_out_and_nothing_is_changed(
    tensors: dict[str, tuple[str, list[int]]], said: str, tmp_path: Path, rank_0: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loader, "_held", Report(version=3, digest="3"))
    model = Strict()
    before = {name: held.clone() for name, held in model.state_dict().items()}
    carry_out(model, Order(reports=str(tmp_path), tensors=tensors))
    reports = reports_of(read_reports(tmp_path), 1)
    assert (reports[0].unknown, reports[0].version) == ("", 3)
    if said:
        with pytest.raises(ActivationError, match=said):
            fitted(reports, tensors)
    else:
        assert fitted(reports, tensors) == {}
    assert all(torch.equal(held, before[name]) for name, held in model.state_dict().items())


def test_a_loader_that_puts_other_tensors_into_the_model_leaves_it_as_it_was():
    class Replaces(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                if name == "norm":
                    self.norm.data = tensor
                elif name == "head":
                    self.head = torch.nn.Parameter(tensor.t().contiguous())
                else:
                    super().load_weights([(name, tensor)])

    model = Replaces()
    parameters = dict(model.named_parameters())
    addresses = {name: held.data_ptr() for name, held in parameters.items()}
    assert fitted({0: fit_of(model, shapes(VERSION))}, shapes(VERSION)) == {}
    assert all(held is parameters[name] for name, held in model.named_parameters())
    assert {name: held.data_ptr() for name, held in model.named_parameters()} == addresses


def test_a_head_that_is_the_embedding_may_be_left_out_if_they_are_equal():
    class VocabParallelEmbedding(torch.nn.Embedding): ...

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = VocabParallelEmbedding(5, 3)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                if name == "embed.weight":
                    self.embed.weight.data[:5].copy_(tensor)

    tensors = {"embed.weight": ("float32", [5, 3]), "head": ("float32", [5, 3])}
    assert fitted({0: fit_of(Tied(), tensors)}, tensors) == {"head": "embed.weight"}


def test_ranks_that_take_parts_take_the_whole_together():
    tensors = {"q": ("float32", [8, 2])}
    halves = {rank: Report(parts={"q": 8}) for rank in range(2)}
    assert fitted(halves, tensors) == {}
    with pytest.raises(ActivationError, match=r"it takes a part of q \[8, 2\]"):
        fitted(halves | {1: Report(unread=["q"])}, tensors)


def test_of_what_a_loader_cannot_do_without_values_nothing_is_said(tmp_path: Path, rank_0: None):
    def wants(tensor: torch.Tensor) -> None:
        raise NotImplementedError("it has no values")

    carry_out(Strict(wants), Order(reports=str(tmp_path), tensors=FITS))
    assert reports_of(read_reports(tmp_path), 1)[0].unknown == "NotImplementedError: it has no values"


def test_a_rank_that_sleeps_is_asked_for_nothing_else(tmp_path: Path, rank_0: None):
    class Updater:
        offload_tags: ClassVar = {"weights", "kv_cache"}

        def update(self) -> dict[int, Report]:
            carry_out(Strict(), Order(reports=str(tmp_path), tensors={"none": ("float32", [1])}))
            return reports_of(read_reports(tmp_path), 1)

    with pytest.raises(ConfigError, match=r"it sleeps \(kv_cache, weights\): wake it up first"):
        fitted(Updater().update(), FITS)
    Updater.offload_tags.clear()
    assert Updater().update()[0].unread == ["none"]


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


def carry_out(model: torch.nn.Module, order: Order) -> None:
    loader.load(model, [(order.encode(), torch.empty(0))])


def test_names_that_are_kept_wide_are_found_in_the_checkpoint(tmp_path: Path, rank_0: None):
    directory, reports = tmp_path / "model", tmp_path / "reports"
    directory.mkdir()
    reports.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in VERSION.items()}, directory / "model.safetensors")
    model = Model().bfloat16()
    model.norm.data = model.norm.data.float()
    for expected, one in ((["norm"], model), ([], Model().bfloat16())):
        carry_out(one, Order(reports=str(reports), directory=str(directory)))
        assert reports_of(read_reports(reports), 1)[0].widened == expected


def test_a_scheduler_goes_on_only_once_a_load_has_succeeded(monkeypatch: pytest.MonkeyPatch, caplog):
    class Scheduler:
        def __init__(self) -> None:
            self._engine_paused = False

    module = ModuleType("sglang.srt.managers.scheduler")
    module.Scheduler = Scheduler
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(loader, "_held", Report())
    scheduler = Scheduler()  # made before the first order, as SGLang does
    for _ in range(2):
        stay_paused_while(lambda: loader._held.torn)
    assert not scheduler._engine_paused
    scheduler._engine_paused = True
    loader._held = TORN
    scheduler._engine_paused = False
    assert scheduler._engine_paused
    assert "has torn the weights: this server stays paused" in caplog.text
    loader._held = Report(version=1, digest="1")
    assert not scheduler._engine_paused
    scheduler._engine_paused = True
    assert scheduler._engine_paused


def test_a_failure_is_told_and_leaves_the_engine_alive(tmp_path: Path, rank_0: None):
    carry_out(Model(), Order(reports=str(tmp_path), arena_path=str(tmp_path / "gone"), version=3))
    with pytest.raises(ActivationError, match="rank 0: "):
        reports_of(read_reports(tmp_path), 1)
    assert not list(tmp_path.glob("*.json"))


def test_a_rank_says_what_it_holds_and_that_a_load_which_failed_has_torn_it(
    tmp_path: Path, rank_0: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loader, "_held", Report())
    model, reports = Model(), tmp_path / "reports"
    reports.mkdir()

    def answer(**order: Any) -> Report:
        carry_out(model, Order(reports=str(reports), **order))
        return msgspec.json.decode(read_reports(reports)[0], type=Report)

    plan = plan_of(VERSION)
    with NodeArena.create(shm_dir=tmp_path, job="sglang", node="here", layout=plan.layout, slots=2) as arena:
        assert answer().version is None
        commit(arena, plan, 7, VERSION)
        held = answer(arena_path=str(arena.directory), version=7, check=True)
        assert held.digest == held_digest({0: answer()}, 7) == committed_digest(arena.directory, 7)
        with pytest.raises(ActivationError, match="ranks 0 of SGLang do not hold the version that they were to load"):
            held_digest({0: answer()}, 8)
        with pytest.raises(ActivationError, match="the ranks of SGLang do not hold"):
            held_digest({0: answer(), 1: Report(version=7, digest="other")}, 7)
        assert "version 8" in answer(arena_path=str(arena.directory), version=8).failed
        assert held_digest({0: answer()}, 7) == held.digest  # nothing was loaded
        monkeypatch.setattr(model, "load_weights", lambda _: 1 / 0)
        failed = answer(arena_path=str(arena.directory), version=7)
        assert (failed.version, failed.torn, answer().torn) == (None, True, True)
        assert "ZeroDivisionError" in failed.failed


def test_what_another_rank_has_not_loaded_is_torn_on_this_one_too(monkeypatch: pytest.MonkeyPatch):
    for others, torn in ((Report(version=7, digest="7"), False), (Report(version=6, digest="6"), True), (TORN, True)):
        monkeypatch.setattr(loader, "_held", Report(version=7, digest="7"))
        monkeypatch.setattr(loader, "among_ranks", lambda held, others=others: [held, others])
        loader._held_by_all()
        assert loader._held == (TORN if torn else others)


def test_a_rank_that_does_not_answer_is_named(tmp_path: Path):
    write_report(tmp_path, 0, Report())
    with pytest.raises(ActivationError, match="rank 1 of SGLang did not load it"):
        reports_of(read_reports(tmp_path), 2)


def test_an_order_is_json_that_names_what_it_is_for():
    assert json.loads(ORDER.encode()) == {"reports": "", "arena_path": "/arena", "version": 7, "check": True} | {
        "directory": "",
        "tensors": {},
    }
