"""The vLLM side of a sync: a weight-transfer engine that loads a version from a node arena or a ParameterServer.

It runs inside every vLLM worker (one per rank, data-parallel ones included), with or without our trainer. An update
request is one of

    {"arena_path": str, "version": int}      the bytes are in an arena on this host; with "since": int, the version
                                             that every worker computes with, unchanged tensors are not loaded
    {"socket_paths": {device id: path}}      a ParameterServer sends them bucket by bucket
    {"files": {path: [bytes, time]}}         every worker reads the safetensors files of a checkpoint

Each rank passes views of the mapped memory to the model's own `load_weights` inside vLLM's layerwise reload: it copies
only its slice of a tensor, or its experts, and vLLM post-processes fused, packed and quantised layouts as from disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ...compat.vllm import note_sleep
from ...compat.vllm_0_24 import configuration
from ...errors import ActivationError, ConfigError, IntegrityError, TransportError
from ...memory.committed import PinnedSlots, open_to_activate
from ...memory.digest import Manifest
from ...parameter_server.buffers import stored_tensors
from ...parameter_server.checkpoint_directory import State, checkpoint_files, unchanged
from ...parameter_server.devices import device_id
from ...parameter_server.engine_receiver import IncomingWeights
from ...parameter_server.safetensors_files import read_checkpoint
from ...parameter_server.writers import Ledger
from ...plan.types import EngineCheckResult
from .build import Weights, load_as_from_disk
from .check import EngineCheck, digest_of, free_nbytes, needed_nbytes
from .fit import Fit, Seen, TensorShapes, fit_of, names_kept_wide, require_equal_copies
from .reload import REFUSALS, Reload, ReloadFailed, require_exchangeable, take_over
from .reports import write_report, write_worker
from .unchanged import Kept, Loaded, Sources

logger = logging.getLogger(__name__)


@dataclass
class ArenaInitInfo(WeightTransferInitInfo):
    """The settings of the engine before the first update."""

    tensors: dict[str, tuple[str, list[int]]] | None = None
    """If given: dtype and shape of every tensor of later updates; the worker refuses those that do not fit."""
    check_engine: str = "first"
    """The versions to check: first, always or off; see `check.py`."""
    report_directory: str | None = None
    """Directory in which each worker lists the checkpoint's tensors that it keeps in float32."""


@dataclass
class ArenaUpdateInfo(WeightTransferUpdateInfo):
    """An update: from an arena, from ParameterServers (one per worker), or from files."""

    arena_path: str | None = None
    version: int | None = None
    since: int | None = None
    """The version that every worker has, by the caller's knowledge: tensors unchanged since then may be kept."""
    socket_paths: dict[str, str] | None = None
    """Device id to path. On accelerators a worker uses its device's path, on CPU the one at its rank's position."""
    files: dict[str, State] | None = None
    """Files of a checkpoint, with the state that they must have."""
    report_directory: str | None = None
    """Directory in which each worker reports the result of its check."""
    timeout_s: float = 600.0
    """The timeout of each wait for the ParameterServer."""
    writer: str | None = None
    """`Writer.id` of the caller."""
    load: str = ""
    """The identity of this load, which workers report to an `Order` after all have loaded it."""

    def __post_init__(self) -> None:
        sources = [source for source in (self.arena_path, self.socket_paths, self.files) if source is not None]
        if len(sources) != 1 or (self.arena_path and self.version is None):
            raise ValueError("an update names arena_path and version, or socket_paths, or files")


class ArenaWeightTransferEngine(WeightTransferEngine[ArenaInitInfo, ArenaUpdateInfo]):
    """The weight-transfer engine of one vLLM worker. vLLM calls it on the worker's thread: start, receive, finish."""

    init_info_cls = ArenaInitInfo
    update_info_cls = ArenaUpdateInfo

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._check = EngineCheck("first", self.vllm_config, self.device)
        self.ledger = Ledger()
        note_sleep()
        self._slots = PinnedSlots() if self.device.type == "cuda" else None
        self._loaded: Loaded | None = None
        """What the model computes with, if it came out of an arena through the reload."""
        self._proven: frozenset[str] | None = None
        """Layers that may stay as they are: once they did, all of the model equalled a load from disk. None: not tried
        yet."""
        self._tensors_kept = 0
        self._fit: tuple[TensorShapes, Fit] | None = None
        """Of the tensors that were last asked about."""
        self._copies: dict[str, str] = {}
        """As `Fit.copies`, of those that were last held against the model."""
        self._twins: set[str] | None = None
        """Tensors that had to be equal in the last version; None before the first."""
        self._problems: tuple[str, ...] = ()
        """What was found not to fit, of the version that is loaded."""
        self._why_whole = ""
        """Why versions are loaded as from disk; empty if they are not. Known after the reload was tried."""

    def init_transfer_engine(self, init_info: ArenaInitInfo) -> None:
        """Raises ActivationError if `tensors` do not fit the model, ValueError for an unknown `check_engine`.

        ConfigError if the weights in the model's directory cannot be read for a report.
        """
        self._check = EngineCheck(init_info.check_engine, self.vllm_config, self.device)
        if init_info.tensors is not None:
            self._require_fit(init_info.tensors)
        if init_info.report_directory is not None:
            files = checkpoint_files(Path(self.vllm_config.model_config.model))
            tensors = {tensor.name: (tensor.dtype, list(tensor.shape)) for tensor in read_checkpoint(files)}
            wide = names_kept_wide(self.vllm_config, tensors)
            write_worker(Path(init_info.report_directory), self._rank, wide)

    def _require_fit(self, tensors: TensorShapes) -> None:
        """One rank speaks for all whose models are alike; the last one, for the reason that `_raise_on_last` gives."""
        is_last = self._rank == get_world_group().world_size - 1
        if is_last or not self._are_alike:
            fit = self._fit_of_all(tensors)
            self._copies = fit.copies(tensors)
            if is_last:
                fit.require(tensors)

    @property
    def _are_alike(self) -> bool:
        """Whether every rank has a part of each layer and of each expert."""
        parallel = self.parallel_config
        return not parallel.enable_expert_parallel and parallel.pipeline_parallel_size == 1

    def _fit_of_all(self, tensors: TensorShapes) -> Fit:
        """Where ranks are not alike, all of them call it."""
        shapes = {name: (dtype, list(shape)) for name, (dtype, shape) in tensors.items()}
        if self._fit is None or self._fit[0] != shapes:
            self._fit = shapes, fit_of(self.vllm_config, shapes)
        _, fit = self._fit
        if self._are_alike:
            return fit
        world = get_world_group()
        fits: list[Fit] = [fit] * world.world_size
        torch.distributed.all_gather_object(fits, fit, group=world.cpu_group)
        return fit.together(fits)

    def _require_all_taken(
        self, tensors: TensorShapes, digests: Callable[[set[str]], Mapping[str, object]], version: int | None
    ) -> None:
        """Raises ActivationError, on all ranks alike, with all tensors that the model's loader silently skips. Those
        that equal the model's own tensor in their place are accepted; `digests` returns the digests of given names."""
        fit = self._fit_of_all(tensors)
        self._problems = fit.problems
        if fit.problems or fit.unknown:
            return  # perhaps the load does what the trial does not
        fit.require(tensors)
        copies = fit.copies(tensors)
        self._twins = {*copies, *copies.values()}
        if copies:
            require_equal_copies(copies, digests(self._twins), version)

    def start_weight_update(self) -> None:
        """Does nothing: `receive_weights` does all the work."""

    def receive_weights(self, update_info: ArenaUpdateInfo) -> None:
        """Load every weight of the version and check the model.

        Raises ActivationError, naming tensors, if model and version do not match, or the model cannot be loaded;
        ActivationError if the arena's committed version is another, or, before any change, if another writer has
        claimed the server. Raises IntegrityError, naming tensors, if the model then computes with other values;
        TransportError if the ParameterServer is gone, silent or gave up. Only the last rank raises.
        """
        failure: Exception | None = None
        digest = ""
        try:
            self._problems = ()
            self._require_free(update_info.writer)
            digest = self._receive(update_info)
        except Exception as exc:  # noqa: BLE001 - raised below, on one of the ranks
            failure = exc
            if isinstance(exc, ActivationError) and self._problems:
                exc.message = f"{exc.message}; beforehand: {'; '.join(self._problems)}"
        finally:
            self._check.forget()
        if update_info.report_directory is not None:
            write_report(Path(update_info.report_directory), self._rank, self.checked, failure)
        if self._raise_on_last(failure):
            self.ledger.loaded(update_info.load, update_info.version, digest)

    def _require_free(self, writer: str | None) -> None:
        """On all ranks alike."""
        if not self._all_agree(self.ledger.is_free_for(writer)):
            self.ledger.require(writer)
            raise ActivationError("another publisher writes to the server, as another rank found")

    def _receive(self, update_info: ArenaUpdateInfo) -> str:
        """The digest of the version, where it comes with one."""
        if update_info.socket_paths is not None:
            path = self._own_socket(update_info.socket_paths)
            with IncomingWeights(path, self.device, update_info.timeout_s) as incoming:
                self.load_once(incoming.tensors())
        elif update_info.arena_path is not None and update_info.version is not None:
            with open_to_activate(update_info.arena_path, update_info.version, self._slots) as (manifest, slot):
                self.load_version(slot.tensors, manifest, update_info.since)
                return manifest.digest
        elif update_info.files is not None:
            self.load_files(update_info.files)
        return ""

    def load_version(self, weights: Callable[[], Weights], manifest: Manifest, since: int | None) -> None:
        """Load the version of `manifest`. `weights` iterates over its tensors, borrowed."""
        shapes = {spec.name: (spec.dtype, list(spec.shape)) for spec in manifest.plan.layout.specs}
        self._require_all_taken(
            shapes,
            lambda sought: {name: digest_of(tensor) for name, tensor in weights() if name in sought},
            manifest.version,
        )
        self.ledger.begin_load()
        before, self._loaded = self._loaded, None
        sources = before.sources if before is not None else None
        if since is None or not self._load_changed(weights, manifest, before, since):
            sources = self.load(weights, manifest.version)
        if sources is not None:
            self._loaded = Loaded.of(manifest, sources)

    def load_files(self, states: Mapping[str, State]) -> None:
        """Load the checkpoint in these files. Raises ConfigError on all ranks if a file has changed since `states`."""
        why: ConfigError | None = None
        files: list[Path] = []
        try:
            files = unchanged(states)
        except ConfigError as exc:
            why = exc
        if not self._all_agree(why is None):
            raise why or ConfigError("the files have changed, as another rank found")

        def weights() -> Weights:
            return stored_tensors(files)

        self._require_all_taken(
            {tensor.name: (tensor.dtype, list(tensor.shape)) for tensor in read_checkpoint(files)},
            lambda sought: {name: digest_of(tensor) for name, tensor in weights() if name in sought},
            None,
        )
        self.ledger.begin_load()
        self._loaded = None
        self.load(weights, None)

    def _load_changed(
        self, weights: Callable[[], Weights], manifest: Manifest, before: Loaded | None, since: int
    ) -> bool:
        """Load what is not as it was in version `since`, if that is worth it and right; False if all has to be loaded.
        Ranks agree: each has layers of its own."""
        kept, version = Kept(), manifest.version
        if before is not None and before.version == since and not self._why_whole:
            kept = before.kept(manifest, self._proven)
        if not self._all_agree(bool(kept.names)):
            return False
        is_new = self._proven is None
        if not is_new:
            self._check.before(self.model, None, self._all_agree)
        elif not self._check.before_part(self.model, weights, self._all_agree):
            return False
        why = ""
        try:
            _, why = self._reload(((name, t) for name, t in weights() if name not in kept.names), version, kept)
            if not why:
                self._check.after(self.model, version)
        except (ActivationError, IntegrityError) as exc:
            why = exc.message
        finally:
            self._check.forget()
        if not self._all_agree(not why):
            self._proven = frozenset()
            logger.warning("from now on every tensor is loaded, also those that did not change: %s", why or "see above")
            return False
        self._proven = kept.layers if is_new else self._proven
        self._tensors_kept = len(kept.names)
        return True

    def load(self, weights: Callable[[], Weights], version: int | None) -> Sources | None:
        """Load all of `weights`, which can be called several times: (checkpoint name, tensor) pairs, borrowed.

        Returns the tensors that fill each layer; None if a second model was loaded instead of the reload.
        """
        self._tensors_kept = 0
        self._check.before(self.model, weights, self._all_agree)
        why = ""
        if not self._why_whole:
            sources, why = self._try_reload(weights(), version)
            if not why:
                return sources
        self._check.release()
        self._load_whole(weights(), version)  # raises the same if it is the version that is wrong
        self._why_whole = self._why_whole or self._noted_whole(why)
        self._check.after(self.model, version)
        return None

    def _try_reload(self, weights: Weights, version: int | None) -> tuple[Sources | None, str]:
        """What filled which layer, and why the version has to be loaded another way, if it has. Ranks agree.

        Raises what is wrong with the version on this rank; what filled which layer is None if it is another one's.
        """
        is_first, kind = self._check.compares, type(self.model).__name__
        sources, why = Sources(), ""
        failure: Exception | None = None
        try:
            sources, why = self._reload(weights, version)
            if not why:
                self._check.after(self.model, version)
        except ReloadFailed as exc:
            why = f"vLLM's reload of {kind} fails ({exc.message})"
        except IntegrityError as exc:
            if is_first:
                why = f"vLLM's reload of {kind} is not right ({exc.message})"
            else:
                failure = exc
        except Exception as exc:  # noqa: BLE001 - raised below, when every rank knows of it
            failure = exc
        nobody_failed = self._all_agree(failure is None)
        if failure is not None:
            raise failure
        if not nobody_failed:
            return None, ""
        return sources, why if self._all_agree(not why) else why or f"vLLM's reload of {kind} fails on another rank"

    @property
    def checked(self) -> EngineCheckResult | None:
        """The result of the check of the last loaded version."""
        result = self._check.result
        if self._tensors_kept:
            found = result or EngineCheckResult(seconds=0.0, found="what did not change was not loaded again")
            return replace(found, tensors_kept=self._tensors_kept)
        if not self._why_whole:
            return result
        return EngineCheckResult(seconds=result.seconds if result is not None else 0.0, found=self._why_whole)

    def load_once(self, weights: Weights) -> None:
        """Load tensors that pass only once, in buckets. Tensors that the model skips are known after the load."""
        self.ledger.begin_load()
        seen = Seen(self.vllm_config.model_config.get_vocab_size(), self._twins)
        self._load_once(seen.noting(weights))
        self._require_all_taken(seen.shapes, seen.digests, None)

    def _load_once(self, weights: Weights) -> None:
        self._loaded, self._tensors_kept = None, 0
        if self._why_whole:
            self._load_whole(weights, None)
            return
        self._check.before(self.model, None, self._all_agree)
        _, why = self._reload(weights, None)
        if why:
            self._why_whole = self._noted_whole(why)
            raise ActivationError(
                f"{type(self.model).__name__} needs another way of loading, which the next update uses: update again"
            )
        self._check.after(self.model, None)

    def _reload(self, weights: Weights, version: int | None, kept: Kept | None = None) -> tuple[Sources, str]:
        """What filled which layer, and why versions have to be loaded another way, if they have. Raises ReloadFailed if
        that is to be tried.

        Ended even when loading fails, so that another reload can begin.
        """
        reload = Reload(self.model, self.vllm_config, kept)
        try:
            unreached = reload.load(iter(weights), version)
        except BaseException:
            with suppress(*REFUSALS):  # what loading says is the reason
                reload.end()
            raise
        kind, why = type(self.model).__name__, ""
        try:
            reload.end()
        except REFUSALS as exc:
            why = f"vLLM's reload of {kind} fails ({type(exc).__name__}: {exc})"
        if unreached and not why:
            named = ", ".join(sorted(unreached)[:3]) + (", ..." if len(unreached) > 3 else "")
            why = f"vLLM's reload does not reach {len(unreached)} parameters of {kind} ({named})"
        return reload.sources, why

    def _noted_whole(self, why: str) -> str:
        text = (
            f"{why}: every version is loaded as from disk, into a second model, which takes longer and needs its memory"
        )
        logger.warning(text)
        return text

    def _load_whole(self, weights: Weights, version: int | None) -> None:
        kind = type(self.model).__name__
        require_exchangeable(self.vllm_config, f"vLLM's reload does not do for all of {kind}")
        needed, free = needed_nbytes(self.model), free_nbytes(self.device)
        if not self._all_agree(needed < free):
            raise ActivationError(
                f"vLLM's reload does not load all of {kind}, and a second model needs {needed} bytes on {self.device}, "
                f"where {free} are free",
                version=version,
                phase="activate",
            )
        try:
            fresh = load_as_from_disk(self.vllm_config, weights)
        except REFUSALS as exc:
            raise ActivationError(
                f"{kind} cannot load the version: {type(exc).__name__}: {exc}", version=version, phase="activate"
            ) from exc
        take_over(self.model, fresh)

    def _all_agree(self, mine: bool) -> bool:
        world = get_world_group()
        if world.world_size == 1:
            return mine
        answers: list[bool | None] = [None] * world.world_size
        torch.distributed.all_gather_object(answers, mine, group=world.cpu_group)
        return all(answers)

    @property
    def _rank(self) -> int:
        """Of this worker among those of its engine, of all data-parallel ranks."""
        return int(get_world_group().rank_in_group)

    def _own_socket(self, socket_paths: dict[str, str]) -> str:
        """Device ids of CPU ranks count over all engines; a caller names each engine those that feed it, in order."""
        key = device_id(self.device, self._rank)
        if self.device.type == "cpu":
            key = next(islice(socket_paths, self._rank, None), key)
        if key not in socket_paths:
            raise TransportError(
                f"no ParameterServer feeds worker {self._rank} on {self.device}: there are {', '.join(socket_paths)}"
            )
        return socket_paths[key]

    def _raise_on_last(self, failure: Exception | None) -> bool:
        """Raise what failed on any rank, on the last one alone; whether nothing has, on the others.

        vLLM's executor reads the ranks' answers in order and stops at an error: the unread answers of later ranks would
        be taken for those to its next call, and so on for ever.
        """
        world = get_world_group()
        if world.world_size == 1:
            if failure is not None:
                raise failure
            return True
        failures: list[str | None] = [None] * world.world_size
        mine = f"{type(failure).__name__}: {failure}" if failure is not None else None
        torch.distributed.all_gather_object(failures, mine, group=world.cpu_group)
        told = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
        differs = any(text.startswith(f"{IntegrityError.__name__}: ") for text in failures if text is not None)
        if told:
            self._check.start_over()  # of some ranks it has passed: they would not wait for each other's answers
        if told and world.rank_in_group == world.world_size - 1:
            raise (IntegrityError if differs else ActivationError)("; ".join(told)) from failure
        return not told

    def finish_weight_update(self) -> None:
        """Does nothing: the load is complete. Called after a failure, too, because one rank of several may raise. The
        claim's owner also ends with it an update that a dead writer has begun."""

    def answer(self, order: str, *, active: bool, asleep: tuple[str, ...] = ()) -> dict[str, Any]:
        """Answer an `Order` in JSON: see `Ledger`. `asleep`: tags of memory that sleeps. It never raises on one rank of
        several."""
        refuses = ""
        if self.vllm_config.lora_config is not None:
            refuses = "it serves LoRA adapters, under whose layers names are others: start vLLM without --enable-lora"
        elif getattr(self.parallel_config, "enable_eplb", False):
            refuses = "it moves experts between ranks: start vLLM without --enable-eplb"
        elif asleep:
            refuses = f"it sleeps ({', '.join(asleep)}): wake it up first (POST /wake_up)"
        return self.ledger.answer(order, rank=self._rank, active=active, refuses=refuses, copies=self._copies)

    def shutdown(self) -> None:
        if self._slots is not None:
            self._slots.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """The sending side of vLLM's own trainers, without which vLLM 0.25 to 0.27 create no engine.

        Raises ConfigError: weights come from a sync, not from vLLM's trainers.
        """
        raise ConfigError(
            "this vLLM engine does not receive weights from vLLM's trainers: push them with a WeightPublisher"
        )


class ArenaEngineOfLess(ArenaWeightTransferEngine):
    """The engine for vLLM 0.24: see `compat.vllm_0_24`."""

    def __init__(self, config: Any, parallel_config: Any, model: torch.nn.Module) -> None:
        self.vllm_config = configuration()
        self.device = next(model.parameters()).device
        super().__init__(config, parallel_config, model)

    def receive_weights(self, update_info: ArenaUpdateInfo, load_weights: Any = None) -> None:
        """As for every vLLM; ignores `load_weights`, with which vLLM 0.24 would load."""
        super().receive_weights(update_info)
