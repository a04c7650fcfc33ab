"""What a server of tenants does, in Prometheus's text. Nothing in it names an owner: whoever reads it has no key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def written_metrics(*, adapters: int, unanswered: int, outcomes: Mapping[str, int]) -> bytes:
    """`outcomes`: the number of answers by `done`, `user` (refused) and `server` (failed)."""

    class Now(Collector):
        def collect(self) -> Iterator[Metric]:
            yield GaugeMetricFamily("verl_tenants_adapters", "adapters in training", value=adapters)
            yield GaugeMetricFamily("verl_tenants_unanswered", "requests under way or waiting", value=unanswered)
            answers = CounterMetricFamily("verl_tenants_answers", "answers: done, user, server", labels=["outcome"])
            for outcome in ("done", "user", "server"):
                answers.add_metric([outcome], outcomes.get(outcome, 0))
            yield answers

    registry = CollectorRegistry()
    registry.register(Now())
    return generate_latest(registry)
