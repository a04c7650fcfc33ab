"""Refuse a commit message whose subject is no short imperative. pre-commit calls this with the message's file.

    python scripts/check_commit_message.py FILE

A subject is at most 72 characters, starts with a capital letter and an imperative ("Reject a bucket of 0 bytes"), ends
without a full stop, and is followed by an empty line. What git itself writes (merges, reverts, fixups) is accepted.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
VERBS = """
accept add allow apply ask avoid bump call change check close compare copy correct count cut delete describe disable
document drop enable end ensure explain export extract fail finish fix format handle implement improve include install
introduce join keep limit link list load lock log make mark measure merge move offer open pass prepare prevent print
publish pull push raise reduce refactor refuse register reject release remove rename repeat replace report require reset
restart restore return reuse revert run save send serve share show simplify skip sort split start stop store support
take tell test tidy train trim try turn update upgrade use validate verify wait warn wrap write
"""
IRREGULAR = "brought built chose found gave had held kept left made said sent shown taken told took tried were wrote"
NO_VERBS = """
a all an and any at both by each every everything for he her here how i if in it its more my neither no nobody nothing
now of on one only or our she so some that the their there these they this those to two we what when where whether which
who whoever whose why with without you
"""


def other_forms(verb: str) -> set[str]:
    """Third person, past and gerund of a regular verb: `fix` gives fixes, fixed, fixing."""
    stem = verb.removesuffix("e")
    forms = {f"{verb}s", f"{verb}es", f"{stem}ed", f"{stem}ing", f"{verb}{verb[-1]}ed", f"{verb}{verb[-1]}ing"}
    if verb.endswith("y"):
        forms |= {f"{verb[:-1]}ies", f"{verb[:-1]}ied"}
    return forms


NOT_IMPERATIVE = {*IRREGULAR.split(), *(form for verb in VERBS.split() for form in other_forms(verb))}


def problems(message: str) -> list[str]:
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject, *rest = lines or [""]
    if subject.startswith(BY_GIT):
        return []
    first = re.findall(r"^\w*", subject)[0]
    found = []
    if len(subject) > LONGEST:
        found.append(f"it has {len(subject)} characters, {LONGEST} are allowed: say the rest below an empty line")
    if not subject[:1].isupper():
        found.append("it does not start with a capital letter")
    if first.lower() in NO_VERBS.split():
        found.append(f"'{first}' is no verb: begin with an imperative, as in 'Reject a bucket of 0 bytes'")
    if first.lower() in NOT_IMPERATIVE:
        found.append(f"'{first}' is no imperative: 'Fix', not 'Fixes', 'Fixed' or 'Fixing'")
    if subject.endswith("."):
        found.append("it ends with a full stop")
    if rest and rest[0].strip():
        found.append("the second line is not empty")
    return found


def main() -> int:
    message = Path(sys.argv[1]).read_text(encoding="utf-8").split("\n# ------------------------ >8 ----")[0]
    found = problems(message)
    for problem in found:
        print(f"subject of the commit message: {problem}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
