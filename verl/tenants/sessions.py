"""Sessions of clients, with their adapters in training and their samplers. Each belongs to the key that made it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from verl.tenants.base import Shape
from verl.tenants.checkpoints import Version
from verl.tenants.refused import Refused
from verl.tenants.tenant import Tenant
from verl.tenants.worker import Worker

IDLE_S = 600.0
"""A session that was not heard of for so long gives its adapters up, if another one needs their place."""


@dataclass(kw_only=True)
class Model:
    """An adapter in training, as the event loop knows it."""

    model_id: str
    shape: Shape | None = None
    """None until a version that it starts from is read."""
    tenant: Tenant | None = None
    """Set, like `shape`, by the worker when it makes it."""
    last: int = 0
    """The newest seq_id."""
    postponed: int | None = None
    """The seq_id of a batch that is to be sent again, for its owner's quota."""


@dataclass(kw_only=True)
class Session:
    owner: str
    heard: float
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Version | str | None] = field(default_factory=dict)
    """Each one's version, or the path of a name; None is the base model."""


class Sessions:
    """Its methods are called on the service's event loop, and raise Refused for what is not of this owner."""

    def __init__(self, worker: Worker, *, max_tenants: int, clock: Callable[[], float]) -> None:
        self._worker, self._max_tenants, self._clock = worker, max_tenants, clock
        self._open: dict[str, Session] = {}

    def create(self, owner: str) -> str:
        """The id of a new session."""
        session_id = f"session-{secrets.token_hex(12)}"
        self._open[session_id] = Session(owner=owner, heard=self._clock())
        return session_id

    def end(self, owner: str, session_id: str) -> None:
        self.find(owner, session_id)
        self._end(session_id)

    def find(self, owner: str, session_id: str) -> Session:
        session = self._open.get(session_id)
        if session is None or session.owner != owner:
            raise Refused(f"there is no session {session_id!r} of this key, or it has ended", status=404)
        session.heard = self._clock()
        return session

    def _end(self, session_id: str) -> None:
        session = self._open.pop(session_id)
        for queue in (*session.models, *session.samplers):
            self._worker.forget(queue)
        for model in session.models.values():
            self._worker.run(model.model_id, partial(_close, model))

    def model(self, owner: str, model_id: str) -> Model:
        session = self._open.get(model_id.partition(":")[0])
        model = session.models.get(model_id) if session and session.owner == owner else None
        if session is None or model is None:
            raise Refused(f"there is no model {model_id!r} of this key, or its session has ended", status=404)
        session.heard = self._clock()
        return model

    def new_model(self, owner: str, session_id: str, number: int) -> Model:
        """The model of this number of the session: a new one, or the one that was asked for before."""
        session = self.find(owner, session_id)
        model_id = f"{session_id}:train:{number}"
        if model_id in session.models:
            return session.models[model_id]
        for idle in [key for key, each in self._open.items() if self._clock() - each.heard > IDLE_S and each.models]:
            if self.number_of_models() >= self._max_tenants:
                self._end(idle)
        if self.number_of_models() >= self._max_tenants:
            raise Refused(
                f"{self._max_tenants} adapters are in training, which is the limit; end a session, or start the server"
                " with a larger --max-tenants",
                status=403,
            )
        return session.models.setdefault(model_id, Model(model_id=model_id))

    def number_of_models(self) -> int:
        return sum(len(session.models) for session in self._open.values())

    def version(self, owner: str, sampler_id: str) -> Version | str | None:
        session = self._open.get(sampler_id.partition(":")[0])
        if session is None or session.owner != owner or sampler_id not in session.samplers:
            raise Refused(f"there is no sampler {sampler_id!r} of this key, or its session has ended", status=404)
        session.heard = self._clock()
        return session.samplers[sampler_id]


def _close(model: Model) -> None:
    if model.tenant is not None:
        model.tenant.close()
