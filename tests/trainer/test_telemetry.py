"""Syncs as spans: which there are, how they nest, and that they reach an OTLP endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.cli.runs import PHASE_S, sync_report
from tests.http_server import http_server
from verl.trainer.telemetry import SyncSpans, sync_spans


def spans_of(*reports):
    exporter = InMemorySpanExporter()
    spans = SyncSpans(exporter)
    for report in reports:
        spans.synced(report)
    spans._processor.force_flush()
    found = exporter.get_finished_spans()
    spans.close()
    return {span.name: span for span in found}


def seconds(span) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_a_sync_is_a_trace_with_its_phases_and_members_within():
    spans = spans_of(sync_report(7, 1000.0))
    sync = spans["sync 7"]
    assert sync.parent is None
    assert seconds(sync) == pytest.approx(sum(PHASE_S.values()))
    for phase in ("publish", "stage", "verify", "commit", "activate", "resume"):
        assert spans[phase].parent.span_id == sync.context.span_id
        assert seconds(spans[phase]) == pytest.approx(PHASE_S[phase])
    assert spans["stage"].start_time == spans["publish"].end_time
    assert seconds(spans["node-1: stage"]) == pytest.approx(1.0)
    assert spans["node-1: stage"].start_time / 1e9 == pytest.approx(1000.2)
    assert sync.attributes["outcome"] == "committed"
    assert sync.attributes["checkpoint_engine/nbytes_moved"] == 3e9


def test_an_aborted_sync_is_an_error_with_its_reason():
    spans = spans_of(replace(sync_report(7, 1000.0), outcome="aborted", error="node-1 is gone"))
    assert not spans["sync 7"].status.is_ok
    assert spans["sync 7"].status.description == "node-1 is gone"


def test_of_several_attempts_members_have_no_moment():
    assert "node-1: stage" not in spans_of(replace(sync_report(7, 1000.0), retries=1))


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A server's address, and what it was sent."""
    received: list[bytes] = []

    def answer(_method: str, _path: str, body: bytes) -> tuple[int, bytes]:
        received.append(body)
        return 200, b""

    with http_server(answer) as url:
        yield url, received


def test_spans_reach_the_endpoint_that_the_environment_names(
    collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
):
    address, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    with sync_spans() as spans:
        spans.synced(sync_report(7, 1000.0))
    request = ExportTraceServiceRequest.FromString(received[0])
    (resource,) = request.resource_spans
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert {"sync 7", "stage"} <= names
    assert {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}[
        "service.name"
    ] == "verl-sync"


def test_without_an_endpoint_there_are_no_spans(monkeypatch: pytest.MonkeyPatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with sync_spans() as spans:
        assert spans is None
