"""The benchmark of pictures runs, and says everything; how fast something is, is not tested here."""

import json

import pytest

from benchmarks.pictures import TOKENS, main


@pytest.mark.cells(14)
def test_a_step_with_pictures_and_the_memory_of_a_driver_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE_DIR", "")  # put back what it sets
    assert main(["--samples", "32", "--batch", "2", "--repeats", "1", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["driver"]["most_grown_mb"] < 200
    assert found["driver"]["nbytes_sent_of_a_response"] < 1000 < found["driver"]["nbytes_of_patches"]
    assert found["step"]["tokens"] > TOKENS
    assert found["step"]["text"].keys() == found["step"]["pictures"].keys()
    assert min(found["pictures_per_s_of_1"], found["pictures_per_s_of_2"]) > 0
