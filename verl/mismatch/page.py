"""What was found, as a table for the terminal, and as one HTML page that loads nothing."""

from __future__ import annotations

from html import escape

from verl.mismatch.compare import PHASES, Place, blocks
from verl.mismatch.findings import Findings

MOST_TOKENS, MOST_PLACES = 8, 12
WIDTH, HEIGHT, MARGIN = 720, 240, 48
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child,td.text{text-align:left}.bad{color:#b00020;font-weight:600}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}td,th{border-color:#444}.bad{color:#ff7b72}}"""


def heading(found: Findings) -> str:
    return f"{found.architecture} in {found.dtype}, {found.engine}, tensor parallel {found.tensor_parallel_size}"


def summary(found: Findings) -> str:
    count = len(found.tokens)
    return f"probabilities of {count} tokens differ by {found.mean:.2g} in the mean, {found.largest:.2g} at most"


def verdict(found: Findings, tolerance: float) -> str:
    if found.causes:
        first = f", first at {found.first.name}" if found.first else ""
        return f"MISMATCH: {', '.join(dict.fromkeys(cause.name for cause in found.causes))}{first}"
    if not found.passes(tolerance):
        return f"MISMATCH: no module is beyond rounding, and the mean is above --tolerance {tolerance}"
    return "no mismatch: every module computes what the trainer's does, but for rounding"


def table(found: Findings, tolerance: float) -> str:
    """The findings as text for the terminal."""
    lines = [heading(found), summary(found), ""]
    lines.append(f"{'place':<34}{'difference':>12}{'ulps':>8}{'unequal':>9}{'decode':>9}{'prefill':>9}")
    shown = [place for place in found.places if place.beyond][:MOST_PLACES]
    names = {place.name for place in [*blocks(found.places), *shown]}
    lines += [_row(place) for place in found.places if place.name in names]
    lines += [
        "difference, ulps, unequal: what has grown up to there; decode, prefill: the module's own error from the same",
        "inputs, in those of the trainer's rounding (up to 3 is rounding, ! is beyond)",
        "",
        f"{'token':<8}{'in':>4}{'at':>6}{'engine':>11}{'trainer':>11}  why",
    ]
    lines += [
        f"{token.token:<8}{token.sequence:>4}{token.index:>6}{token.engine:>11.4g}{token.trainer:>11.4g}  {token.why}"
        for token in found.tokens[:MOST_TOKENS]
    ]
    lines.append("")
    if found.not_compared:
        lines.append(f"not compared, the engine does not show them: {', '.join(found.not_compared)}")
    lines += [f"{cause.name}: {cause.place}: {cause.text}" for cause in found.causes]
    return "\n".join([*lines, verdict(found, tolerance)])


def _row(place: Place) -> str:
    own = "".join(f"{place.excess[phase]:>9.2g}" if phase in place.excess else f"{'':>9}" for phase in PHASES)
    mark = " !" if place.beyond else ""
    return f"{place.name:<34}{place.relative:>12.2g}{place.ulps:>8.2g}{place.unequal:>9.0%}{own}{mark}"


def html(found: Findings, tolerance: float) -> str:
    """The same as a page, with all places and a plot of what grows from block to block."""
    causes = "".join(
        f"<tr><td>{escape(cause.name)}</td><td class=text>{escape(cause.place)}</td>"
        f"<td class=text>{escape(cause.text)}</td></tr>"
        for cause in found.causes
    )
    places = "".join(
        f"<tr{' class=bad' if place.beyond else ''}><td>{escape(place.name)}</td><td>{place.relative:.2g}</td>"
        f"<td>{place.ulps:.2g}</td><td>{place.unequal:.0%}</td>"
        + "".join(f"<td>{place.excess[phase]:.2g}</td>" if phase in place.excess else "<td></td>" for phase in PHASES)
        + "</tr>"
        for place in found.places
    )
    tokens = "".join(
        f"<tr><td>{token.token}</td><td>{token.sequence}</td><td>{token.index}</td><td>{token.engine:.4g}</td>"
        f"<td>{token.trainer:.4g}</td><td class=text>{escape(token.why)}</td></tr>"
        for token in found.tokens[:50]
    )
    named = f"<h2>Causes</h2><table><tr><th>cause<th>place<th>what</tr>{causes}</table>" if causes else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>verl-sync mismatch</title><style>{STYLE}</style>"
        f"<h1>{escape(verdict(found, tolerance))}</h1><p>{escape(found.model)}: {escape(heading(found))}; "
        f"{escape(summary(found))}.</p>{named}<h2>From block to block</h2>{_plot(blocks(found.places))}"
        f"<h2>Places</h2><p>Not compared: {escape(', '.join(found.not_compared)) or 'none'}.</p>"
        "<table><tr><th>place<th>difference<th>ulps<th>unequal<th>decode<th>prefill</tr>"
        f"{places}</table><h2>Tokens</h2>"
        f"<table><tr><th>token<th>sequence<th>at<th>engine<th>trainer<th>why</tr>{tokens}</table></html>\n"
    )


def _plot(places: list[Place]) -> str:
    """Relative differences as a line over places."""
    largest = max((place.relative for place in places), default=0.0) or 1.0
    step = (WIDTH - 2 * MARGIN) / max(len(places) - 1, 1)
    points = [
        (MARGIN + index * step, HEIGHT - MARGIN - place.relative / largest * (HEIGHT - 2 * MARGIN))
        for index, place in enumerate(places)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f"<circle cx={x:.1f} cy={y:.1f} r=3 fill=#3366cc><title>{escape(place.name)}: {place.relative:.3g}</title>"
        "</circle>"
        for (x, y), place in zip(points, places, strict=True)
    )
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label='relative difference by place'>"
        f"<polyline points='{line}' fill=none stroke=#3366cc stroke-width=2 />{dots}"
        f"<text x=4 y={MARGIN} font-size=12 fill=currentColor>{largest:.2g}</text>"
        f"<text x=4 y={HEIGHT - MARGIN} font-size=12 fill=currentColor>0</text></svg>"
    )
