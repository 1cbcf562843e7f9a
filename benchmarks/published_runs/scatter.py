"""A drawing of all rows: predicted over measured seconds, both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from html import escape

from benchmarks.published_runs.predictions import Outcome
from benchmarks.published_runs.rows import Row

WIDTH, HEIGHT, MARGIN = 720, 560, 64
INK, GRID = "#808080", "#80808040"
"""Greys that can be read on white and on black alike; the drawing has no background of its own."""
NEAR = 1.2
"""The dashed lines: predicted this many times as slow, or as fast, as measured."""

KINDS: Sequence[tuple[str, str, Callable[[Row], bool]]] = (
    ("Playbook, 64 GPUs and more", "#d0672b", lambda row: "Ultra-Scale" in row["source"] and row["gpus_total"] >= 64),
    ("Playbook, 8 and 16 GPUs", "#3f87c8", lambda row: "Ultra-Scale" in row["source"]),
    ("other sources, 64 GPUs and more", "#b35ab8", lambda row: bool(row["gpus_total"] >= 64)),
    ("other sources, 1 to 32 GPUs", "#3a9a5b", lambda row: True),
)
"""Name, colour, and whether a row is of the kind; the first that it is of counts."""


def drawing(outcomes: Sequence[Outcome], flukes: Collection[str]) -> str:
    """The SVG. flukes: ids of runs that are drawn hollow."""
    points = [(float(o.row["iter_time_s"]), o.seconds, _kind(o.row), o.row["id"] in flukes) for o in outcomes]
    least = math.floor(math.log10(min(min(x, y) for x, y, *_ in points)))
    most = math.ceil(math.log10(max(max(x, y) for x, y, *_ in points)))

    def across(seconds: float) -> float:
        return MARGIN + (math.log10(seconds) - least) / (most - least) * (WIDTH - 2 * MARGIN)

    def down(seconds: float) -> float:
        return HEIGHT - MARGIN - (math.log10(seconds) - least) / (most - least) * (HEIGHT - 2 * MARGIN)

    low, high = 10.0**least, 10.0**most
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f"<title>Predicted over measured seconds per step, {len(points)} published runs</title>",
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">measured seconds per step</text>',
        f'<text x="18" y="{HEIGHT / 2}" transform="rotate(-90 18 {HEIGHT / 2})" text-anchor="middle">'
        "predicted seconds per step</text>",
    ]
    for power in range(least, most + 1):
        x, y, label = across(10.0**power), down(10.0**power), f"{10.0**power:g}"
        parts.append(f'<path d="M{x:.1f} {down(low):.1f} V{down(high):.1f}" stroke="{GRID}"/>')
        parts.append(f'<path d="M{across(low):.1f} {y:.1f} H{across(high):.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x:.1f}" y="{down(low) + 18:.1f}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{across(low) - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for factor, dash in ((1.0, ""), (NEAR, ' stroke-dasharray="4 4"'), (1 / NEAR, ' stroke-dasharray="4 4"')):
        first, last = low * max(1.0, 1 / factor), high / max(1.0, factor)
        parts.append(
            f'<path d="M{across(first):.1f} {down(first * factor):.1f} L{across(last):.1f} '
            f'{down(last * factor):.1f}" stroke="{INK}"{dash}/>'
        )
    for x, y, kind, hollow in sorted(points, key=lambda point: (point[3], -point[2])):
        colour = KINDS[kind][1]
        look = f'fill="none" stroke="{colour}"' if hollow else f'fill="{colour}" fill-opacity="0.6"'
        parts.append(f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" {look}/>')
    return "\n".join([*parts, *_legend(points), "</svg>"]) + "\n"


def _kind(row: Row) -> int:
    return next(number for number, (_, _, is_one) in enumerate(KINDS) if is_one(row))


def _legend(points: Sequence[tuple[float, float, int, bool]]) -> list[str]:
    """The kinds that occur with their number of rows, and what the hollow ones are."""
    lines = [(KINDS[kind][0], KINDS[kind][1], kind) for kind in sorted({kind for _, _, kind, _ in points})]
    found = []
    for number, (name, colour, kind) in enumerate(lines):
        y, count = MARGIN + 20 + 18 * number, sum(kind == other for _, _, other, _ in points)
        found.append(f'<circle cx="{MARGIN + 14}" cy="{y - 4}" r="4" fill="{colour}"/>')
        found.append(f'<text x="{MARGIN + 26}" y="{y}">{escape(name)} ({count})</text>')
    if any(hollow for *_, hollow in points):
        y = MARGIN + 20 + 18 * len(lines)
        found.append(f'<circle cx="{MARGIN + 14}" cy="{y - 4}" r="4" fill="none" stroke="{INK}"/>')
        found.append(f'<text x="{MARGIN + 26}" y="{y}">hollow: flukes, and runs that slept</text>')
    return found
