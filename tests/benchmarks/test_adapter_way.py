"""The benchmark of an adapter's way to its first token."""

import re

from tests.warm_workers import written_by


def test_it_measures_every_part_of_the_way(warm):
    said = written_by(warm, "benchmarks.adapter_way", "--tenants", 2, "--rounds", 2, "--sampler", "transformers")
    rows = re.findall(
        r"\| (one after the other|all at once) \| (saved|first token|both) \| ([\d.]+) \| ([\d.]+) \|", said
    )
    assert len(rows) == 6
    for _, _, median, p95 in rows:
        assert 0 < float(median) <= float(p95)
