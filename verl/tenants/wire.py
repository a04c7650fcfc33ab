"""The messages of the Tinker protocol that travel as protobuf: batches for training, and what computing them answers.

The field numbers are those of the public package `tinker`, 0.38. Maps are written as what they are on the wire:
repeated entries of a key and a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from verl.tenants.refused import Refused

CONTENT_TYPE = "application/x-protobuf"
FLOAT32, INT64, INT32 = 1, 2, 3
DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
STOP, LENGTH = 0, 1
"""Why a sequence ended."""

_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "SparseCsr": {},
    "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "*int64")},
    "Text": {"tokens": (1, "bytes")},
    "Other": {},
    "Chunk": {"encoded_text": (1, "Text"), "image": (2, "Other"), "dmel": (3, "Other")},
    "NamedTensor": {"key": (1, "string"), "value": (2, "Tensor")},
    "Datum": {"model_input": (1, "*Chunk"), "loss_fn_inputs": (2, "*NamedTensor")},
    "Value": {"number": (1, "double"), "text": (2, "string")},
    "NamedValue": {"key": (1, "string"), "value": (2, "Value")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "string"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "*NamedValue"),
    },
    "Batched": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32")},
    "NamedBatched": {"key": (1, "string"), "value": (2, "Batched")},
    "Record": {"fields": (2, "*NamedBatched"), "num_datums": (3, "int64")},
    "NamedNumber": {"key": (1, "string"), "value": (2, "double")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "*Record"),
        "metrics": (3, "*NamedNumber"),
    },
    "Topk": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "uint32"), "length": (4, "uint32")},
    "Sequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "Topk"),
    },
    "SampleResponse": {
        "sequences": (1, "*Sequence"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "Topk"),
    },
}


def _messages() -> dict[str, Any]:
    """A class for each line of the table, in a pool of their own: a client may be in the same process."""
    package = "verl.tenants"
    file = descriptor_pb2.FileDescriptorProto(name="verl/tenants.proto", package=package, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            field = described.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            if (kind := kind.removeprefix("*")) in _FIELDS:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _FIELDS}


MESSAGES = _messages()


@dataclass(frozen=True, kw_only=True, slots=True)
class Datum:
    """A sequence to compute: `tokens` [n], and what a loss needs for each of them, [n] each."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A request of `forward` or `forward_backward`."""

    model_id: str
    seq_id: int
    loss: str
    options: Mapping[str, float | str]
    data: Sequence[Datum]
    forward_only: bool

    def fingerprint(self) -> str:
        """Of its content, whatever the order of maps is on the wire."""
        found = hashlib.sha256(repr((self.loss, sorted(self.options.items()), self.forward_only)).encode())
        for datum in self.data:
            for name, values in (("", datum.tokens), *sorted(datum.inputs.items())):
                found.update(repr((name, values.shape, values.dtype.str)).encode() + values.tobytes())
        return found.hexdigest()


def read_batch(body: bytes) -> Batch:
    """Raises Refused for what is not such a message, and for pictures and sparse tensors."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as exc:
        raise Refused(f"the body is no ForwardBackwardRequest of tinker 0.38: {exc}") from exc
    return Batch(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        options={entry.key: entry.value.text or entry.value.number for entry in message.loss_fn_config_v2},
        data=[
            Datum(
                tokens=_tokens(datum.model_input, f"data[{index}]"),
                inputs={each.key: _array(each.value, f"data[{index}].{each.key}") for each in datum.loss_fn_inputs},
            )
            for index, datum in enumerate(message.data)
        ],
        forward_only=message.forward_only,
    )


def _tokens(chunks: Sequence[Any], where: str) -> np.ndarray:
    if not all(chunk.HasField("encoded_text") for chunk in chunks):
        raise Refused(f"{where}: model_input has a chunk that is no text; pictures and sound are not served")
    texts = [_from_bytes(chunk.encoded_text.tokens, DTYPES[INT32], where) for chunk in chunks]
    return np.concatenate(texts).astype(np.int64) if texts else np.empty(0, np.int64)


def _array(tensor: Any, where: str) -> np.ndarray:
    if tensor.HasField("sparse_csr"):
        raise Refused(f"{where} is sparse; send one dense value for each token")
    if tensor.dtype not in (FLOAT32, INT64):
        raise Refused(f"{where} has dtype {tensor.dtype}; float32 and int64 are served")
    values = _from_bytes(tensor.dense, DTYPES[tensor.dtype], where)
    shape = tuple(tensor.shape) or (len(values),)
    if min(shape) < 0 or int(np.prod(shape)) != len(values):
        raise Refused(f"{where} has {len(values)} values, which its shape {list(shape)} does not hold")
    return values.reshape(shape)


def _from_bytes(data: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise Refused(f"{where} has {len(data)} bytes, which are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def written_batch(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput with one float32 array of log-probs [n] for each datum."""
    ends = np.cumsum([0, *(values.nbytes for values in logprobs)]).astype("<i8")
    batched = MESSAGES["Batched"](
        data=b"".join(values.tobytes() for values in logprobs), offsets=ends.tobytes(), dtype=FLOAT32
    )
    field = MESSAGES["NamedBatched"](key="logprobs", value=batched)
    message = MESSAGES["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[MESSAGES["Record"](fields=[field], num_datums=len(logprobs))],
        metrics=[MESSAGES["NamedNumber"](key=name, value=value) for name, value in metrics.items()],
    )
    return bytes(message.SerializeToString())


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeliest:
    """The k likeliest tokens at n positions, int32 and float32 [n, k]; -99999.0 where there are none."""

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A generated sequence: int32 and float32 [n]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    """By a stop token or string, which is its last; otherwise by its length."""
    likeliest: Likeliest | None = None


def written_samples(
    samples: Sequence[Sampled], prompt: np.ndarray | None = None, likeliest: Likeliest | None = None
) -> bytes:
    """A SampleResponse. `prompt`: float32 log-probs of the prompt's tokens, NaN where there are none."""
    message = MESSAGES["SampleResponse"](prompt_logprobs=b"" if prompt is None else prompt.tobytes())
    if likeliest is not None:
        _write_likeliest(message.topk_prompt_logprobs, likeliest)
    for sample in samples:
        written = message.sequences.add(
            stop_reason=STOP if sample.stopped else LENGTH,
            tokens=sample.tokens.tobytes(),
            logprobs=sample.logprobs.tobytes(),
        )
        if sample.likeliest is not None:
            _write_likeliest(written.topk_sampled_logprobs, sample.likeliest)
    return bytes(message.SerializeToString())


def sampled_tokens(message: bytes) -> int:
    """How many tokens a SampleResponse has."""
    return sum(len(each.tokens) // 4 for each in MESSAGES["SampleResponse"].FromString(message).sequences)


def _write_likeliest(into: Any, likeliest: Likeliest) -> None:
    into.length, into.k = likeliest.tokens.shape
    into.token_ids, into.logprobs = likeliest.tokens.tobytes(), likeliest.logprobs.tobytes()
