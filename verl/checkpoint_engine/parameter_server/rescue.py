"""What is done for servers that a writer has paused, when its process ends before they serve again, however it ends.

A small process outlives it. A server into which nothing was loaded yet goes on with what it has; one that was loading
gets the version that it was told to load, whose memory is kept for that, unless another has been loaded by then. The
process has the claim of the one that has ended meanwhile; a server that somebody else has claimed is left to that.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from ..support.cleanup_process import CleanupProcess
from .writers import Writer

PREFIX = "verl-rescue-"
_RESCUE = """
import json, shutil, time, urllib.request
root, method, writer = sys.argv[1:]
writer = json.loads(writer)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

def call(url, path, body=None):
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with opener.open(request, timeout=600) as answer:
        return json.loads(answer.read() or b"null")

def workers(url, act="look"):
    order = json.dumps({"number": "rescue", "act": act, "writer": writer})
    return call(url, "/collective_rpc", {"method": method, "args": [order]})["results"]

def claimed(url):
    return all(one["claimed_by"] and one["claimed_by"]["id"] == writer["id"] for one in workers(url, "claim"))

def is_whole(url, told):
    with opener.open(url + "/weight_info", timeout=600) as answer:
        label = json.loads(answer.read())["weight_version"]
    (load, version), *others = {(one["load"], one["version"]) for one in told}
    return bool(load) and not others and version is not None and label == str(version)

def load(url, what):
    told = workers(url)
    is_active = any(one["active"] for one in told)
    if not is_active and is_whole(url, told):  # it had only to go on, or somebody has loaded since
        call(url, "/reset_prefix_cache?reset_running_requests=true")
        return True
    if what["state"] == "lost":
        return False
    if is_active:
        try:
            call(url, "/finish_weight_update")
        except OSError:
            pass
    call(url, "/start_weight_update", {})
    info = {"arena_path": what["arena"], "version": what["version"], "load": root, "writer": writer["id"]}
    try:
        call(url, "/update_weights", {"update_info": info})
    finally:
        is_loaded = all(one["load"] == root for one in workers(url))
        call(url, "/finish_weight_update", {"weight_version": str(what["version"])} if is_loaded else None)
    call(url, "/reset_prefix_cache?reset_running_requests=true")
    return is_loaded

def rescue(url, what):
    if what["engine"] != "vLLM":
        if what["state"] == "paused":
            call(url, "/continue_generation", {})
        return
    if not claimed(url):
        return
    try:
        if load(url, what) if what["state"] != "paused" else not any(one["torn"] for one in workers(url)):
            for _ in range(10):  # what pauses it may still be on its way
                call(url, "/resume")
                time.sleep(0.5)
                if not claimed(url):
                    return
    finally:
        workers(url, "release")

left = {}
for line in lines:
    told = json.loads(line)
    left[told["url"]] = told
for url, what in left.items():
    if what["state"] == "serving":
        continue
    if os.fork():
        continue
    try:
        rescue(url, what)
    except Exception:
        pass
    os._exit(0)
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
shutil.rmtree(root, ignore_errors=True)
"""


class Rescue:
    """Of one writer. Told what it does to servers, before it does it."""

    def __init__(self, shm_dir: Path, answers: str, writer: Writer) -> None:
        """`answers`: the method of vLLM's workers that does; `writer`: whose servers they are. Nothing is started
        before one is paused."""
        self._shm_dir, self._answers, self._writer = shm_dir, answers, writer
        self._root: Path | None = None
        self._process: CleanupProcess | None = None
        self._kept: dict[str, Path] = {}
        self._paused: set[str] = set()

    def pausing(self, url: str, engine: str) -> None:
        self._paused.add(url)
        self._tell(url, engine, state="paused")

    def loading(self, url: str, engine: str, arena_path: str | None = None, version: int | None = None) -> None:
        """Out of an arena of this host, or out of what goes with this process."""
        self._forget(url)
        arena = self._keep(url, Path(arena_path)) if arena_path is not None and engine == "vLLM" else None
        self._tell(url, engine, state="loading" if arena else "lost", arena=str(arena), version=version)

    def serving(self, url: str, engine: str) -> None:
        self._tell(url, engine, state="serving")
        self._paused.discard(url)
        self._forget(url)

    def close(self) -> None:
        """Servers that do not serve are seen after now; nobody waits for that. Idempotent."""
        process, self._process = self._process, None
        if process is not None and self._paused:
            process.leave()
        elif process is not None:
            process.close()

    def _keep(self, url: str, arena: Path) -> Path | None:
        """A second name for what the arena has committed, which may be gone by then; None if it is not on this host."""
        root = self._started()
        kept = Path(tempfile.mkdtemp(dir=root))
        try:
            for file in arena.iterdir():
                if file.name == "current" or file.name.startswith("slot-"):
                    (kept / file.name).hardlink_to(file)
        except OSError:
            shutil.rmtree(kept, ignore_errors=True)
            return None
        self._kept[url] = kept
        return kept

    def _forget(self, url: str) -> None:
        if (kept := self._kept.pop(url, None)) is not None:
            shutil.rmtree(kept, ignore_errors=True)

    def _tell(self, url: str, engine: str, **what: Any) -> None:
        self._started()
        assert self._process is not None  # it has been started
        self._process.send(json.dumps({"url": url, "engine": engine, **what}))

    def _started(self) -> Path:
        if self._process is None or self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._shm_dir))
            writer = msgspec.json.encode(self._writer.rescuer()).decode()
            self._process = CleanupProcess(_RESCUE, str(self._root), self._answers, writer)
        return self._root
