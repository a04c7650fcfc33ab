"""Names that mean one version at a time, and can be set back to an earlier one.

    OUTPUT/<owner>/names/<name>.json    the versions that it has meant, the last one is what it means

A name is set when the version's files have their digest, and by a rename: it means either the old or the new one.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from threading import Lock
from typing import Any

from verl.checkpoint_engine.support.files import sync_to_disk
from verl.tenants.checkpoints import SCHEME, Checkpoints, Version, checked_name
from verl.tenants.refused import Refused

PREFIX = f"{SCHEME}names/"
KEPT = 100
"""Earlier versions that a name is told with."""


class Names:
    """Those of all owners; each owner finds its own alone. May be called in any thread."""

    def __init__(self, output: Path, checkpoints: Checkpoints) -> None:
        self._output, self._checkpoints = output, checkpoints
        self._turn = Lock()

    def set(self, owner: str, name: str, path: str) -> Version:
        """Have `name` mean the version at `path` from now on, also after a restart. May be repeated.

        Raises Refused for a path that leads to no version of this owner, or to one whose files have changed.
        """
        file = self._file(owner, name)
        with self._turn:
            version = self._checkpoints.find(owner, path)
            version.tensors()
            meant = _read(file)
            entry = {"path": version.path, "digest": version.digest}
            if meant[-1:] != [entry]:
                file.parent.mkdir(exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=".draft-", dir=file.parent) as draft:
                    (Path(draft) / file.name).write_text(json.dumps([*meant, entry][-KEPT:]), "utf-8")
                    sync_to_disk(Path(draft))
                    (Path(draft) / file.name).rename(file)
                sync_to_disk(file.parent)
        return version

    def find(self, owner: str, path: str) -> Version:
        """The version at `path`, which may be that of a name. Raises Refused if there is none."""
        if not path.startswith(PREFIX):
            return self._checkpoints.find(owner, path)
        meant = _read(self._file(owner, path.removeprefix(PREFIX)))
        if not meant:
            raise Refused(f"there is no name {path!r} of this key", status=404)
        version = self._checkpoints.find(owner, meant[-1]["path"])
        if version.digest != meant[-1]["digest"]:
            raise Refused(f"{path} means {version.path}, which was saved anew since; set the name again")
        return version

    def all(self, owner: str) -> list[dict[str, Any]]:
        """Each name's path, and the versions that it has meant, the newest first."""
        files = sorted((self._output / owner / "names").glob("[!.]*.json"))
        return [{"path": PREFIX + file.stem, "versions": _read(file)[::-1]} for file in files]

    def delete(self, owner: str, path: str) -> None:
        """Delete a version. Raises Refused if a name means it."""
        with self._turn:
            means = [name["path"] for name in self.all(owner) if name["versions"][0]["path"] == path]
            if means:
                raise Refused(f"{path} is what {means[0]} means; set the name to another version before")
            self._checkpoints.delete(owner, path)

    def _file(self, owner: str, name: str) -> Path:
        return self._output / owner / "names" / f"{checked_name(name)}.json"


def _read(file: Path) -> list[dict[str, str]]:
    try:
        found: list[dict[str, str]] = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return []
    return found
