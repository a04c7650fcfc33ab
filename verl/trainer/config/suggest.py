"""The error for an unknown key: one line with the key that was probably meant."""

from __future__ import annotations

import difflib

from verl.trainer.config.from_verl.rules import is_verls
from verl.trainer.config.from_verl.translation import rule_of
from verl.trainer.config.schema import is_known, keys, section_paths

ALIAS = "actor_rollout_ref.rollout.checkpoint_engine"
"""verl's place for a section that is at the top level here; both are accepted with the same meaning."""
CANONICAL = "checkpoint_engine"


def canonical(dotted: str) -> str:
    """`dotted` with verl's place of the section replaced by ours."""
    return CANONICAL + dotted.removeprefix(ALIAS) if dotted.startswith(f"{ALIAS}.") else dotted


def key_error(dotted: str) -> str | None:
    """Why the full dotted key `dotted` cannot be set, whatever its value; None if it can, or if verl has it."""
    if is_known(canonical(dotted)) or rule_of(dotted) is not None or is_verls(dotted):
        return None
    return f"unknown configuration key {dotted!r}.{_suggestion(canonical(dotted))}"


def _suggestion(dotted: str) -> str:
    everything = [*keys(), *(path for path in section_paths() if not dotted.startswith(f"{path}."))]
    if above := [path for path in keys() if dotted.startswith(f"{path}.")]:
        return f" {above[0]!r} is a value, not a section."
    nearest_first = sorted(everything, key=lambda path: -difflib.SequenceMatcher(None, dotted, path).ratio())
    found = (
        [path for path in nearest_first if path.endswith(f".{dotted}")]
        or difflib.get_close_matches(dotted, everything, n=1, cutoff=0.85)
        or [path for path in nearest_first if _last(path) == _last(dotted)]
        or difflib.get_close_matches(dotted, everything, n=1, cutoff=0.7)
        or [path for path in nearest_first if _last(path) in difflib.get_close_matches(_last(dotted), {_last(path)})]
    )
    found = [path for path in found if _last(path) == _last(dotted) or not _only_shares_its_section(path, dotted)]
    if not found:
        section = dotted.rpartition(".")[0]
        return f" See --help {section} for its keys." if section in section_paths() else " See --help for every key."
    return f" Did you mean {' or '.join(map(repr, found[:3]))}?"


def _only_shares_its_section(path: str, dotted: str) -> bool:
    alike = difflib.SequenceMatcher(None, _last(path), _last(dotted)).ratio()
    return path.rpartition(".")[0] == dotted.rpartition(".")[0] and alike < 0.5


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]
