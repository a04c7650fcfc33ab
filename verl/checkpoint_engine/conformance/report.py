"""A conformance report as text, JSON, JUnit and HTML. No torch."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .contract import STATES
from .verdicts import FAULTS, Cell, Finding, Report, Step

MOST_TENSORS = 6
MOST_TOKENS = 12


def told(step: Step) -> str:
    """A step in a line."""
    faults = ", ".join(one.fault for one in step.findings) or "no fault"
    if step.skipped:
        return f"{step.name}: not tried: {step.skipped}"
    return f"{step.name}: " + (f"{STATES[step.state]}; " if isinstance(step, Cell) else "") + faults


def as_text(report: Report) -> str:
    lines = [
        f"{report.engine} at {report.server}, {report.model} in {report.dtype}, route {report.route}",
        f"oracle: {report.oracle}; tolerance {report.tolerance}",
        f"power: {report.groups - len(report.unseen)} of {report.groups} tensors change a log-prob, by at least "
        f"{report.weakest:.2g} nats, if one alone is missing",
    ]
    if report.unseen:
        lines.append(f"not seen by log-probs: {_listed(report.unseen)}")
    lines += _cells(report) if report.cells else _steps(report)
    for step in report.steps:
        lines += [f"  {step.name}: {text}" for finding in step.findings for text in _finding(finding)]
        if isinstance(step, Cell) and step.remedy:
            lines.append(f"  {step.name}: the operator has to: {step.remedy}")
    more = KEPT if report.cells else CERTIFIED
    lines.append(f"{verdict(report)}: {more}" if report.passed else verdict(report))
    return "\n".join(lines)


CERTIFIED = "the server computes with every version that it was sent"
KEPT = "every update ended as the recovery contract says"


def verdict(report: Report) -> str:
    kept = "kept" if report.cells else "certified"
    return kept if report.passed else f"NOT {kept}"


def _steps(report: Report) -> Iterator[str]:
    yield f"prefix cache: {report.cache}"
    wide = 2 + max(len(step.name) for step in report.steps)
    yield f"{'':<{wide}}{'update':>9}{'log-probs':>11}{'distance':>10}{'in flight':>11}"
    for step in report.steps:
        if step.skipped:
            yield f"{step.name:<{wide}}not tried: {step.skipped}"
            continue
        counts = f"{step.seconds:>7.2f} s{step.tokens:>11}{step.deviation:>10.2g}{step.in_flight:>11}"
        yield f"{step.name:<{wide}}{counts}" + (f"  {step.note}" if step.note else "")


CELLS = ("fault, phase", "the push", "after", "then", "in flight", "next update", "broken promises")


def _cells(report: Report) -> Iterator[str]:
    rows = [CELLS, *map(row, report.cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for each in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(each, widths, strict=True)).rstrip()


def row(cell: Cell) -> tuple[str, ...]:
    """A line of the table of faults: a text for each of `CELLS`."""
    if cell.skipped:
        return cell.name, "", "", f"not tried: {cell.skipped}", "", "", ", ".join(one.fault for one in cell.findings)
    return (
        cell.name,
        cell.ended,
        f"{cell.seconds:.1f} s",
        STATES[cell.state].partition(":")[0],
        str(cell.in_flight),
        cell.next_update,
        ", ".join(dict.fromkeys(one.fault for one in cell.findings)) or "none",
    )


def _listed(names: Any) -> str:
    more = len(names) - MOST_TENSORS
    return ", ".join(names[:MOST_TENSORS]) + (f" and {more} more" if more > 0 else "")


def _finding(finding: Finding) -> Iterator[str]:
    name = finding.fault + (f" (or {finding.or_else})" if finding.or_else else "")
    subject = f"{_listed(finding.tensors)} " if finding.tensors else ""
    yield f"{name}: {subject}{finding.text}"
    if finding.prompt:
        more = "..." if len(finding.prompt) > MOST_TOKENS else ""
        yield f"    shown by the prompt {list(finding.prompt[:MOST_TOKENS])}{more}"
    yield f"    of this kind: {finding.thread}"


def as_json(report: Report) -> dict[str, Any]:
    found = asdict(report) | {"passed": report.passed}
    for step, said in zip(report.steps, found["steps"], strict=True):
        for finding, written in zip(step.findings, said["findings"], strict=True):
            written["thread"] = finding.thread
    return found


def write_junit(report: Report, file: Path) -> None:
    """One test case for each step."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"verl-sync certify --route {report.route}" + (" --faults" if report.cells else ""),
        tests=str(len(report.steps)),
        failures=str(sum(bool(step.findings) for step in report.steps)),
        errors="0",
        skipped=str(sum(_is_skipped(step) for step in report.steps)),
    )
    for step in report.steps:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"conformance.{report.route}", name=step.name, time=f"{step.seconds:.3f}"
        )
        if step.findings:
            text = "\n".join(line for finding in step.findings for line in _finding(finding))
            failure = ElementTree.SubElement(case, "failure", message=step.findings[0].fault)
            failure.text = text
        elif step.skipped:
            ElementTree.SubElement(case, "skipped", message=step.skipped)
        elif isinstance(step, Cell) or step.note:
            ElementTree.SubElement(case, "system-out").text = step.note or told(step)
    ElementTree.ElementTree(suite).write(file, encoding="utf-8", xml_declaration=True)


def _is_skipped(step: Step) -> bool:
    return bool(step.skipped) and not step.findings


def _outcome(step: Step) -> str:
    if step.skipped:
        return f"not tried: {step.skipped}"
    return (", ".join(one.fault for one in step.findings) or "none") + (f" ({step.note})" if step.note else "")


def write_html(report: Report, file: Path) -> None:
    """One file without scripts or links to other files but the threads."""
    header = "<tr><th>step<th>update<th>log-probs<th>distance<th>in flight<th>faults"
    rows = "".join(
        f"<tr><td>{html.escape(step.name)}<td>{step.seconds:.2f} s<td>{step.tokens}<td>{step.deviation:.2g}"
        f"<td>{step.in_flight}<td>{html.escape(_outcome(step))}"
        for step in report.steps
    )
    if report.cells:
        header = "<tr><th>" + "<th>".join(CELLS)
        rows = "".join("<tr><td>" + "<td>".join(map(html.escape, row(cell))) for cell in report.cells)
    found = "".join(
        f"<li><b>{html.escape(step.name)}: {html.escape(one.fault)}</b>. {FAULTS[one.fault][0]} "
        f"<code>{html.escape(_listed(one.tensors))}</code> {html.escape(one.text)}. "
        f'<a href="{html.escape(one.thread)}">Of this kind</a>'
        for step in report.steps
        for one in step.findings
    )
    title = f"{report.engine}, route {report.route}: {verdict(report)}"
    file.write_text(
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em .8em}</style>"
        f"<h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(report.model)} in {report.dtype} at {html.escape(report.server)}. "
        f"Oracle: {html.escape(report.oracle)}; tolerance {report.tolerance}. {report.groups} tensors, "
        f"{len(report.unseen)} not seen, weakest effect {report.weakest:.2g} nats. "
        f"Prefix cache: {html.escape(report.cache)}."
        f"<table>{header}{rows}</table><ul>{found}</ul>",
        "utf-8",
    )
