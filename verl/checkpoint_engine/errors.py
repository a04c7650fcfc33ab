"""Everything that the checkpoint engine raises on purpose.

CheckpointEngineError
├── ConfigError             what the user wrote cannot work (also a ValueError)
├── BackendUnavailable      a backend's package or device is missing here; names the remedy
├── PlanError               shards, specs and layout do not fit together; lists every name
├── TransportError          bytes could not be moved
│   └── TransportTimeout    a deadline passed; says who was waited for
├── IntegrityError          bytes arrived that are not the trainer's bytes; names tensor and piece
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
        """Errors cross process boundaries (Ray pickles them); keyword-only arguments need help to survive that."""
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
    """The class of the tree that another process calls so; TransportError for what is none."""
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
"""In code or data: no transport raises them, and they would only be made again."""


def as_ours(error: BaseException) -> CheckpointEngineError:
    """`error`, if it is one of the tree; else one with its type and text that can be sent to any process: a
    TransportError, or the base class for a mistake (`MISTAKES`). Of a Ctrl-C and the like it says `interrupted by`."""
    if isinstance(error, CheckpointEngineError):
        return error
    name = type(error).__name__
    if not isinstance(error, Exception):
        return TransportError(f"interrupted by {name}")
    ours = (CheckpointEngineError if isinstance(error, MISTAKES) else TransportError)(f"{name}: {error}")
    ours.__cause__ = error
    return ours
