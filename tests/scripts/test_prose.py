"""What breaks the style of the documents, and what the check leaves alone."""

from __future__ import annotations

import pytest

from scripts.prose import beside, blocks, offences, pages

LONG = " ".join(["word"] * 31)


@pytest.mark.parametrize(
    "page", [f"{LONG}.", f"* {LONG}", f"Short. {LONG}.", f"| a |\n|---|\n| {LONG} |", f"1. {LONG[:-5]}\n   word"]
)
def test_a_sentence_of_31_words_is_named_with_its_line(page: str):
    found = list(offences(f"# Title\n\n{page}\n"))
    assert len(found) == 1
    assert "31 words in one sentence, at most 30: word" in found[0]
    assert int(found[0].split(":")[0]) >= 3


@pytest.mark.parametrize(
    "page",
    [
        f"{LONG[:-5]}. {LONG[:-5]}.",
        f"{LONG[:-5]}: Then {LONG[:-10]}.",
        f"```\n{LONG}\n```",
        f"    {LONG}",
        f"<!-- {LONG} -->",
        "Names: " + ", ".join(f"`name_{n}`" for n in range(40)) + ".",
        f"`{LONG}` is one word.",
        f"![{LONG}](image.svg)",
    ],
)
def test_short_sentences_code_names_and_pictures_are_accepted(page: str):
    assert list(offences(f"# Title\n\n{page}\n")) == []


@pytest.mark.parametrize("words", ["Whoever waits", "the rank is asked", "It is built anew", "looks whether it fits"])
def test_a_substitute_for_a_term_of_the_field_is_named_with_a_better_one(words: str):
    (found,) = offences(f"# Title\n\nA node: {words}.\n")
    assert found.startswith("3: '")


def test_readmes_of_examples_have_the_style_too():
    names = {path.parent.name for path in beside()}
    assert {"examples", "slurm", "dapo", "verl_sync"} <= names
    assert [list(offences(path.read_text(encoding="utf-8"))) for path in beside()] == [[] for _ in beside()]


def test_generated_pages_are_read_at_their_source():
    names = {path.name for path in pages()}
    assert {"README.md", "coming_from_verl.md", "weight_sync.md"} <= names
    assert not names & {"configuration.md", "models.md", "coming-from-verl.md"}


def test_words_of_code_blocks_are_no_prose():
    assert [text for _, text in blocks("# Two words\n\n```\nthree more words\n```\n")] == ["Two words"]
