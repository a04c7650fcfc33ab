"""What a run measures of its machine, by name. Two runs that compute the same differ in these, and in no others.

Used by `verl-sync diff` and by tests that compare runs. docs/metrics.md says what each metric means.
"""

from __future__ import annotations

import re

_METRICS = re.compile(
    r"""
    (timing_s|timing_per_token_ms|memory|recovery|checkpoint|checkpoint_engine)/.*  # seconds, bytes, who was late
    | perf/(?!total_num_tokens).*
    | trainer/(own_s|slowness|slowest_rank)/.*
    | agent_loop/\w+_s(/(min|mean|max))?                                            # counts are compared
    | agent_loop/(retries|continuations|taken_over_tokens)
    | rollout/(restarts|prefill_again_tokens|kept_\w+)                              # after deaths and syncs
    | training/attempt
    | fully_async/.*
    """,
    re.VERBOSE,
)
OF_SAMPLES = frozenset({"uid", "replicas"})
"""Columns of a file of samples: a name that most runs draw, and the engines that were free."""
OF_SETTINGS = frozenset(
    {
        "trainer.default_local_dir",
        "trainer.experiment_name",
        "trainer.project_name",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
    }
)
"""Where a run writes, and what it is called."""


def is_measured(metric: str) -> bool:
    """Whether `metric` may differ between two runs that compute the same."""
    return _METRICS.fullmatch(metric) is not None
