"""What a probe has found is kept for later runs, and only for those that would find the same."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import LlamaConfig

from verl.workers.hf import answers, probing
from verl.workers.hf.probing import Finding, Way, answered
from verl.workers.rollout.hf.batch import Decoding
from verl.workers.rollout.hf.decoding import Found

FINDING = Finding(Way.ROWS, "a sequence changes with its place in a row")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where answers are."""
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path))
    return tmp_path / "probes"


class Asked:
    """Says the same, and counts how often."""

    def __init__(self, says) -> None:
        self.says, self.times = says, 0

    def __call__(self):
        self.times += 1
        return self.says


def in_a_new_process(monkeypatch, find, *, config=None, question="packed", lasts=True):
    monkeypatch.setattr(probing, "_FOUND", {})
    return answered(config or LlamaConfig(), question, find, type(find.says), lasts=lasts)


@pytest.mark.parametrize("says", [FINDING, Found(Decoding.ROWS, "a cache changes it", True), Found(None, "not it")])
def test_a_later_run_asks_nothing_and_has_the_same_answer(cache, monkeypatch, says):
    find = Asked(says)
    assert [in_a_new_process(monkeypatch, find) for _ in range(3)] == [says] * 3
    assert find.times == 1


@pytest.mark.parametrize(
    "other",
    [{"config": LlamaConfig(sliding_window=3)}, {"question": "rows"}, {"lasts": False}],
    ids=["another configuration", "another question", "a model that others may have changed"],
)
def test_it_is_asked_again(cache, monkeypatch, other):
    find = Asked(FINDING)
    in_a_new_process(monkeypatch, find)
    in_a_new_process(monkeypatch, find, **other)
    assert find.times == 2


def test_configurations_that_come_with_their_own_code_are_asked_in_every_run(cache, monkeypatch):
    class OwnConfig(LlamaConfig):
        pass

    find = Asked(FINDING)
    for _ in range(2):
        in_a_new_process(monkeypatch, find, config=OwnConfig())
    assert find.times == 2
    assert not cache.exists()


def test_what_an_error_had_a_part_in_is_asked_again(cache, monkeypatch):
    find = Asked(Finding(Way.ALONE, "out of memory", sure=False))
    for _ in range(2):
        in_a_new_process(monkeypatch, find)
    assert find.times == 2


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_another_version_of_a_library_asks_again(cache, monkeypatch, library):
    before = answers.digest_of("packed")
    monkeypatch.setattr(getattr(answers, library), "__version__", "99.0")
    answers._asked_by.cache_clear()
    try:
        assert answers.digest_of("packed") != before
    finally:
        answers._asked_by.cache_clear()


def test_other_sources_ask_again(cache, monkeypatch, tmp_path):
    found = []
    for text in ("a = 1", "a = 2"):
        (tmp_path / "probe.py").write_text(text)
        monkeypatch.setattr(answers, "SOURCES", (tmp_path,))
        answers._asked_by.cache_clear()
        found.append(answers.digest_of("packed"))
    answers._asked_by.cache_clear()
    assert found[0] != found[1]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"way": 77, "why": "", "sure": true}', '{"way": 1}'])
def test_a_file_that_is_no_answer_is_written_anew(cache, monkeypatch, text):
    find = Asked(FINDING)
    in_a_new_process(monkeypatch, find)
    (file,) = cache.iterdir()
    file.write_text(text)
    assert in_a_new_process(monkeypatch, find) == FINDING
    assert json.loads(file.read_text()) == {"way": 1, "why": FINDING.why, "sure": True}


def test_writers_at_once_leave_one_whole_answer(cache):
    barrier = threading.Barrier(8)

    def write(number: int) -> set[int]:
        barrier.wait()
        lengths = set()
        for _ in range(20):
            answers.write("0" * 64, {"number": number, "why": "x" * 10_000})
            lengths.add(len(answers.read("0" * 64)["why"]))
        return lengths

    with ThreadPoolExecutor(8) as threads:
        assert set().union(*threads.map(write, range(8))) == {10_000}
    assert [file.name for file in cache.iterdir()] == [f"{'0' * 64}.json"]


def test_a_place_that_cannot_be_written_to_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    find = Asked(FINDING)
    assert in_a_new_process(monkeypatch, find) == FINDING
