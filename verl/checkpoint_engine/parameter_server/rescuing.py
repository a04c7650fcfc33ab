"""The program of a `Rescue`. The standard library alone: `support.outliving` runs this file.

Once the workers of a server are idle, the version that they report decides:

    the version that it was to load          the server reports and serves it
    another whole version                    the server serves that one, as before
    none: it was killed during the load      the server loads the version again, if its memory is on this host, its
                                             files are unchanged, or the job that holds the weights still runs; else it
                                             stays paused, and refuses to resume until a load succeeds
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

TIMEOUT_S = 600
RESUMES = 10
"""Resumes per server: a pause of the dead writer may still be under way."""
BETWEEN_RESUMES_S = 0.5
FLUSHES = 20
BETWEEN_CONNECTIONS_S = 1.0
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Prefixes of the variables that torchrun sets for ranks."""

Call = Any
"""`call(path, body=None, method="POST")` returns a server's answer. Raises OSError."""


def main(arguments: list[str], lines: list[str]) -> None:
    """`arguments`: the directory of kept arenas, which is removed; the workers' method that answers; the rescuing
    writer in JSON. `lines`: the writer's actions on servers, a JSON object each; the last of each server counts."""
    import shutil

    root, method, writer = arguments
    told = {what["url"]: what for what in map(json.loads, lines)}
    for what in told.values():
        if what["state"] != "serving" and not os.fork():
            try:
                rescue(what, root, method, json.loads(writer), caller(what["url"]))
            finally:
                os._exit(0)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    shutil.rmtree(root, ignore_errors=True)


def caller(url: str) -> Call:
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            said = answer.read()
        try:
            return json.loads(said or b"null")
        except ValueError:  # words
            return said.decode(errors="replace")

    return call


def rescue(what: dict[str, Any], root: str, method: str, writer: dict[str, Any], call: Call) -> None:
    """Rescue one vLLM or SGLang server. `what`: the writer's last action on it."""
    if what["engine"] != "vLLM":
        if what["state"] == "paused":
            with suppress(OSError):  # it was asked how weights would fit
                call("/end_weight_update", {})
            once_reached(lambda: call("/continue_generation", {}))
        elif "claim" in what:
            rescue_sglang(what, writer["who"], call)
        return

    def ask(act: str = "look") -> list[dict[str, Any]]:
        """All workers. They finish first what they do now."""
        order = json.dumps({"number": "rescue", "act": act, "writer": writer})
        found: list[dict[str, Any]] = call("/collective_rpc", {"method": method, "args": [order]})["results"]
        return found

    def is_claimed() -> bool:
        return all(one["claimed_by"] and one["claimed_by"]["id"] == writer["id"] for one in ask("claim"))

    if not once_reached(is_claimed):
        return
    command = what.get("command")
    try:
        is_whole = not any(one["torn"] for one in ask()) if what["state"] == "paused" else ended(what, ask(), call)
        if is_whole or load(what, root, writer["id"], ask, call):
            command = None
            for _ in range(RESUMES):
                call("/resume")
                time.sleep(BETWEEN_RESUMES_S)
                if not is_claimed():
                    return
    finally:
        ask("release")
    if command:
        run(command)


def once_reached(ask: Callable[[], Any]) -> Any:
    """The answer to the first request. If the network is down, as it was for the writer, wait for it, at most
    `TIMEOUT_S`. A server that answers with an error, or is gone from its host, is reached. Raises OSError."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return ask()
        except OSError as exc:
            is_gone = isinstance(getattr(exc, "reason", exc), ConnectionRefusedError)
            if is_gone or hasattr(exc, "code") or time.monotonic() > deadline:
                raise
        time.sleep(BETWEEN_CONNECTIONS_S)


def run(command: list[str]) -> None:
    """Run `command` without the environment variables of a torchrun rank."""
    import subprocess

    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_RANK)}
    subprocess.run(command, env=environment, check=False)


def ended(what: dict[str, Any], workers: list[dict[str, Any]], call: Call) -> bool:
    """End an update that its writer did not end. Returns whether all workers then hold the same whole version."""
    is_active = [one["active"] for one in workers]
    holds = {(one["load"], one["version"], one["digest"], one["torn"]) for one in workers}
    is_whole = len(holds) == 1 and not workers[0]["torn"]
    sought = ("load", what["load"]) if what["load"] else ("version", what["version"])
    is_new = is_whole and workers[0]["load"] != "" and workers[0][sought[0]] == sought[1]
    if any(is_active):
        try:
            call("/finish_weight_update", {"weight_version": what["label"]} if is_new else None)
        except OSError:
            if all(is_active):
                raise
    if is_new:
        call("/reset_prefix_cache?reset_running_requests=true")
    return is_whole


def load(what: dict[str, Any], root: str, writer_id: str, look: Callable[[], list[dict[str, Any]]], call: Call) -> bool:
    """Load the version again from the kept arena or the files. Returns whether all workers have loaded it."""
    if what.get("source") is None:
        return False
    call("/start_weight_update", {})
    info = what["source"] | {"load": root, "writer": writer_id}
    try:
        call("/update_weights", {"update_info": info})
    finally:
        is_loaded = all(one["load"] == root for one in look())
        call("/finish_weight_update", {"weight_version": what["label"]} if is_loaded else None)
    call("/reset_prefix_cache?reset_running_requests=true")
    return is_loaded


def rescue_sglang(what: dict[str, Any], who: str, call: Call) -> None:
    """Rescue an SGLang server that was loading, whose ranks answer in files of this host.

    It serves the version of its ranks, if that is whole and the one that it reports. Else it loads the version again,
    from the memory that was kept. A server that another writer has claimed is left alone.
    """
    import fcntl

    with open(what["claim"], "a+", encoding="utf-8") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.stat(what["claim"]), os.fstat(claim.fileno()))
        except OSError:  # somebody has it, or had it and is done
            return
        if not is_there:
            return
        try:
            claim.truncate(0)
            claim.write(who)
            claim.flush()
            if holds_version(what, call):
                flush(call)
                call("/continue_generation", {})
        finally:
            os.unlink(what["claim"])


def holds_version(what: dict[str, Any], call: Call) -> bool:
    """Whether all ranks of an SGLang server hold the version that it reports. Loads the version again if not."""
    with suppress(OSError):  # it has begun: the writer was killed in the middle
        call("/begin_weight_update", {})
    try:
        holds, said = ranks_of_sglang(what, "look", call), call("/model_info", method="GET")["weight_version"]
        if is_one_version(holds, what) and str(holds[0]["version"]) in (said, "None"):
            return True
        if not is_one_version(ranks_of_sglang(what, "load", call), what):
            return False
        holds = ranks_of_sglang(what, "name", call)
        return is_one_version(holds, what) and holds[0]["version"] == what["version"]
    finally:
        call("/end_weight_update", {})


def ranks_of_sglang(what: dict[str, Any], asked: str, call: Call) -> list[dict[str, Any]]:
    """The answers of all ranks to the request `asked`."""
    answers = what["answers"]
    for name in os.listdir(answers):
        os.unlink(os.path.join(answers, name))
    call("/update_weights_from_tensor", what[asked])
    found = []
    for name in os.listdir(answers):
        with open(os.path.join(answers, name), encoding="utf-8") as file:
            found.append(json.load(file))
    return found


def is_one_version(holds: list[dict[str, Any]], what: dict[str, Any]) -> bool:
    """Whether all ranks answered without a problem and hold the same version and digest."""
    unread = [set(rank["unread"]) for rank in holds]
    return (
        len(holds) == what["ranks"]
        and not any(rank["failed"] or rank["torn"] or rank["unfilled"] or rank["widened"] for rank in holds)
        and not set.intersection(*unread)
        and len({(rank["version"], rank["digest"]) for rank in holds}) == 1
    )


def flush(call: Call) -> None:
    """Flush SGLang's cache of old weights; retries while a finished batch is still present. Raises OSError, and the
    server stays paused."""
    for left in reversed(range(FLUSHES)):
        try:
            call("/flush_cache")
        except OSError:
            if not left:
                raise
            time.sleep(BETWEEN_RESUMES_S)
        else:
            return
