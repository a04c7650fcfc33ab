"""Files of runs, as a run writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec

from verl.checkpoint_engine.plan.member_report import Link, MemberTime, PhaseReport
from verl.checkpoint_engine.plan.types import EngineCheckResult, SyncReport
from verl.checkpoint_engine.support import records
from verl.utils.timing import Span, write_spans

BEGAN_S = 1795669626.7693107
PHASE_S = {
    "prepare": 0.0, "publish": 0.2, "stage": 1.0, "verify": 0.1, "wait": 0.0, "commit": 0.01, "activate": 0.5,
    "resume": 0.02,
}  # fmt: skip


def sync_report(version: int, began_s: float, **changes: object) -> SyncReport:
    report = SyncReport(
        version=version,
        backend="tcp",
        outcome="committed",
        nbytes_needed=2_000_000_000,
        nbytes_moved=3_000_000_000,
        phase_s=PHASE_S,
        total_s=sum(PHASE_S.values()),
        began_s=began_s,
        laps=tuple((phase, seconds) for phase, seconds in PHASE_S.items() if phase != "wait"),
        trainer_blocked_s=0.2,
        paused_s={"replica-0": 0.52, "replica-1": 0.5},
        replicas_updated=("replica-0", "replica-1"),
        replicas_quarantined=(),
        retries=0,
        members={
            "stage": PhaseReport.of(
                MemberTime(member=f"node-{number}", began_s=0.2, seconds=seconds, nbytes=1_500_000_000)
                for number, seconds in enumerate((0.4, 1.0, 0.4))
            )
        },
        links=(Link(member="node-1", peer="trainer-0", nbytes=750_000_000, seconds=0.9),),
        engine_checks={"replica-0": EngineCheckResult(seconds=0.1, found="40 live tensors equal a load from disk")},
    )
    return replace(report, **changes)


def write_run(directory: Path, *, steps: int = 12) -> Path:
    """A run of two replicas: version 3 was aborted and sent again, at step 5 a replica was quarantined."""
    directory.mkdir(parents=True, exist_ok=True)
    spans, reports, metrics = [], [], []
    for step in range(steps + 1):
        start_s = BEGAN_S + 10 * step
        if step == 3:
            aborted = {"outcome": "aborted", "error": "[version 3, stage] node-1 <gone>", "replicas_updated": ()}
            reports.append(sync_report(step, start_s + 6, retries=1, **aborted))
        changes = {"replicas_updated": ("replica-0",), "replicas_quarantined": ("replica-1",)} if step == 5 else {}
        reports.append(sync_report(step, start_s + 8, **changes))
        metrics.append({"step": step, **reports[-1].metrics()})
        if step == 0:
            continue
        parts = (("gen", 0, 4.0), ("reward", 4.0, 4.1), ("old_log_prob", 4.1, 5), ("update_actor", 5, 8))
        for name, first, last in (*parts, ("update_weights", 8, 9.83), ("step", 0, 9.9)):
            spans.append(Span(role="trainer", name=name, start_s=start_s + first, stop_s=start_s + last, version=step))
            metrics[-1][f"timing_s/{name}"] = last - first
        for number in (0, 1):
            role = f"replica-{number}"
            spans.append(Span(role=role, name="generating", start_s=start_s, stop_s=start_s + 4 - number))
            spans.append(Span(role=role, name="paused", start_s=start_s + 9.31, stop_s=start_s + 9.83, version=step))
        metrics[-1] |= {
            "critic/score/mean": 0.3 + 0.04 * step,
            "actor/grad_norm": None if step == 4 else 1.0 / step,
            "response_length/mean": 3.5,
            "training/staleness/mean": 0.25,
            "memory/driver/host_peak_gb": 0.5 + 0.01 * step,
            "memory/trainer/update_actor/host_peak_gb": 0.8,
            "memory/trainer/publish/host_peak_gb": 0.7,
            "rollout/restarts": float(step >= 6),
        }
        spans += [
            Span(role="sync", name=phase, start_s=start_s + 8, stop_s=start_s + 8 + seconds, version=step)
            for phase, seconds in PHASE_S.items()
        ]
    write_spans(directory / "timeline.jsonl", spans)
    records.append(directory / "sync_reports.jsonl", [msgspec.json.encode(report) for report in reports])
    records.append(directory / "metrics.jsonl", [records.encoded(record) for record in metrics])
    return directory


def write_samples(directory: Path, step: int, *, count: int = 3) -> None:
    directory.mkdir(exist_ok=True)
    rows = [
        {
            "step": step,
            "uid": f"{step}-{number}",
            "data_source": "builtin/arithmetic",
            "prompt": [{"role": "user", "content": "1 + 2 <b>?</b>"}],
            "response": "it is 3",
            "ground_truth": "3",
            "score": 1.0 - number / 2,
            "response_ids": [5, 6, 7, 8, 9],
            "response_mask": [1, 1, 0, 1, 1],
            "versions": [step - 1, step - 1, -1, step, step],
            "replicas": [["replica-0", 0, 5]],
            "stop_reason": "completed",
        }
        for number in range(count)
    ]
    (directory / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
