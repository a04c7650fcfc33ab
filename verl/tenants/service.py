"""The calls of the Tinker protocol on adapters in training, their versions and samplers."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from verl.tenants import losses
from verl.tenants.base import Base, Shape
from verl.tenants.checkpoints import SCHEME, Checkpoints, Snapshot, Version, checked_name
from verl.tenants.fields import Fields
from verl.tenants.names import PREFIX, Names
from verl.tenants.quota import Quota
from verl.tenants.refused import Refused
from verl.tenants.sample_requests import read_asked
from verl.tenants.sampler import Asked, Sampler
from verl.tenants.sessions import Model, Sessions
from verl.tenants.tenant import Tenant
from verl.tenants.wire import Batch, read_batch, sampled_tokens
from verl.tenants.worker import Answer, Worker

ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
"""The protocol's AdamParams and their defaults."""


class Service:
    """Its methods are called on one event loop. They raise Refused; what computes is done by the worker."""

    def __init__(
        self,
        base: Base,
        sampler: Sampler,
        checkpoints: Checkpoints,
        versions: Names,
        worker: Worker,
        *,
        quota: Quota,
        names: Collection[str],
        max_tenants: int,
        max_rank: int,
        alpha: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`versions`: finds those of `checkpoints`. `names`: of the base model; the first one is told."""
        self.name = next(iter(names))
        self._names = set(names)
        self._base, self._sampler, self._checkpoints = base, sampler, checkpoints
        self._max_rank, self._alpha = max_rank, alpha
        self._worker, self._versions, self._quota = worker, versions, quota
        self._sessions = Sessions(worker, max_tenants=max_tenants, clock=clock)

    def close(self) -> None:
        self._sampler.close()
        self._worker.close()

    def metrics(self) -> bytes:
        """Totals over all owners, as Prometheus reads them."""
        try:
            from verl.tenants.metrics import written_metrics
        except ImportError as exc:
            raise Refused("/metrics needs the package 'prometheus-client' on the server", status=501) from exc
        return written_metrics(
            adapters=self._sessions.number_of_models(),
            unanswered=self._worker.unanswered,
            outcomes=self._worker.outcomes,
        )

    # Sessions.

    def capabilities(self) -> dict[str, Any]:
        model = {
            "model_name": self.name,
            "max_context_length": self._base.context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def create_session(self, owner: str) -> dict[str, Any]:
        return {"type": "create_session", "session_id": self._sessions.create(owner)}

    def heartbeat(self, owner: str, asked: Fields) -> dict[str, Any]:
        self._sessions.find(owner, asked.take("session_id", str))
        return {"type": "session_heartbeat"}

    def finish(self, owner: str, session_id: str) -> dict[str, Any]:
        """Give up the adapters and samplers of a session. What was saved stays."""
        self._sessions.end(owner, session_id)
        return {}

    # Adapters in training.

    def create_model(self, owner: str, asked: Fields) -> dict[str, Any]:
        session_id, number = asked.take("session_id", str), asked.number("model_seq_id", int, None, 0)
        self._check_base(asked.take("base_model", str))
        lora = Fields(asked.maybe("lora_config", dict) or {}, "lora_config")
        self._check_optimizer(asked)
        asked.without_effect("user_metadata", "type")
        asked.end()
        shape = Shape(
            rank=lora.number("rank", int, 32, 1, self._max_rank),
            alpha=self._alpha,
            attention=lora.take("train_attn", bool, True),
            mlp=lora.take("train_mlp", bool, True),
            unembedding=lora.take("train_unembed", bool, True),
        )
        if not (shape.attention or shape.mlp or shape.unembedding):
            raise Refused("lora_config trains nothing: one of train_attn, train_mlp, train_unembed is to be true")
        self._sampler.require(shape)
        given = lora.seed()
        lora.end()
        seed = secrets.randbits(63) if given is None else given
        model = self._sessions.new_model(owner, session_id, number)

        def make() -> Answer:
            model.tenant = Tenant(self._base, shape, seed)
            return {"type": "create_model", "model_id": model.model_id}

        model.shape = model.shape or shape
        return self._promise(owner, model, 0, _print(shape, given), make)

    def info(self, owner: str, asked: Fields) -> dict[str, Any]:
        model = self._sessions.model(owner, asked.take("model_id", str))
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": self.name,
            "is_lora": True,
            "lora_rank": model.shape.rank if model.shape else None,
            "model_data": {
                "arch": type(self._base.model).__name__,
                "model_name": self.name,
                "tokenizer_id": str(self._base.directory),
            },
        }

    def forward_backward(self, owner: str, body: bytes) -> dict[str, Any]:
        batch = read_batch(body)
        model = self._sessions.model(owner, batch.model_id)
        try:
            losses.check(batch, vocabulary=self._base.vocabulary, context=self._base.context)
        except Refused as exc:
            self._spoil(model, batch, str(exc))
            raise
        new = not self._worker.knows(model.model_id, batch.seq_id)
        try:
            if new:
                self._quota.require(owner)
        except Refused:
            model.postponed = model.postponed if batch.forward_only else batch.seq_id
            raise
        promise = self._promise(owner, model, batch.seq_id, batch.fingerprint(), lambda: _of(model).compute(batch))
        if new:
            self._quota.take(owner, sum(len(datum.tokens) for datum in batch.data))
        return promise

    def _spoil(self, model: Model, batch: Batch, why: str) -> None:
        """A step that was sent along with a refused batch is not done with the rest of the gradients."""
        if not batch.forward_only and not self._worker.knows(model.model_id, batch.seq_id):
            why = f"forward_backward (seq_id {batch.seq_id}) was refused: {why}"
            self._worker.run(model.model_id, lambda: _of(model).spoil(why))

    def optim_step(self, owner: str, asked: Fields) -> dict[str, Any]:
        model, number = self._sessions.model(owner, asked.take("model_id", str)), asked.number("seq_id", int, None, 1)
        if (other := asked.anything("optimizer_params")) is not None:
            raise Refused(f"optimizer_params {other!r:.80} are not served, only AdamParams")
        given = Fields(asked.take("adam_params", dict), "adam_params")
        asked.without_effect("type")
        asked.end()
        adam = {name: given.number(name, float, default, 0.0) for name, default in ADAM.items()}
        given.end()
        for name in ("beta1", "beta2"):
            if adam[name] >= 1:
                raise Refused(f"adam_params.{name}={adam[name]} is not below 1")

        def step() -> Answer:
            return {"metrics": _of(model).step(adam)}

        return self._promise(owner, model, number, _print(adam), step)

    def _promise(
        self, owner: str, model: Model, number: int, fingerprint: str, work: Callable[[], Any], **turn: Any
    ) -> dict[str, Any]:
        """Requests of a model are done in the order of their numbers, which is that in which they come.

        `turn`: what `Worker.submit` is to know.
        """
        if number <= model.last and number > 0 and not self._worker.knows(model.model_id, number):
            raise Refused(f"seq_id {number} of {model.model_id} comes after {model.last}; they are to ascend from 1")
        if model.postponed is not None and number >= model.postponed:
            if number > model.postponed:
                why = f"forward_backward (seq_id {model.postponed}) was to wait, and was not sent again"
                self._worker.run(model.model_id, lambda: _of(model).spoil(why))
            model.postponed = None
        request_id = self._worker.submit(owner, model.model_id, number, fingerprint, work, **turn)
        model.last = max(model.last, number)
        return {"request_id": request_id, "model_id": model.model_id}

    # Versions.

    def save_weights(self, owner: str, asked: Fields) -> dict[str, Any]:
        model, number = self._sessions.model(owner, asked.take("model_id", str)), asked.number("seq_id", int, None, 1)
        name, overwrite = checked_name(asked.take("path", str)), asked.take("overwrite", bool, False)
        asked.without_effect("ttl_seconds", "user_metadata", "type")
        asked.end()

        def write(adapter: Snapshot) -> Answer:
            version = self._checkpoints.save(owner, model.model_id, "weights", name, adapter, overwrite=overwrite)
            return {"type": "save_weights", "path": version.path}

        copy = partial(_copy, model, optimizer=True)
        return self._promise(owner, model, number, _print(name, overwrite), copy, write=write)

    def save_weights_for_sampler(self, owner: str, asked: Fields) -> dict[str, Any]:
        model, number = self._sessions.model(owner, asked.take("model_id", str)), asked.number("seq_id", int, None, 1)
        given, sampler = asked.maybe("path", str), asked.maybe("sampling_session_seq_id", int)
        if (kind := asked.take("kind", str, "snapshot")) != "snapshot":
            raise Refused(f"kind={kind} is not served, only snapshot: a sampler has one version for good")
        if (given is None) == (sampler is None):
            raise Refused("save_weights_for_sampler needs either path or sampling_session_seq_id")
        asked.without_effect("ttl_seconds", "user_metadata", "type")
        asked.end()
        name = None if given is None else checked_name(given)
        session_id = model.model_id.partition(":")[0]
        session = self._sessions.find(owner, session_id)
        sampler_id = f"{session_id}:sample:{sampler}"

        loop = asyncio.get_running_loop()

        def write(adapter: Snapshot) -> Answer:
            version = self._checkpoints.save(owner, model.model_id, "sampler_weights", name, adapter)
            if name is not None:
                return {"type": "save_weights_for_sampler", "path": version.path}
            session.samplers[sampler_id] = version
            loop.call_soon_threadsafe(self._sampler.prepare, version)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        copy = partial(_copy, model, optimizer=False)
        return self._promise(owner, model, number, _print(name, sampler), copy, write=write)

    def load_weights(self, owner: str, asked: Fields) -> dict[str, Any]:
        path, optimizer = asked.take("path", str), asked.take("optimizer", bool)
        base_model = asked.maybe("base_model", str)
        if base_model is not None:
            self._check_base(base_model)
        self._check_optimizer(asked)
        asked.without_effect("user_metadata", "type")
        model_id, number = asked.maybe("model_id", str), 0
        if model_id is not None:
            model, number = self._sessions.model(owner, model_id), asked.number("seq_id", int, None, 1)
        else:
            session_id, model_number = asked.take("session_id", str), asked.number("model_seq_id", int, None, 0)
            found = self._versions.find(owner, path)
            self._sampler.require(found.shape)
            if optimizer:
                found.require_optimizer()  # before a place is taken
            model = self._sessions.new_model(owner, session_id, model_number)
        asked.end()

        def load() -> Answer:
            version = self._versions.find(owner, path)
            tenant = model.tenant or Tenant(self._base, version.shape, seed=0)
            try:
                tenant.load(version, optimizer=optimizer)
            except Exception:
                if model.tenant is None:
                    tenant.close()
                raise
            model.tenant, model.shape = tenant, version.shape
            return {"type": "load_weights", "path": path, "model_id": model.model_id}

        return self._promise(owner, model, number, _print(path, optimizer), load)

    def weights_info(self, owner: str, asked: Fields) -> dict[str, Any]:
        shape = self._versions.find(owner, asked.take("tinker_path", str)).shape
        return {
            "base_model": self.name,
            "is_lora": True,
            "lora_rank": shape.rank,
            "train_unembed": shape.unembedding,
            "train_mlp": shape.mlp,
            "train_attn": shape.attention,
        }

    def training_run(self, owner: str, model_id: str) -> dict[str, Any]:
        model = self._sessions.model(owner, model_id)
        return {
            "training_run_id": model_id,
            "base_model": self.name,
            "model_owner": owner,
            "is_lora": True,
            "lora_rank": model.shape.rank if model.shape else None,
            "last_request_time": datetime.now(UTC).isoformat(),
        }

    def checkpoints(self, owner: str, run: str | None, limit: int | None, offset: int) -> dict[str, Any]:
        """The versions of an owner, or of one of its training runs: `limit` of them, or all, from `offset`."""
        found = self._checkpoints.versions(owner, run)
        shown = found[offset:] if limit is None else found[offset : offset + limit]
        cursor = {"offset": offset, "limit": len(shown) if limit is None else limit, "total_count": len(found)}
        return {"checkpoints": [_checkpoint(version) for version in shown], "cursor": cursor}

    def delete_checkpoint(self, owner: str, run: str, checkpoint_id: str) -> None:
        """Samplers of it that the engine does not hold are refused then."""
        self._versions.delete(owner, f"{SCHEME}{run}/{checkpoint_id}")

    def names(self, owner: str) -> dict[str, Any]:
        return {"names": self._versions.all(owner)}

    async def set_name(self, owner: str, name: str, asked: Fields) -> dict[str, Any]:
        """Requests to sample with the name that come after this have the version; those before keep theirs."""
        path = asked.take("path", str)
        asked.end()
        version = await asyncio.to_thread(self._versions.set, owner, name, path)
        self._sampler.prepare(version)
        return {"path": PREFIX + name, "version": version.path, "digest": version.digest}

    # Samplers.

    def create_sampler(self, owner: str, asked: Fields) -> dict[str, Any]:
        session_id, number = asked.take("session_id", str), asked.number("sampling_session_seq_id", int, None, 0)
        base_model, path = asked.maybe("base_model", str), asked.maybe("model_path", str)
        asked.without_effect("type")
        asked.end()
        session = self._sessions.find(owner, session_id)
        if base_model is not None:
            self._check_base(base_model)
        elif path is None:
            raise Refused("create_sampling_session needs base_model or model_path")
        version = None if path is None else self._versions.find(owner, path)
        if version is not None:
            self._sampler.require(version.shape)
        sampler_id = f"{session_id}:sample:{number}"
        given = path if path is not None and path.startswith(PREFIX) else version
        if _which(session.samplers.setdefault(sampler_id, given)) != _which(given):
            raise Refused(f"sampler {sampler_id} is of another version")
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def sampler_info(self, owner: str, sampler_id: str) -> dict[str, Any]:
        version = self._sessions.version(owner, sampler_id)
        path = version.path if isinstance(version, Version) else version
        return {"sampler_id": sampler_id, "base_model": self.name, "model_path": path}

    def sample(self, owner: str, fields: Fields) -> dict[str, Any]:
        sampler_id, number = fields.take("sampling_session_id", str), fields.number("seq_id", int, None, 0)
        found = self._sessions.version(owner, sampler_id)
        asked = read_asked(fields, self._base)
        new = not self._worker.knows(sampler_id, number)
        if new:
            self._quota.require(owner)
        version = self._versions.find(owner, found) if new and isinstance(found, str) else found
        sequences = [f"{sampler_id}:{number}:{index}" for index in range(asked.number)]

        async def sample() -> Answer:
            assert not isinstance(version, str)
            message = await self._sampler.sample(version, asked)
            self._quota.take(owner, sampled_tokens(message))
            return message

        request_id = self._worker.begin(owner, sampler_id, number, _print(asked), sample)
        if new:
            self._quota.take(owner, len(asked.prompt))
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    # Answers.

    async def answer(self, owner: str, asked: Fields, timeout_s: float) -> Answer | None:
        return await self._worker.answer(owner, asked.take("request_id", str), timeout_s)

    def _check_base(self, name: str) -> None:
        if name not in self._names:
            raise Refused(f"base_model {name!r} is not served; {self.name!r} is", status=404)

    @staticmethod
    def _check_optimizer(asked: Fields) -> None:
        given = asked.maybe("optimizer_config", dict)
        if given is not None and given.get("type") != "adamw":
            raise Refused(f"optimizer {given.get('type')!r} is not served, only adamw")


def _of(model: Model) -> Tenant:
    if model.tenant is None:
        raise Refused(f"{model.model_id} could not be made; its first request says why")
    return model.tenant


def _copy(model: Model, *, optimizer: bool) -> Snapshot:
    return _of(model).snapshot(optimizer=optimizer)


def _checkpoint(version: Version) -> dict[str, Any]:
    kind = version.path.removeprefix(SCHEME).split("/")[1]
    return {
        "checkpoint_id": f"{kind}/{version.directory.name}",
        "checkpoint_type": {"weights": "training", "sampler_weights": "sampler"}[kind],
        "time": datetime.fromtimestamp(version.created_s, UTC).isoformat(),
        "tinker_path": version.path,
        "size_bytes": version.nbytes,
        "user_metadata": {"digest": version.digest},
    }


def _which(version: Version | str | None) -> str | None:
    return version.digest if isinstance(version, Version) else version


def _print(*content: Any) -> str:
    """Tells requests with one number apart."""
    return json.dumps([repr(each) if not isinstance(each, Asked) else _of_asked(each) for each in content])


def _of_asked(asked: Asked) -> str:
    return repr((asked, asked.prompt.tolist()))


def served_names(directory: Path, name: str | None) -> list[str]:
    """What clients may call a base model: its name, and its directory."""
    names = [name or str(directory), str(directory), str(directory.resolve())]
    return list(dict.fromkeys(names))
