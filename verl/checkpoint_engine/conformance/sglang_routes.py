"""Ways by which an update reaches a server of SGLang, each a driver of its public HTTP interface alone."""

from __future__ import annotations

import base64
import io
import threading
import urllib.parse
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import CheckpointEngineError, ConfigError, TransportError
from ..links.network import LOOPBACK, own_address
from ..parameter_server.checkpoint_directory import checkpoint_files
from ..parameter_server.http_server import HttpServer

if TYPE_CHECKING:
    import torch

    Tensors = Sequence[tuple[str, torch.Tensor]]

MODES = {"abort": "abort", "keep": "retract"}
"""SGLang's names of the modes in which it is paused."""
MOST_CHUNK_NBYTES = 2**28
NUM_CHUNKS = 4
"""The fewest requests of a load, so that one of a small model has several, too."""

LEAVES_WITHIN_S = 1.0
"""For an answer that nobody needs: SGLang carries out requests whose client has gone, too."""


class _SGLangRoute:
    labels = True
    FLUSHES: ClassVar[bool] = True
    """Whether a load, or its last part, clears the caches."""
    pause_modes: Sequence[str] = tuple(MODES)

    def __init__(self, url: str, *, timeout_s: float, pause_mode: str) -> None:
        self._http = HttpServer(url, timeout_s=timeout_s)
        self.pause_mode = pause_mode

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Resumes after an error, too."""
        self._http.call("POST", "/pause_generation", {"mode": MODES[self.pause_mode]})
        try:
            self._flush()
            yield
        finally:
            self._http.call("POST", "/continue_generation", {})

    def _flush(self) -> None:
        """Wait until the batches that the pause has ended are gone. The flush of a load would be refused before: the
        server then has new weights, old caches and the old label."""
        from ..publisher.sglang_endpoint import flush_cache

        flush_cache(self._http)

    def close(self) -> None:
        """Nothing stays."""


class SGLangDiskRoute(_SGLangRoute):
    """SGLang's own `update_weights_from_disk` of a directory, which the server's host must have. It waits for requests
    itself, unless `pause_mode` has it pause first."""

    pause_modes: Sequence[str] = ("wait", *MODES)
    UPDATE: ClassVar[dict[str, Any]] = {"load_format": "auto"}
    """A server that was started with dummy weights would load dummies again."""

    def check(self) -> None:
        """Every server has this route."""

    def push(self, directory: Path, version: int) -> str:
        update = {"model_path": str(directory), "weight_version": str(version)} | self.UPDATE
        if self.pause_mode not in MODES:
            self._http.call("POST", "/update_weights_from_disk", update)
            return str(version)
        with self._paused():
            self._http.call("POST", "/update_weights_from_disk", update | {"flush_cache": self.FLUSHES})
        return str(version)


class _ChunkedRoute(_SGLangRoute, ABC):
    """Named tensors in several requests: pause, begin, load, end, resume. The last part clears the caches and names the
    version."""

    def check(self) -> None:
        """Raises ConfigError: an answer of a server that is not paused would go on between two parts."""
        if self.pause_mode not in MODES:
            raise ConfigError("SGLang does not pause when its requests have ended: --pause-mode abort, or keep")

    def push(self, directory: Path, version: int) -> str:
        tensors = [item for file in checkpoint_files(directory) for item in _tensors_of(file)]
        *chunks, last = in_chunks(tensors)
        with self._paused(), self._connected() as load:
            self._http.call("POST", "/begin_weight_update", {})
            try:
                for chunk in chunks:
                    load(chunk, {"flush_cache": False})
                load(last, {"flush_cache": self.FLUSHES, "weight_version": str(version)})
            finally:
                self._http.call("POST", "/end_weight_update", {})
        return str(version)

    @abstractmethod
    def _connected(self) -> AbstractContextManager[Callable[[Tensors, Mapping[str, Any]], None]]:
        """Yields what sends a part and the rest of its request. It returns once the server has answered."""
        ...

    def _num_ranks(self) -> int:
        return int(self._http.call("GET", "/server_info")["tp_size"])


class SGLangTensorRoute(_ChunkedRoute):
    """SGLang's `update_weights_from_tensor`: tensors in shared memory of its host, as its `MultiprocessingSerializer`
    writes them"""

    @contextmanager
    def _connected(self) -> Iterator[Callable[[Tensors, Mapping[str, Any]], None]]:
        num_ranks = self._num_ranks()

        def load(chunk: Tensors, more: Mapping[str, Any]) -> None:
            copies = [(name, tensor.clone()) for name, tensor in chunk]  # each in memory of its own
            named = [_serialized(copies)] * num_ranks
            self._http.call("POST", "/update_weights_from_tensor", {"serialized_named_tensors": named, **more})

        yield load


class SGLangDistributedRoute(_ChunkedRoute):
    """SGLang's `update_weights_from_distributed`: a process group of the pusher and the ranks, over gloo, which a CPU
    has"""

    @contextmanager
    def _connected(self) -> Iterator[Callable[[Tensors, Mapping[str, Any]], None]]:
        name = f"conformance-{uuid.uuid4().hex}"
        call, held = self._http.call, self._joined(name)

        def load(chunk: Tensors, more: Mapping[str, Any]) -> None:
            works = [held[0].broadcast([tensor], _from_rank_0()) for _, tensor in chunk]
            update = {
                "group_name": name,
                "names": [tensor for tensor, _ in chunk],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
                "shapes": [list(tensor.shape) for _, tensor in chunk],
            }
            call("POST", "/update_weights_from_distributed", {**update, **more})
            try:
                for work in works:
                    work.wait(timedelta(seconds=self._http.timeout_s))
            except RuntimeError as exc:
                raise TransportError(f"a broadcast to {self._http.url} failed: {exc}") from exc

        try:
            yield load
        finally:
            # The group's end waits for broadcasts that nobody has received, up to their deadline.
            threading.Thread(target=held.clear, daemon=True).start()
            with suppress(CheckpointEngineError):  # an earlier error says more
                call("POST", "/destroy_weights_update_group", {"group_name": name}, timeout_s=LEAVES_WITHIN_S)

    def _joined(self, name: str) -> list[Any]:
        """The group of this process, rank 0, and of SGLang's ranks, alone in a list. Raises Refused, TransportError."""
        from ..compat.torch import PrefixStore, ProcessGroupGloo, TCPStore

        timeout, size = timedelta(seconds=self._http.timeout_s), 1 + self._num_ranks()
        host = urllib.parse.urlsplit(self._http.url).hostname or ""
        address = LOOPBACK if host in (LOOPBACK, "localhost") else own_address(None)
        store = TCPStore(address, 0, size, True, timeout=timeout, wait_for_workers=False)
        within = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))  # torch's names
        held: list[Any] = []

        def join() -> None:
            with suppress(RuntimeError):  # SGLang's ranks have not come: `call` below says why
                held.append(ProcessGroupGloo(within, 0, size, timeout))

        joining = threading.Thread(target=join, daemon=True)
        joining.start()
        init = {"master_address": address, "master_port": store.port, "rank_offset": 1, "world_size": size}
        self._http.call("POST", "/init_weights_update_group", init | {"group_name": name, "backend": "gloo"})
        joining.join(self._http.timeout_s)
        if not held:
            raise TransportError(f"the ranks of {self._http.url} did not join a group at {address}:{store.port}")
        return held


def _serialized(chunk: Tensors) -> str:
    """Names, and where the values are: these move to shared memory, which ends with `chunk`. Raises TransportError."""
    import torch.multiprocessing  # tells the pickler of tensors

    strategy, buffer = torch.multiprocessing.get_sharing_strategy(), io.BytesIO()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        ForkingPickler(buffer).dump([*chunk])
    except RuntimeError as exc:
        raise TransportError(f"no shared memory for {len(chunk)} tensors: {exc}") from exc
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    return base64.b64encode(buffer.getvalue()).decode()


def _from_rank_0() -> Any:
    from ..compat.torch import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    return options


def _tensors_of(file: Path) -> Tensors:
    """Raises ConfigError for a file that is cut off."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return [*load_file(file).items()]
    except SafetensorError as exc:
        raise ConfigError(f"{file} is damaged: {exc}") from exc


def in_chunks(tensors: Tensors) -> list[Tensors]:
    """Consecutive parts of `tensors`: at least `NUM_CHUNKS` if there are as many, none larger than `MOST_CHUNK_NBYTES`
    unless it is one tensor."""
    most = min(MOST_CHUNK_NBYTES, sum(tensor.nbytes for _, tensor in tensors) // NUM_CHUNKS)
    chunks: list[list[tuple[str, torch.Tensor]]] = []
    room = 0
    for name, tensor in tensors:
        room -= tensor.nbytes
        if room < 0 or not chunks:
            chunks.append([])
            room = most - tensor.nbytes
        chunks[-1].append((name, tensor))
    return [*chunks]
