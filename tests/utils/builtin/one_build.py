"""What a process does that makes something cached; apart from the tests because spawned processes import it."""

import os
import time
from dataclasses import dataclass

from verl.utils.builtin.cache import cached_directory


@dataclass(frozen=True, kw_only=True)
class Recipe:
    value: int = 0


def slow_build(directory):
    time.sleep(0.5)
    (directory / "builder").write_text(str(os.getpid()))


def make_once(root, results):
    os.environ["VERL_CACHE_DIR"] = root
    results.put((cached_directory("thing", Recipe(), slow_build) / "builder").read_text())
