"""Exports syncs as OpenTelemetry spans, if its SDK is installed and the environment names an endpoint."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from verl import __version__, envs
from verl.checkpoint_engine.plan.types import SyncReport

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)
CLOSING_MS = 5000
"""Time at the end of a run to send the remaining spans."""


class SyncSpans:
    """Exports one trace per sync: the sync, its phases, and the members' spans from its report.

    A context manager: leaving it sends the remaining spans. A thread of the SDK sends them; failures lose them.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # A provider of its own: that of the process is somebody else's.
        self._provider = TracerProvider(resource=Resource.create({"service.name": "verl-sync"}))
        self._processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("verl.checkpoint_engine", __version__)

    def synced(self, report: SyncReport) -> None:
        """Export a sync that has ended, successful or not."""
        from opentelemetry.trace import Status, StatusCode

        numbers = {name: value for name, value in report.metrics().items() if name.startswith("checkpoint_engine/")}
        about = {"version": report.version, "backend": report.backend, "outcome": report.outcome, **numbers}
        sync = self._span(f"sync {report.version}", report.began_s, None, about)
        if report.outcome != "committed":
            sync.set_status(Status(StatusCode.ERROR, report.error or ""))
        for phase, start_s, stop_s in report.timed_laps():
            span = self._span(phase, start_s, sync, {})
            self._end(span, stop_s)
        for phase, told in report.members.items() if not report.retries else ():
            for one in told.slowest:
                start_s = report.began_s + one.began_s
                span = self._span(f"{one.member}: {phase}", start_s, sync, {"nbytes": one.nbytes, "member": one.member})
                self._end(span, start_s + one.seconds)
        self._end(sync, report.began_s + report.total_s)

    def _span(self, name: str, start_s: float, parent: Any, attributes: dict[str, Any]) -> Any:
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent) if parent is not None else None
        return self._tracer.start_span(name, context=context, start_time=_ns(start_s), attributes=attributes)

    def _end(self, span: Any, stop_s: float) -> None:
        span.end(end_time=_ns(stop_s))

    def close(self) -> None:
        """Idempotent."""
        self._processor.force_flush(CLOSING_MS)
        self._provider.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def sync_spans() -> AbstractContextManager[SyncSpans | None]:
    """Context with a `SyncSpans` for the environment's endpoint; None without one or (warned) without the SDK."""
    endpoint = envs.otlp_endpoint()
    if not endpoint:
        return nullcontext()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as exc:
        logger.warning(
            "no spans are sent to %s: pip install opentelemetry-sdk opentelemetry-exporter-otlp (%s)", endpoint, exc
        )
        return nullcontext()
    return SyncSpans(OTLPSpanExporter())
