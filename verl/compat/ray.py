"""Ray 2.60: its start, and the class behind `ray.remote`."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray import _raylet
from ray._private import auto_init_hook, node, ray_constants, services, utils, worker
from ray._private.authentication import authentication_token_setup
from ray.actor import ActorClass

DEATH = "A worker died or was killed while executing"
"""How the raylet's message of it begins."""


def show_token() -> None:
    """Send this machine's token to the cluster, if there is one.

    Ray makes a token when it first starts a cluster here, and `ray start --head` requires it from then on. By default
    `ray.init` does not send it, and is refused for 20 s. Clusters without tokens ignore it.
    """
    setup: Any = authentication_token_setup
    setup.logger.setLevel(logging.ERROR)  # it tells what it does on standard error
    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def never_start_by_itself() -> None:
    """Make calls without a running Ray raise from now on.

    Ray would start another one, with a dashboard, for a call that comes after the end of one: a thread that still waits
    for samples makes such calls. Ray's variable against that is read when it is imported.
    """
    hook: Any = auto_init_hook
    hook.enable_auto_connect = False


@contextmanager
def sigterm_left_alone() -> Iterator[None]:
    """`ray.init` would answer SIGTERM with `sys.exit`, also in its own middle: half a Ray crashes at exit.

    Its C++ part writes a stack trace before it passes a signal on; ours is put back in front of it as soon as that part
    is there. `ray.init` sets its handler unasked.
    """
    ours = signal.getsignal(signal.SIGTERM)
    private: Any = utils
    core: Any = _raylet
    set_by_ray, core_worker = private.set_sigterm_handler, core.CoreWorker

    def in_front() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)

    def made(*args: Any, **options: Any) -> Any:
        worker = core_worker(*args, **options)
        in_front()
        return worker

    private.set_sigterm_handler, core.CoreWorker = lambda _handler: None, made
    try:
        yield
    finally:
        private.set_sigterm_handler, core.CoreWorker = set_by_ray, core_worker
        in_front()


@contextmanager
def without_idle_processes(arguments: Mapping[str, Any]) -> Iterator[None]:
    """In this block, a new Ray on this machine starts without three unused processes.

    `arguments` are those of `ray.init`. The processes are the autoscaler's monitor, the one that sends logs to the
    driver, and the rest of a disabled dashboard. Each imports Ray for a second of processor time and then polls for
    ever: with many logs this cost 4 % of a core. `ray.init` has no arguments for that; `ray start` has one for the
    second, https://github.com/ray-project/ray/pull/48891.
    """
    starter: Any = node.Node
    unused: dict[str, Any] = {}
    if arguments["address"] == "local":
        unused["start_monitor"] = lambda _self: None
        if not arguments["log_to_driver"]:
            unused["start_log_monitor"] = lambda _self: None
        if not arguments["include_dashboard"]:
            unused["start_api_server"] = lambda self, **_: setattr(self, "_webui_url", None)
    originals = {name: getattr(starter, name) for name in unused}
    try:
        for name, replacement in unused.items():
            setattr(starter, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(starter, name, original)


@contextmanager
def agents_not_awaited(arguments: Mapping[str, Any], port: int) -> Iterator[None]:
    """In this block, a new Ray on this machine starts without waiting for its agents.

    `arguments` are those of `ray.init`. A raylet ends if the files with its agents' ports are not there after 15 s,
    which cannot be changed, https://github.com/ray-project/ray/issues/65983; on a busy machine the agents' imports take
    longer. So the agent of runtime environments is told its `port`, and the dashboard's is left out, as Ray's small
    distribution does by ports of -1. A raylet must have one: `cat` is there in its place, until the raylet's end closes
    its standard input. Nothing changes if a dashboard or a port for metrics is asked for.
    """
    if arguments["address"] != "local" or arguments["include_dashboard"] or arguments.get("_metrics_export_port"):
        yield
        return
    private: Any = services
    original = private.start_ray_process

    def start(command: list[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type == "raylet":
            command = [*(_of_raylet(argument, port) for argument in command), "--dashboard_agent_listen_port=-1"]
        return original(command, process_type, *args, **options)

    private.start_ray_process = start
    try:
        yield
    finally:
        private.start_ray_process = original


@contextmanager
def workers_set_up_by(script: str | None) -> Iterator[None]:
    """In this block, a new Ray on this machine runs `script` for workers with a runtime environment; None: its own.

    Ray has no argument for it; a runtime environment's `py_executable` would be for one worker alone, and run as well.
    """
    private: Any = ray_constants
    original = private.SETUP_WORKER_FILENAME
    private.SETUP_WORKER_FILENAME = script or original
    try:
        yield
    finally:
        private.SETUP_WORKER_FILENAME = original


def deaths_left_to_callers() -> None:
    """Ray prints a dozen lines on standard output when a worker dies, before whoever called it knows.

    Every call of a dead worker raises, and the run names the worker. Other messages of the raylet are printed.
    """
    private: Any = worker
    original = private.print_to_stdstream
    if getattr(original, "leaves_out", None) == DEATH:
        return

    def printed(data: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        if data.get("pid") != "raylet" or not all(str(line).startswith(DEATH) for line in data["lines"]):
            original(data, *arguments, **options)

    printed.leaves_out = DEATH  # type: ignore[attr-defined]
    private.print_to_stdstream = printed


def _of_raylet(argument: str, port: int) -> str:
    name = argument.partition("=")[0]
    if name == "--dashboard_agent_command":
        return f"{name}=cat"
    if name in ("--metrics-agent-port", "--metrics_export_port"):
        return f"{name}=-1"
    return re.sub("(runtime[-_]env[-_]agent[-_]port)=0", rf"\1={port}", argument)


def class_behind(remote: ActorClass[Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of `ray.remote`: the class and the options, which Ray does not return publicly."""
    given: Any = remote
    options = {key: value for key, value in given._default_options.items() if value is not None}
    return given.__ray_metadata__.modified_class.__ray_actor_class__, options
