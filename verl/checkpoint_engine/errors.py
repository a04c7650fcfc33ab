"""The exceptions of the checkpoint engine.

CheckpointEngineError
├── ConfigError             the user's configuration cannot work (also a ValueError)
├── BackendUnavailable      a backend's package or device is missing here; names the remedy
├── PlanError               shards, specs and layout do not fit together; lists every name
├── TransportError          bytes could not be moved
│   └── TransportTimeout    a deadline passed; names the late members
├── IntegrityError          bytes differ from the trainer's; names tensor and piece
├── ActivationError         a replica did not load a committed version
└── SyncAborted             the transaction ended without the new version; its cause is the first failure
"""

from __future__ import annotations

from .support.config import ConfigError as _ConfigError


class CheckpointEngineError(Exception):
    """Base of the tree. `version`, `phase` and `member` locate it in a sync; each may be None."""

    def __init__(
        self, message: str, *, version: int | None = None, phase: str | None = None, member: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.version = version
        self.phase = phase
        self.member = member

    def __str__(self) -> str:
        where = [
            text
            for text, value in (
                (f"version {self.version}", self.version),
                (self.phase, self.phase),
                (self.member, self.member),
            )
            if value is not None
        ]
        return f"[{', '.join(str(text) for text in where)}] {self.message}" if where else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle keyword-only arguments, too: Ray sends errors between processes."""
        return (_rebuild, (type(self), self.message, self.version, self.phase, self.member))


def _rebuild(
    cls: type[CheckpointEngineError], message: str, version: int | None, phase: str | None, member: str | None
) -> CheckpointEngineError:
    return cls(message, version=version, phase=phase, member=member)


class ConfigError(CheckpointEngineError, _ConfigError):
    pass


class BackendUnavailable(CheckpointEngineError):
    pass


class PlanError(CheckpointEngineError):
    pass


class TransportError(CheckpointEngineError):
    pass


class TransportTimeout(TransportError):
    pass


class IntegrityError(CheckpointEngineError):
    pass


class ActivationError(CheckpointEngineError):
    pass


class SyncAborted(CheckpointEngineError):
    pass


def error_named(name: str) -> type[CheckpointEngineError]:
    """The class of the tree with this name, from another process; TransportError for other names."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, CheckpointEngineError) else TransportError


MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Errors of code or data. No transport raises them, and a retry would raise them again."""


def as_ours(error: BaseException) -> CheckpointEngineError:
    """`error` itself if it is of the tree. Otherwise an error with its type and text, which any process can unpickle:
    the base class for one of MISTAKES, else TransportError. The text for a Ctrl-C begins with `interrupted by`."""
    if isinstance(error, CheckpointEngineError):
        return error
    name = type(error).__name__
    if not isinstance(error, Exception):
        return TransportError(f"interrupted by {name}")
    ours = (CheckpointEngineError if isinstance(error, MISTAKES) else TransportError)(f"{name}: {error}")
    ours.__cause__ = error
    return ours
