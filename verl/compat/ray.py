"""Ray 2.60: how it starts, and what `ray.remote` has made of a class."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray._private import auto_init_hook, node, utils
from ray._private.authentication import authentication_token_setup
from ray.actor import ActorClass


def show_token() -> None:
    """Show the cluster the token of this machine, if there is one.

    Ray makes one with the first Ray of its own that it starts here, and `ray start --head` asks for it from then on;
    `ray.init` does not show it unless it is told to, and is refused for 20 s. A cluster that asks for none does not
    mind.
    """
    setup: Any = authentication_token_setup
    setup.logger.setLevel(logging.ERROR)  # it tells what it does on standard error
    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def never_start_by_itself() -> None:
    """From now on, a call without a Ray raises.

    Ray would start another one, with a dashboard, for a call that comes after the end of one: a thread that still waits
    for samples makes such calls. Ray's variable against that is read when it is imported.
    """
    hook: Any = auto_init_hook
    hook.enable_auto_connect = False


@contextmanager
def sigterm_left_alone() -> Iterator[None]:
    """`ray.init` would answer SIGTERM with `sys.exit`, also in its own middle: half a Ray crashes at exit.

    Its C++ part writes a stack trace before it passes a signal on; ours is put back in front of it. `ray.init` sets its
    handler unasked.
    """
    ours = signal.getsignal(signal.SIGTERM)
    private: Any = utils
    original = private.set_sigterm_handler
    private.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        private.set_sigterm_handler = original
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)


@contextmanager
def without_idle_processes(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a Ray of this machine alone starts without three processes that nobody uses.

    `arguments` are those of `ray.init`. The processes are the autoscaler's monitor, the one that brings logs to a
    driver that does not want them, and what is left of a dashboard that is not shown. Each imports Ray for a second of
    processor time and then looks for work for ever: a Ray that has logged much cost 4 % of a core. `ray.init` has no
    arguments for that; `ray start` has one for the second, https://github.com/ray-project/ray/pull/48891.
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


def class_behind(remote: ActorClass[Any]) -> tuple[Any, dict[str, Any]]:
    """What `ray.remote` was given: the class, and the options that are set. It hands out neither again."""
    given: Any = remote
    options = {key: value for key, value in given._default_options.items() if value is not None}
    return given.__ray_metadata__.modified_class.__ray_actor_class__, options
