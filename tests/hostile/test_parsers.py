"""Every parser of something that comes from outside the process, with 500 changed real files each.

What comes out is a value or one of the project's errors, within a second and 64 MiB beyond the input.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from tests.hostile.mutations import changed
from verl.checkpoint_engine.backends import one_sided
from verl.checkpoint_engine.errors import ConfigError, IntegrityError, PlanError, TransportError
from verl.checkpoint_engine.links import upstream
from verl.checkpoint_engine.memory import committed
from verl.checkpoint_engine.memory.digest import Manifest
from verl.checkpoint_engine.parameter_server import link_messages, roster
from verl.checkpoint_engine.parameter_server.checkpoint_directory import INDEX, checkpoint_files
from verl.checkpoint_engine.parameter_server.http_server import _message
from verl.checkpoint_engine.parameter_server.metas import load_metas, save_metas
from verl.checkpoint_engine.parameter_server.records import BufferMeta, PackedTensor, RankMetas
from verl.checkpoint_engine.parameter_server.safetensors_files import read_checkpoint
from verl.checkpoint_engine.plan.encoded import parsed, unpacked
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable, extents_of
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec
from verl.checkpoint_engine.support import records
from verl.experimental.agent_loop.tools import parse_hermes
from verl.protocol import DataProto
from verl.trainer.checkpoints import LATEST, CheckpointDirectory, TrainerState
from verl.trainer.fleet.wanted_replicas import WantedReplicas
from verl.trainer.plain_state import from_plain, to_plain
from verl.utils import config, timing, tracking
from verl.workers.config import TrainerConfig
from verl.workers.engine.checkpoint_files import METADATA_FILE, read_metadata

MUTATIONS = int(os.environ.get("HOSTILE_MUTATIONS", "2000"))
"""The same ones in every run. Try 20,000 after a change of a parser."""
AT_A_TIME = 50
"""Of one example of hypothesis, which takes longer to choose a number than a parser to refuse a file."""
MOST_S = 1.0
MOST_NBYTES = 64 * 2**20

SPECS = [TensorSpec(name=f"model.layers.{i}.w", shape=(8, 4 + i), dtype="bfloat16") for i in range(3)]
SPECS += [TensorSpec(name="model.norm", shape=(16,), dtype="float32"), TensorSpec(name="s", shape=(), dtype="int64")]
LAYOUT = Layout.of(SPECS)
RANKS = [
    ShardTable.of(LAYOUT, [Shard(f"model.layers.{i}.w", Box((4 * rank, 0), (4 * rank + 4, 4 + i))) for i in range(3)])
    for rank in range(2)
]
RANKS.append(ShardTable.of(LAYOUT, [Shard("model.norm", Box((0,), (16,))), Shard("s", Box((), ()))]))
PLAN = make_plan(LAYOUT, RANKS, block_nbytes=64)
META = RankMetas(
    rank=0,
    host="10.0.0.1",
    device_id="cpu-0",
    rdma_device="",
    p2p_address="10.0.0.1:1234",
    buffers=(
        BufferMeta(
            address=2**46,
            nbytes=512,
            tensors=(PackedTensor(name="w", shape=(8, 4), dtype="float32", offset=0, nbytes=128),),
        ),
    ),
)


@dataclass(frozen=True)
class Parser:
    seeds: Callable[[Path], list[bytes]]
    parse: Callable[[bytes, Path], Any]
    errors: tuple[type[Exception], ...]
    form: str = "bytes"


def into(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def layout(data: bytes, _: Path) -> None:
    found = Layout.decode(data)
    assert found.shapes.shape == found.strides.shape
    assert Layout.decode(found.encode()).digest == found.digest


def shard_table(data: bytes, _: Path) -> None:
    table = ShardTable.decode(data)
    table.require_inside(LAYOUT)
    extents = extents_of(LAYOUT, table)
    assert (extents.offset >= 0).all()
    assert table.tensor.dtype.kind == table.start.dtype.kind == "i"


def plan(data: bytes, _: Path) -> None:
    found = SyncPlan.decode(data)
    for owner in range(found.num_owners):
        found.shards_of(owner)
        assert found.nbytes_of(owner) >= 0


def receive(data: bytes, _: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        writer = threading.Thread(target=lambda: (theirs.sendall(data), theirs.close()))
        writer.start()
        try:
            link_messages.receive_message(ours, link_messages.FromServer)
        finally:
            ours.close()
            writer.join()


def framed(*messages: Any) -> list[bytes]:
    bodies = [msgspec.msgpack.encode(message) for message in messages]
    return [len(body).to_bytes(8, "little") + body for body in bodies]


def metas(directory: Path) -> list[bytes]:
    save_metas(directory / "seed", "policy", {0: META, 1: msgspec.structs.replace(META, rank=1)})
    return [(directory / "seed").read_bytes()]


def sharded(_: Path) -> list[bytes]:
    declared = {"verl.tensor_parallel": json.dumps({"rank": 0, "size": 1, "dims": {"w": 0, "b": None}})}
    tensors = {"w": torch.ones(4, 2, dtype=torch.bfloat16), "b": torch.zeros(2)}
    return [save(tensors, declared), save(tensors)]


def safetensors_json(data: bytes, directory: Path) -> None:
    """The header alone, with its length and enough data."""
    read_checkpoint([into(directory / "a.safetensors", len(data).to_bytes(8, "little") + data + bytes(24))])


def header_of(file: bytes) -> bytes:
    return file[8 : 8 + int.from_bytes(file[:8], "little")]


def saved(directory: Path) -> Path:
    """A checkpoint of the driver's."""
    checkpoints = CheckpointDirectory(TrainerConfig(default_local_dir=str(directory / "run")))
    state = TrainerState(3, {"epoch": 0, "position": 4, "data": {"rows": 8, "seed": 1}}, 0.1, {"sums": 0.5})
    with checkpoints.writing(state):
        pass
    checkpoints.publish()
    return directory / "run"


def driver_file(name: str) -> Parser:
    def parse(data: bytes, directory: Path) -> None:
        run = directory / "run"
        into(run / name, data)
        found = CheckpointDirectory(TrainerConfig(default_local_dir=str(run))).find()
        if found is not None:
            CheckpointDirectory.read(found)
        saved(directory)

    return Parser(lambda directory: [(saved(directory) / name).read_bytes()], parse, (config.ConfigError,))


def metadata(_: Path) -> list[bytes]:
    import pickle

    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunk = dcp.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))
    tensor = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size([4, 2]), [chunk])
    content = dcp.Metadata(
        {"model.w": tensor, "optimizer.lr": dcp.BytesStorageMetadata()},
        planner_data={"model.w": ("model", "w")},
        storage_data={dcp.MetadataIndex("model.w", [0, 0]): _StorageInfo("__0_0.distcp", 0, 32)},
        storage_meta=dcp.StorageMeta(checkpoint_id=Path("/a"), save_id="x"),
    )
    return [pickle.dumps(content), pickle.dumps(content, protocol=2)]


def batch(_: Path) -> list[bytes]:
    columns = {"uid": ["a", "b"], "x": [{"k": np.int64(1)}, [1.5, None]], "y": [np.arange(3), b"z"]}
    return [msgspec.msgpack.encode(_without_tensors(to_plain(DataProto.from_dict({}, columns, {"step": 1}))))]


def _without_tensors(value: Any) -> Any:
    return [_without_tensors(item) for item in value] if isinstance(value, (list, tuple)) else value


def samples(data: bytes, _: Path) -> None:
    from_plain(unpacked(data, Any, "anything", ConfigError))


def wanted(data: bytes, directory: Path) -> None:
    path = directory / "num_replicas"
    path.unlink(missing_ok=True)
    asked = WantedReplicas(path)
    count = asked.changed()
    into(path, data)
    count = asked.changed()
    assert count is None or 1 <= count < 10**6


def json_seed(value: Any) -> Callable[[Path], list[bytes]]:
    return lambda _: [msgspec.json.encode(value)]


def lines(*values: Any) -> Callable[[Path], list[bytes]]:
    return lambda _: [b"".join(records.encoded(value) + b"\n" for value in values)]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2.5, "x", {"c": null}]}}</tool_call>'


def calls(text: str) -> None:
    for call in parse_hermes(text):
        assert call.error or call.name is not None
        assert isinstance(call.arguments, dict)
        json.dumps([call.name, call.arguments], allow_nan=False, ensure_ascii=False).encode()


SPAN = {"role": "trainer", "name": "gen", "start_s": 1.0, "stop_s": 2.0, "version": 3}
PARSERS: dict[str, Parser] = {
    "layout": Parser(lambda _: [LAYOUT.encode()], layout, (PlanError,), "msgpack"),
    "shard table": Parser(lambda _: [table.encode() for table in RANKS], shard_table, (PlanError,), "msgpack"),
    "plan": Parser(lambda _: [PLAN.encode()], plan, (PlanError,), "msgpack"),
    "manifest": Parser(
        lambda _: [Manifest(7, PLAN, np.arange(len(PLAN), dtype=np.uint64)).encode()],
        lambda data, _: Manifest.decode(data),
        (IntegrityError,),
        "msgpack",
    ),
    "current version of an arena": Parser(
        lambda _: [msgspec.msgpack.encode(committed.Committed(7, "slot-0.0", "slot-0.0.manifest"))],
        lambda data, directory: committed.committed_version(into(directory / "current", data).parent),
        (IntegrityError,),
        "msgpack",
    ),
    "metas": Parser(metas, lambda data, directory: load_metas(into(directory / "metas", data)), (ConfigError,)),
    "metas, content": Parser(
        lambda directory: [metas(directory)[0].partition(b"\n")[2]],
        lambda data, directory: load_metas(
            into(directory / "metas", b"verl-sync parameter server metas, format 1, %d bytes\n%s" % (len(data), data))
        ),
        (ConfigError,),
        "msgpack",
    ),
    "safetensors": Parser(
        sharded,
        lambda data, directory: read_checkpoint([into(directory / "a.safetensors", data)]),
        (ConfigError,),
    ),
    "safetensors, header": Parser(
        lambda directory: [header_of(file) for file in sharded(directory)], safetensors_json, (ConfigError,), "json"
    ),
    "index of a model": Parser(
        json_seed({"metadata": {"total_size": 24}, "weight_map": {"w": "a.safetensors", "b": "b.safetensors"}}),
        lambda data, directory: checkpoint_files(into(directory / "model" / INDEX, data).parent),
        (ConfigError,),
        "json",
    ),
    "message of an engine": Parser(
        lambda _: framed(
            link_messages.Offer(memory=0, offset=0, tensors=META.buffers[0].tensors),
            link_messages.Memory(kind="shared", num_files=1, handles=((1, b"x", True),)),
            link_messages.Abort("why"),
        ),
        receive,
        (TransportError,),
    ),
    "entry of a rank": Parser(
        lambda _: [msgspec.msgpack.encode(roster._Entry(3, {"topic": b"\x01"}))],
        lambda data, _: unpacked(data, roster._Entry, "an entry"),
        (TransportError,),
        "msgpack",
    ),
    "call of a rank": Parser(lambda _: [b"0123abcd"], lambda data, _: roster._text(data), (TransportError,)),
    "metas of a rank": Parser(
        lambda _: [msgspec.msgpack.encode(("policy", META))],
        lambda data, _: unpacked(data, tuple[str, RankMetas], "metas"),
        (TransportError,),
        "msgpack",
    ),
    "address of a node": Parser(
        json_seed(upstream.Endpoint("tcp://10.0.0.1:1", 2**46, 4096)),
        lambda data, _: parsed(data, upstream.Endpoint, "an address"),
        (TransportError,),
        "json",
    ),
    "address of an owner": Parser(
        lambda _: [b'{"wire": "tcp://10.0.0.1:1", "regions": []}'],
        lambda data, _: parsed(data, one_sided.OwnerAddress, "an address"),
        (TransportError,),
        "json",
    ),
    "error of a server": Parser(
        json_seed({"error": {"message": "Worker failed with error 'x', please check the stack"}}),
        lambda data, _: _message(data),
        (),
        "json",
    ),
    "num_replicas": Parser(lambda _: [b"3\n", b"12"], wanted, ()),
    "pointer to the last checkpoint": driver_file(LATEST),
    "record of a checkpoint": driver_file("global_step_3/trainer.json"),
    "position in the data": driver_file("global_step_3/data.pt"),
    "metadata of a training checkpoint": Parser(
        metadata,
        lambda data, directory: read_metadata(into(directory / METADATA_FILE, data).parent),
        (config.ConfigError,),
    ),
    "samples on their way": Parser(batch, samples, (config.ConfigError,), "msgpack"),
    "metrics": Parser(
        lines({"step": 1, "a": 0.5}, {"step": 2, "a": None}),
        lambda data, directory: tracking.read_metrics(into(directory / "metrics.jsonl", data)),
        (ValueError,),
    ),
    "message of a model that calls tools": Parser(
        lambda _: [f"Hm. {CALL} and {CALL}".encode(), b"<think>x</think>" + CALL.encode()],
        lambda data, _: calls(data.decode(errors="replace")),
        (),
    ),
    "call of a model": Parser(
        lambda _: [CALL.removeprefix("<tool_call>").removesuffix("</tool_call>").encode()],
        lambda data, _: calls(f"<tool_call>{data.decode(errors='replace')}</tool_call>"),
        (),
        "json",
    ),
    "timeline": Parser(
        lines(SPAN, SPAN | {"version": None}),
        lambda data, directory: timing.read_spans(into(directory / "timeline.jsonl", data)),
        (ValueError,),
    ),
    "timeline of a run that is resumed": Parser(
        lines(SPAN, SPAN | {"version": None, "role": "replica-0"}),
        lambda data, directory: go_back(into(directory / "timeline.jsonl", data)),
        (),
    ),
}


def go_back(path: Path) -> None:
    timing.go_back(path, 3, again=("update_weights",))
    for file in path.parent.glob("timeline*"):
        file.unlink()


@pytest.mark.parametrize("name", PARSERS)
def test_whatever_is_read_is_a_value_or_one_of_our_errors_in_little_time_and_memory(name, tmp_path):
    parser = PARSERS[name]
    seeds = parser.seeds(tmp_path)
    for seed in seeds:
        try_it(parser, seed, tmp_path)

    @settings(
        max_examples=MUTATIONS // AT_A_TIME,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(number=st.integers(0, 2**64 - 1))
    def fuzz(number: int) -> None:
        random = Random(number)
        for _ in range(AT_A_TIME):
            try_it(parser, changed(seeds, parser.form, random), tmp_path)

    tracemalloc.start()
    try:
        fuzz()
    finally:
        tracemalloc.stop()


def try_it(parser: Parser, data: bytes, directory: Path) -> None:
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    took = seconds_of(parser, data, directory)
    peak = tracemalloc.get_traced_memory()[1] - before if tracemalloc.is_tracing() else 0
    assert peak < MOST_NBYTES + len(data), f"{peak} bytes for {data[:80]!r}"
    if took >= MOST_S:  # garbage of a whole test process was collected meanwhile, or these bytes always take so long
        took = seconds_of(parser, data, directory)
    assert took < MOST_S, f"{took:.2f} s for {data[:80]!r}"


def seconds_of(parser: Parser, data: bytes, directory: Path) -> float:
    """Of processor time of this thread, to read `data`."""
    start = time.thread_time()
    try:
        parser.parse(data, directory)
    except parser.errors as exc:
        assert str(exc)
        assert len(str(exc)) < 4_000 + 2 * len(data)
    return time.thread_time() - start


def test_forty_eight_bytes_do_not_make_gigabytes():
    column = (np.dtype(np.int8).str, zlib.compress(b"\x00"))
    data = msgspec.msgpack.encode([[10_000_000, 2], *[column] * 5])
    assert len(data) < 100
    with pytest.raises(PlanError, match="10000000 rows that are all the same"):
        ShardTable.decode(data)


@pytest.mark.parametrize(
    ("rows", "message"), [(2**40, "1099511627776 rows"), (-1, "-1 rows"), (1000, "more than 1000 bytes")]
)
def test_a_table_that_inflates_to_more_than_its_rows_is_refused_before_it_does(rows: int, message: str):
    column = (np.dtype(np.int8).str, zlib.compress(bytes(2**26)))
    data = msgspec.msgpack.encode([[rows, 1], *[column] * 3])
    tracemalloc.start()
    try:
        with pytest.raises(PlanError, match=message):
            ShardTable.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_table_whose_columns_are_cut_off_or_damaged_is_refused():
    table = RANKS[0]
    shape, *columns = msgspec.msgpack.decode(table.encode())
    code, data = columns[1]
    for damaged in (data[:-3], data[:-1] + bytes([data[-1] ^ 1]), data + b"more"):
        with pytest.raises(PlanError, match="damaged|less than was written"):
            ShardTable.decode(msgspec.msgpack.encode([shape, columns[0], (code, damaged), *columns[2:]]))


@pytest.mark.parametrize("largest", [2**8, 2**31, 2**33, 2**40])
def test_large_indices_come_back_as_integers(largest):
    wide = Layout.of([TensorSpec(name="w", shape=(largest,), dtype="uint8")])
    table = ShardTable.of(wide, [Shard("w", Box((0,), (largest // 2,))), Shard("w", Box((largest // 2,), (largest,)))])
    again = ShardTable.decode(table.encode())
    assert again.stop.dtype.kind == "i"
    assert again.stop[:, 0].tolist() == [largest // 2, largest]


def test_a_message_takes_memory_for_what_has_come_and_not_for_what_is_announced():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<Q", link_messages.MAX_FRAME_NBYTES))
        theirs.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        try:
            with pytest.raises(TransportError, match="closed the connection or died"):
                link_messages.receive_message(ours, link_messages.FromServer)
            assert tracemalloc.get_traced_memory()[1] < 2**23
        finally:
            tracemalloc.stop()
