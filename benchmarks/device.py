"""What one accelerator proves of a sync without Ray or an engine: how fast weights leave it and come back.

    python -m benchmarks.device --size-gib 4

Copies of one large block between device and pinned memory are the measure; everything else is given as a part of
their rate. A trainer rank publishes from device memory (into memory that peers read, and into the slot of a node), an
engine loads a committed version, and owners make deltas on the device and on the host, which a node applies. Every
result is compared bit for bit with what was to be moved.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.applied import apply_s, in_slot
from benchmarks.command import program, progress
from benchmarks.report import Report, table
from benchmarks.synthetic_model import RowsOfModel, qwen_like_specs
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.committed import PinnedSlots, open_to_activate
from verl.checkpoint_engine.memory.delta import DeltaWriter, warm_up
from verl.checkpoint_engine.memory.device_base import DeviceBase
from verl.checkpoint_engine.memory.digest import Manifest, PieceDigests, UInt64s
from verl.checkpoint_engine.memory.host_memory import pinned_memory
from verl.checkpoint_engine.memory.packed import PackedRegion
from verl.checkpoint_engine.memory.publishing import PieceMemory, SlotPieces, publish
from verl.checkpoint_engine.memory.slot import SlotView
from verl.checkpoint_engine.memory.threads import memory_threads
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import Shard, TensorSpec
from verl.checkpoint_engine.support import envs
from verl.utils.config import option

PIECE_NBYTES = 2**20
HALF_A_WORD = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True, kw_only=True)
class Settings:
    device: str = option("cuda", "as torch names it")
    size_gib: float = option(4.0, "of the model in bfloat16", above=0)
    repeats: int = option(5, "measured, after one that does not count", least=1)
    changed: list[float] = option([0.001, 0.01, 0.05], "fractions for deltas", above=0, most=1)


class RowsOnDevice(RowsOfModel):
    """A whole model on a device."""

    def __init__(self, specs: list[TensorSpec], source_dtype: str, device: torch.device) -> None:
        super().__init__(specs, 0, 1, source_dtype)
        self.device = device
        self._rows = {name: rows.to(device) for name, rows in self._rows.items()}

    def view(self, shard: Shard) -> None:
        """Nothing of it lies in host memory."""

    def change(self, fraction: float) -> None:
        """Move about that fraction of the values to a neighbouring bfloat16."""
        for rows in self._rows.values():
            bits = rows.view(HALF_A_WORD[rows.dtype])
            step = 1 if rows.dtype == torch.bfloat16 else 2**16
            bits += (torch.rand(rows.shape, device=self.device) < fraction) * step

    def expected(self, name: str) -> torch.Tensor:
        return self._rows[name].to(torch.bfloat16).cpu()


class Measuring:
    def __init__(self, device: torch.device, size_gib: float, repeats: int) -> None:
        self.device, self._repeats = device, repeats
        self.specs = qwen_like_specs(int(size_gib * 2**30), "bfloat16")
        self.layout = Layout.of(self.specs)
        self.nbytes = self.layout.payload_nbytes

    def seconds(self, action: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """The median, after one that does not count."""
        found = []
        for _ in range(self._repeats + 1):
            before()
            self._synchronize()
            start_s = time.perf_counter()
            action()
            self._synchronize()
            found.append(time.perf_counter() - start_s)
        return median(found[1:])

    def gb_per_s(self, action: Callable[[], object], nbytes: int | None = None, **named: Any) -> float:
        return (self.nbytes if nbytes is None else nbytes) / self.seconds(action, **named) / 1e9

    def source(self, dtype: str) -> tuple[RowsOnDevice, SyncPlan]:
        source = RowsOnDevice(self.specs, dtype, self.device)
        return source, make_plan(self.layout, [ShardTable.of(self.layout, source.shards())], block_nbytes=PIECE_NBYTES)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()


def measure(settings: Settings) -> dict[str, Any]:
    device = torch.device(settings.device)
    torch.zeros(1, device=device)  # from here on the process uses it, and pins its memory
    measuring = Measuring(device, settings.size_gib, settings.repeats)
    links = _noted(_links(measuring))
    with tempfile.TemporaryDirectory(prefix="verl-device-", dir=envs.shm_dir()) as directory:
        result = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "torch": torch.__version__,
            "model_gib": measuring.nbytes / 2**30,
            "links_gb_per_s": links,
            "publish": _noted(_publishing(measuring, Path(directory))),
            "activate": _noted(_activating(measuring, Path(directory))),
        }
    warm_up()
    result["deltas"] = [_noted(_deltas(measuring, fraction)) for fraction in settings.changed]
    return result


def _noted(found: dict[str, float]) -> dict[str, float]:
    progress("  " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    return found


def _links(measuring: Measuring) -> dict[str, float]:
    progress("copies of one block")
    nbytes = min(measuring.nbytes, 2**30)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=measuring.device)
    pinned = pinned_memory(nbytes) if measuring.device.type == "cuda" else torch.zeros(nbytes, dtype=torch.uint8)
    pageable = torch.zeros(nbytes, dtype=torch.uint8)
    found = {}
    for kind, host in (("pinned", pinned), ("pageable", pageable)):
        found[f"to_host_{kind}"] = measuring.gb_per_s(functools.partial(host.copy_, on_device), nbytes)
        found[f"to_device_{kind}"] = measuring.gb_per_s(functools.partial(on_device.copy_, host), nbytes)
    return found


def _publishing(measuring: Measuring, directory: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for dtype in ("bfloat16", "float32"):
        progress(f"publish from {dtype}")
        found |= _published(measuring, dtype, directory / f"slot-{dtype}")
    return found


def _published(measuring: Measuring, dtype: str, path: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    source, plan = measuring.source(dtype)
    start_s = time.perf_counter()
    region = PackedRegion(plan, 0)
    found["region_s"] = time.perf_counter() - start_s
    found[f"{dtype}_region"] = measuring.gb_per_s(lambda: publish(source, region))
    _require_packed(region, source)
    with path.open("xb") as file:
        file.truncate(plan.layout.nbytes)
    slot = SlotView(path, plan.layout, writable=True)
    start_s = time.perf_counter()
    slot.pin(plan.extents_of(0).spans)
    found["slot_pin_s"] = time.perf_counter() - start_s
    pieces = SlotPieces(slot, plan, 0)
    found[f"{dtype}_slot"] = measuring.gb_per_s(lambda: publish(source, pieces))
    for name, tensor in slot.tensors():
        _require_equal(tensor, source.expected(name), name)
    slot.close()
    path.unlink()
    unknown = PieceDigests.none_of(len(plan))
    found["digest"] = measuring.gb_per_s(lambda: _digests(region, unknown))
    base = DeviceBase(region, measuring.device)
    found[f"{dtype}_by_way_of_base"] = measuring.gb_per_s(lambda: base.publish(source))
    _require_packed(region, source)
    return found


def _digests(memory: PieceMemory, known: PieceDigests) -> UInt64s:
    return known.completed(memory.bytes.numpy(), memory.extents, threads=memory_threads())


def _activating(measuring: Measuring, directory: Path) -> dict[str, float]:
    progress("load a committed version")
    source, plan = measuring.source("bfloat16")
    with NodeArena.create(shm_dir=directory, job="device", node="0", layout=plan.layout, slots=1) as arena:
        arena.begin(0)
        pieces = SlotPieces(arena.writable_view(), plan, 0)
        arena.commit(0, Manifest.of(0, plan, [_digests(pieces, publish(source, pieces).digests)]))
        model = {
            spec.name: torch.empty(spec.shape, dtype=torch.bfloat16, device=measuring.device)
            for spec in plan.layout.specs
        }

        def load(kept: PinnedSlots | None) -> None:
            with open_to_activate(arena.directory, 0, kept) as (_, slot):
                for name, tensor in slot.tensors():
                    model[name].copy_(tensor)

        found = {"mapped_each_time": measuring.gb_per_s(lambda: load(None))}
        kept = PinnedSlots()
        start_s = time.perf_counter()
        load(kept)
        found["first_s"] = time.perf_counter() - start_s
        found["kept"] = measuring.gb_per_s(lambda: load(kept))
        for name, tensor in model.items():
            _require_equal(tensor.cpu(), source.expected(name), name)
        kept.close()
    return found


def _deltas(measuring: Measuring, fraction: float) -> dict[str, float]:
    progress(f"deltas of {fraction:.2%}")
    source, plan = measuring.source("bfloat16")
    on_device = _changes_published(measuring, source, plan, fraction, on_device=True)
    on_host = _changes_published(measuring, source, plan, fraction, on_device=False)
    region, change = PackedRegion(plan, 0), functools.partial(source.change, fraction)
    return {
        "fraction": fraction,
        "full_s": measuring.seconds(lambda: publish(source, region), before=change),
        "device_s": on_device["seconds"],
        "compared_s": on_device["compared_s"],
        "host_s": on_host["seconds"],
        "bits_per_change": on_device["bits_per_change"],
    }


def _changes_published(
    measuring: Measuring, source: RowsOnDevice, plan: SyncPlan, fraction: float, *, on_device: bool
) -> dict[str, float]:
    region = PackedRegion(plan, 0)
    writer, before = DeltaWriter(plan, 0, region.nbytes), in_slot(plan, region)
    known = _digests(region, publish(source, region).digests)
    base = DeviceBase(region, measuring.device)

    def change() -> None:
        source.change(fraction)
        before[:] = in_slot(plan, region)
        writer.begin()

    def publish_changes() -> None:
        if on_device:
            known[:] = _digests(region, base.publish_changes(source, known, writer).digests)
        else:
            publish(source, region, writer)

    seconds = measuring.seconds(publish_changes, before=change)
    nbytes = writer.finish()
    _require_packed(region, source)
    if nbytes:
        apply_s(plan, before, writer.bytes[:nbytes], region, threads=memory_threads())
    return {
        "seconds": seconds,
        "compared_s": base.compared_s,
        "bits_per_change": 8 * nbytes / max(int(writer.changed.sum()), 1),
    }


def _require_packed(region: PackedRegion, source: RowsOnDevice) -> None:
    expected: tuple[str, torch.Tensor] = ("", torch.empty(0))
    for place in region.places(source.shards()):
        rows, name = slice(place.shard.box.start[0], place.shard.box.stop[0]), place.shard.name
        if expected[0] != name:
            expected = name, source.expected(name)
        _require_equal(place.tensor, expected[1][rows], name)


def _require_equal(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    if not torch.equal(found.view(torch.int16), expected.view(torch.int16)):
        raise ValueError(f"{name} is not what was published")


def report(result: dict[str, Any]) -> Report:
    links, publishing, activating = result["links_gb_per_s"], result["publish"], result["activate"]
    to_host, to_device = links["to_host_pinned"], links["to_device_pinned"]
    rows: list[dict[str, Any]] = [{"what": name, "rate": rate, "part": None} for name, rate in links.items()]
    rows += [
        {"what": f"publish {name}", "rate": rate, "part": rate / to_host}
        for name, rate in publishing.items()
        if not name.endswith("_s")
    ]
    rows += [
        {"what": f"load, {name}", "rate": activating[name], "part": activating[name] / to_device}
        for name in ("kept", "mapped_each_time")
    ]
    for row in rows:
        row["what"] = row["what"].replace("_", " ")
    seconds = {
        "changed": "{fraction:.2%}",
        "full s": "{full_s:.3f}",
        "device s": "{device_s:.3f}",
        "compared s": "{compared_s:.3f}",
        "host s": "{host_s:.3f}",
        "bits a change": "{bits_per_change:.1f}",
    }
    pinning = f"region {publishing['region_s']:.2f} s, slot {publishing['slot_pin_s']:.2f} s"
    title = f"{result['device']}, torch {result['torch']}, {result['model_gib']:.2f} GiB of bfloat16"
    return Report(
        [
            table(title, {"": "{what}", "GB/s": "{rate:.2f}", "of the copy": "{part:.2f}"}, rows),
            f"pinning: {pinning}, first load {activating['first_s']:.2f} s",
            table("deltas", seconds, result["deltas"]),
        ]
    )


main = program("device", __doc__, Settings, measure, report, plots=False)
if __name__ == "__main__":
    sys.exit(main())
