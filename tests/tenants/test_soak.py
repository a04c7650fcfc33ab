"""Tenants that do random things while the server is killed: a short `soak`, whose page says what is checked."""

import pytest

from tests.tenants.soak import soak


@pytest.mark.job
def test_tenants_get_what_they_get_alone_while_the_server_is_killed_and_started_again(tmp_path):
    counts = soak(tmp_path, operations=200, kills=2, seed=3, checked=2)
    assert counts["kills"] == 2
    for what in ("repeated", "refused to others", "changed files refused", "sample as alone", "step as alone"):
        assert counts[what], counts
    assert counts["acknowledged versions looked for after a start"] > 10, counts
