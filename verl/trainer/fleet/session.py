"""A run's Ray: joined if one exists, else started and ended with the run."""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from verl import envs
from verl.checkpoint_engine.support.cleanup_process import CleanupProcess
from verl.checkpoint_engine.support.network import reserve_port
from verl.checkpoint_engine.support.signals import interrupt_main_thread, uninterrupted
from verl.checkpoint_engine.support.temporary import LONGEST_SOCKET, directory_for_sockets, has_room_for
from verl.compat.ray import (
    agents_not_awaited,
    deaths_left_to_callers,
    never_start_by_itself,
    show_token,
    sigterm_left_alone,
    without_idle_processes,
    workers_set_up_by,
)
from verl.trainer.fleet.warm import ray_worker
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.failures import NamedFailure
from verl.utils.marked_processes import kill_marked

from . import ending_agents, last_words
from .address import KEY, LOCAL, address_of
from .ray_watch import RayLost, RayWatch, gcs_of, gone, raylet_of

logger = logging.getLogger(__name__)

REACHED_WITHIN_S = 10.0
"""Ray itself would try for minutes and log every five seconds."""
LEAVES_WITHIN_S = 3.0
"""How long a driver that has lost its Ray may take to end in order."""
GCS_MISSED = {"gcs_rpc_server_reconnect_timeout_s": 86_400}
"""By default Ray's processes and the driver end a minute after the GCS, with only a line from Ray. The driver gets this
setting as an argument, a raylet through its environment."""
OF_RAYLET = GCS_MISSED | {"worker_niceness": 0, "agent_register_timeout_ms": 300_000}
"""By default workers have niceness 15: beside one other busy process a core leaves them a thirtieth of its time, and
ranks and engines miss the deadlines of their start. And a raylet ends if 30 s after the first process was asked for
the agent of runtime environments has not imported what it needs."""

OF_WARM = {"RAY_prestart_worker_first_driver": "0", "RAY_worker_register_timeout_seconds": "300"}
"""With forked workers. Ray would start some that have no runtime environment yet, and no use; and it would kill others
that wait for a minute, because the packages are on a slow disk."""

ATTEMPTS = 6
"""To start a Ray of this job alone, whose processes have 30 s for it. Beside other starts on a busy machine their
imports take longer; a minute or two later they do not."""
_TOO_SLOW = "timed out during startup"
"""What `ray.init` says after 30 s, which cannot be changed."""

_TOKEN_HINT = (
    ". If there is one, it may ask for a token, which `ray get-auth-token` shows there: set RAY_AUTH_MODE=token and "
    "RAY_AUTH_TOKEN here"
)

MARK = "VERL_RAY_STARTED_BY"
"""Environment variable of processes that Ray starts: the driver that started Ray."""


def starts_locally(arguments: Mapping[str, Any]) -> bool:
    """Whether `RaySession.start` with these arguments starts a new Ray on this machine."""
    return not ray.is_initialized() and address_of(arguments)[0] == LOCAL


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for unknown arguments of `ray.init`, for an address where no Ray can be reached, and for a
    directory in which there can be none."""
    known = set(inspect.signature(ray.init).parameters) - {"kwargs"}
    for name in arguments:
        if name not in known and not name.startswith("_"):  # Ray's private ones are not in its signature
            raise ConfigError(f"{KEY}.{name}: ray.init has no such argument.{did_you_mean(name, known)}")
    address, said_by = address_of(arguments)
    if address == LOCAL:
        _directory_of(arguments)
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"{said_by}={address} is the address for job submission; a run connects to host:port, or auto. "
            f"Start it with `ray job submit`, or set {KEY}.address (local: a Ray of its own)"
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_WITHIN_S).close()
        except OSError as exc:
            remedy = f". Unset it, or set {KEY}.address=local for a Ray of this run alone" * (said_by == "RAY_ADDRESS")
            raise ConfigError(f"{said_by}={address}: no Ray can be reached there: {exc}{remedy}") from exc


class RayTooSlow(NamedFailure):
    """No Ray started in time."""


class RaySession:
    """The driver's connection to Ray."""

    def __init__(self, *, timeline: str | None = None) -> None:
        """`timeline` is the file to which `close` writes Ray's timeline, for chrome://tracing or Perfetto."""
        self._timeline = timeline
        self.owned = False
        """Whether `close` ends Ray, and everything in it."""
        self.lost: RayLost | None = None
        """Why the main thread was interrupted, if it was not by Ctrl-C."""
        self._log_dir: Path | None = None
        self._cleanups: list[CleanupProcess] = []
        self._watches: list[RayWatch] = []
        self._release_port: weakref.finalize[..., RaySession] | None = None
        """Of the port that is reserved for an agent of Ray."""
        self._without_gcs = ""
        """What has become of it."""
        self._need_gcs = 0
        """How many blocks, one in the other."""
        self._closed = threading.Event()

    def start(self, arguments: Mapping[str, Any], warm: str | None = None) -> None:
        """`arguments` of `ray.init` override ours. Does nothing if this process is already connected to Ray.

        The workers of a new Ray are forked by the process with the socket `warm`, if there is one (`warm_process`).

        A KeyboardInterrupt during the start kills the part of Ray that has started. The process must then end without
        the interpreter's exit hooks, as `main_ppo` does.

        If this host's raylet ends, or the GCS while it is needed, the main thread gets a KeyboardInterrupt, and `lost`
        has the reason. A process stuck in a call of Ray, which does not call `close` within LEAVES_WITHIN_S, ends with
        exit code 1.
        """
        if ray.is_initialized():
            return
        address, said_by = address_of(arguments)
        if address == LOCAL:
            logger.info("starting Ray")
        else:
            logger.info("joining the Ray of %s=%s", said_by, address)
        never_start_by_itself()
        self.owned = True
        ours: dict[str, Any] = {
            "include_dashboard": False,
            # Errors reach the driver as exceptions. What libraries print in a dozen processes stays in Ray's log files.
            "log_to_driver": False,
            "logging_level": "error",
        }
        ours |= {**arguments, "address": address}
        if address == LOCAL:
            ours["_temp_dir"] = _directory_of(arguments)
            ours["_system_config"] = GCS_MISSED | dict(arguments.get("_system_config") or {})
        said = {f"RAY_{key}": str(value) for key, value in OF_RAYLET.items() if address == LOCAL}
        if warm is not None:
            ours["runtime_env"] = {"env_vars": {ray_worker.SOCKET: warm}}
            said |= OF_WARM
        deaths_left_to_callers()
        reserved = reserve_port()
        self._release_port = weakref.finalize(self, reserved.close)
        port = reserved.getsockname()[1]
        script = ray_worker.__file__ if warm is not None else None
        with (
            sigterm_left_alone(),
            without_idle_processes(ours),
            agents_not_awaited(ours, port),
            workers_set_up_by(script),
        ):
            strangers = set(psutil.Process().children())
            mark = secrets.token_hex(8)
            told = {MARK: mark} | {key: value for key, value in said.items() if key not in os.environ}
            os.environ.update(told)
            try:
                context = _init(ours, strangers, mark)
                about = getattr(context, "address_info", {})
                if session := about.get("session_dir"):
                    self._log_dir = Path(session) / "logs"
                    if address == LOCAL:
                        Path(session).chmod(0o700)  # Ray opens it to everyone, with logs and sockets in it
                    if sys.platform == "linux" and address == LOCAL:
                        self._cleanups.append(CleanupProcess(Path(ending_agents.__file__), session))
                self._watch_over(raylet_of(about), gcs_of(about))
            except KeyboardInterrupt:
                with uninterrupted():
                    _kill_started(strangers, mark)
                    self.owned = False
                raise
            finally:
                for key in told:
                    del os.environ[key]

    def add_note(self, error: BaseException) -> None:
        """Add the directory of the processes' logs to the error, unless it is a ConfigError."""
        if self._log_dir is not None and isinstance(error, Exception) and not isinstance(error, ConfigError):
            error.add_note(f"the processes of this run wrote their logs to {self._log_dir}")

    def close(self) -> None:
        """Idempotent."""
        for watch in self._watches:
            watch.close()
        if self._timeline and ray.is_initialized() and self.is_whole:
            ray.timeline(filename=self._timeline)
            self._timeline = None
        if self.owned:
            self.owned = False
            if self.is_whole:
                ray.shutdown()
            else:  # which would wait for what is gone, and without end for what is stopped
                for watch in self._watches:
                    with suppress(psutil.NoSuchProcess):
                        watch.process.kill()
        while self._cleanups:
            self._cleanups.pop().close()
        if self._release_port is not None:
            self._release_port()
        self._closed.set()

    @property
    def is_whole(self) -> bool:
        """Whether all of Ray's own processes on this host are alive."""
        return self.lost is None and not self._without_gcs

    @contextmanager
    def needing_gcs(self) -> Iterator[None]:
        """Context for starting members. Raises RayLost if the GCS is gone."""
        if self._without_gcs:
            self.lost = RayLost(self._said_of_gcs())
            threading.Thread(target=self._end_in_time, name="ends-in-time", daemon=True).start()
            raise self.lost
        self._need_gcs += 1
        try:
            yield
        finally:
            self._need_gcs -= 1

    def _watch_over(self, raylet: psutil.Process | None, gcs: psutil.Process | None) -> None:
        """Those that are on this host."""
        if gcs is not None:
            self._watches.append(RayWatch(gcs, self._lose_gcs))
        if raylet is not None:
            self._watches.append(RayWatch(raylet, self._lose_raylet))
            speaker = CleanupProcess(Path(last_words.__file__), str(self._log_dir), str(os.getpid()), speaks=True)
            speaker.send(f"error: {RayLost(self._said_of_raylet(gone(raylet)))}")
            self._cleanups.append(speaker)

    def _lose_raylet(self, what: str) -> None:
        self._lose(self._said_of_raylet(what))

    def _said_of_raylet(self, what: str) -> str:
        log = f", whose log is in {self._log_dir}" if self._log_dir is not None else ""
        return f"the raylet of this host {what}: it is Ray's own process{log}, which every member of the run needs"

    def _lose_gcs(self, what: str) -> None:
        self._without_gcs = what
        if self._need_gcs:
            self._lose(self._said_of_gcs())
        else:
            logger.warning("Ray's GCS %s: the run goes on until one of its processes would have to be started", what)

    def _said_of_gcs(self) -> str:
        return f"Ray's GCS {self._without_gcs}: no process of the run that died can be started again"

    def _lose(self, what: str) -> None:
        self.lost = RayLost(what)
        interrupt_main_thread(str(self.lost))
        self._end_in_time()

    def _end_in_time(self) -> None:
        if not self._closed.wait(LEAVES_WITHIN_S):
            sys.stderr.write(f"error: {self.lost}\n")
            sys.stderr.flush()
            os._exit(1)


def _directory_of(arguments: Mapping[str, Any]) -> str:
    """Where a Ray that this process starts has its sockets and logs. Raises ConfigError."""
    longest = f"session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    if said := arguments.get("_temp_dir"):
        name, directory = f"{KEY}._temp_dir", Path(said)
    elif said := envs.ray_tmpdir():
        name, directory = "RAY_TMPDIR", Path(said, "ray")
    else:
        return str(directory_for_sockets(f"ray/{longest}", others=[Path("/tmp")]) / "ray")
    if not has_room_for(longest, directory):
        raise ConfigError(
            f"{name}={said}: the paths of Ray's sockets below it would not be ASCII of at most {LONGEST_SOCKET} bytes; "
            "name a shorter directory"
        )
    return str(directory)


def _init(arguments: dict[str, Any], strangers: set[psutil.Process], mark: str) -> Any:
    """`ray.init`, up to ATTEMPTS times: on a busy machine a Ray may not be there in the time that it gives itself."""
    joins = arguments["address"] != LOCAL
    if joins:
        show_token()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ray.init(**arguments)
        except (ConnectionError, TypeError, ValueError) as exc:  # no Ray is there, or it does not like a value
            hint = _TOKEN_HINT if joins and isinstance(exc, ConnectionError) else ""
            raise ConfigError(f"{KEY}: {exc}{hint}") from exc
        except Exception as exc:
            if joins or _TOO_SLOW not in str(exc):
                raise
            _kill_started(strangers, mark)
            if attempt == ATTEMPTS:
                load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
                raise RayTooSlow(
                    f"Ray did not start in {ATTEMPTS} attempts: the machine is too busy (load average {load:.0f}, "
                    f"{cores} cores); end other work, or join a Ray that runs (ray_kwargs.ray_init.address)"
                ) from exc
            logger.warning("Ray was too slow to start; starting it again")
    raise AssertionError("unreachable")


def _kill_started(strangers: set[psutil.Process], mark: str) -> None:
    """Whatever of Ray has started: this process's children but for `strangers`, and what has lost its parent: agents,
    if Ray has ended their daemon itself."""
    _kill_with_descendants(set(psutil.Process().children()) - strangers)
    kill_marked(MARK, mark)


def _kill_with_descendants(processes: Iterable[psutil.Process]) -> None:
    """They are stopped before any is killed, so that none can start another in between."""
    stopped: set[psutil.Process] = set()
    while found := {p for top in processes for p in (top, *_descendants(top)) if p.is_running()} - stopped:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped |= found
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found
