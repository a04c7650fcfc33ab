"""Check the prose of the documentation; `make style` runs it. It reads no code blocks and no generated pages.

    python scripts/prose.py            print what breaks the style; exit code 1 if something does
    python scripts/prose.py --words    print the words of each page: of its prose, and of the whole file

All pages written by hand have at most 45,000 words, as files. A sentence has at most 30 words (code spans in a row are
one), and things have the field's own words (SUBSTITUTES).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("docs/configuration.md", "docs/models.md", "docs/coming-from-verl.md", "docs/conformance.md")
NOT_COUNTED = ("SECURITY.md", "scripts/coming_from_verl.md", "docs/benchmarks/plan.md", "docs/lab/mutants.md")
"""Beside the generated pages: tables that programs write, and what is not a part of the guide."""
RECORDS = ("docs/adr/", "docs/lab/")
"""They speak of the project at their date: their words are counted, their style stays."""
MOST_WORDS = 30
MOST_IN_ALL = 45_000
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[\"(`*]*[A-Z`0-9])|(?<=[.!?])\s+")
NAMES = re.compile(r"\bcode(?:,? (?:and |or )?code)+\b")
SUBSTITUTES = {
    r"who(m)?ever|(somebody|nobody|everybody|anybody) (who|that|of)": "name the actor",
    r"that which|what is there|what there is": "name the thing",
    r"(is|are) (told|asked|had|looked at|taken for)": "use a verb of the field: is checked, requested, reported",
    r"(looks|look|looking) whether": "check whether",
    r"(says|tells) (which|what|who)": "report, print, name",
    r"by way of": "through",
    r"to and fro": "round trip",
    r"anew": "again",
    r"in place of": "instead of",
}
PATTERNS = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), better) for pattern, better in SUBSTITUTES.items()]


def pages() -> list[Path]:
    """What users read, and of the page about verl its source."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md", *NOT_COUNTED[:2])]
    return top + sorted(path for path in ROOT.glob("docs/**/*.md") if name_of(path) not in GENERATED)


def beside() -> list[Path]:
    """READMEs beside examples, recipes and images, whose style is checked and whose words are not counted."""
    folders = ("examples", "recipe", "docker", "distributions")
    return sorted(path for folder in folders for path in (ROOT / folder).glob("**/README.md"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """(line, text without markup) of each paragraph, heading, list item and table cell."""
    line = 1
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            other = {"code_inline": "code", "softbreak": " ", "html_inline": "", "image": ""}
            yield line, "".join(other.get(part.type, part.content) for part in token.children or ())


def offences(text: str) -> Iterator[str]:
    for line, block in blocks(text):
        for sentence in SENTENCE_END.split(block):
            if (count := len(NAMES.sub("code", sentence).split())) > MOST_WORDS:
                yield f"{line}: {count} words in one sentence, at most {MOST_WORDS}: {sentence[:60]}..."
        yield from (f"{line}: '{hit[0]}': {better}" for pattern, better in PATTERNS for hit in pattern.finditer(block))


def main() -> int:
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in pages()}
    by_hand = sum(len(text.split()) for name, text in texts.items() if name not in NOT_COUNTED)
    told = f"{by_hand:6} words in pages that are written by hand, of {MOST_IN_ALL}"
    if "--words" in sys.argv:
        counts = {name: (sum(len(b.split()) for _, b in blocks(t)), len(t.split())) for name, t in texts.items()}
        counts["in all"] = (sum(prose for prose, _ in counts.values()), sum(whole for _, whole in counts.values()))
        print("\n".join(f"{prose:6} {whole:6} {name}" for name, (prose, whole) in counts.items()))
        print(f"       {told}")
        return int(by_hand > MOST_IN_ALL)
    texts |= {name_of(path): path.read_text(encoding="utf-8") for path in beside()}
    found = [f"{name}:{hit}" for name, t in texts.items() if not name.startswith(RECORDS) for hit in offences(t)]
    found += [told] * (by_hand > MOST_IN_ALL)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
