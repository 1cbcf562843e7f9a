"""A run's log beside the prediction: one JSON object per step, as training writes it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import OutputError
from autopar.files.text_files import parse_json
from autopar.page.markup import Child, Markup, element, legend, section, table
from autopar.report.facts import Facts
from autopar.report.tables import percent
from autopar.units import bytes_text, count_text, seconds_text

FIELDS = (
    "loss",
    "grad_norm",
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "peak_bytes",
    "learning_rate",
)
LARGEST = 1e100
"""Larger numbers are ignored, as their sums and differences would not be finite."""
MOST_POINTS = 600
"""Points of a curve; a longer run shows means."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step of a run: its number, and the figures that the log has."""

    step: int
    figures: dict[str, float]


def read_log(path: str | Path) -> tuple[LoggedStep, ...]:
    """Read the steps of a log.

    Missing keys, null, and values other than numbers up to LARGEST are ignored. A step that was repeated after a
    restart counts once, with its last values. Raises OutputError for a file that is no such log.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:  # not UTF-8, or a null character in the name
        raise _no_log(str(path), getattr(error, "strerror", None) or str(error)) from None
    steps: dict[int, LoggedStep] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError as error:
            if number == len(lines):  # the run still writes, or was cut off
                continue
            raise _no_log(f"{path}, line {number}", str(error)) from None
        if not isinstance(entry, dict) or not _is_number(entry.get("step")):
            raise _no_log(f"{path}, line {number}", "not an object with a number `step`")
        step = int(entry["step"])
        steps[step] = LoggedStep(step, {key: float(entry[key]) for key in FIELDS if _is_number(entry.get(key))})
    if not steps:
        raise _no_log(str(path), "the file has no steps")
    return tuple(steps[step] for step in sorted(steps))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _no_log(place: str, problem: str) -> OutputError:
    form = 'a file of lines such as {"step": 1, "loss": 4.2, "step_seconds": 0.5}, as training writes it'
    return OutputError("the run's log cannot be read", values=f"{place}: {problem}", alternatives=form)


def run_section(facts: Facts, steps: Sequence[LoggedStep]) -> Markup:
    """Return measured beside predicted figures, and the curves of loss, step time and memory."""
    rows: list[list[Child]] = []
    for words, key, predicted, text in _compared(facts):
        values = [step.figures[key] for step in steps if key in step.figures]
        if values:
            measured = max(values) if key == "peak_bytes" else statistics.median(_settled(values))
            ratio = f"{measured / predicted:.2f}" if predicted else ""
            rows.append([words, text(predicted) if predicted else "", text(measured), ratio])
    curves = [
        _curve(steps, "loss", "Loss", lambda value: f"{value:.4g}", None),
        _curve(steps, "step_seconds", "Seconds of a step", seconds_text, facts.figures.step_seconds),
        _curve(steps, "peak_bytes", "Peak memory of a rank", bytes_text, facts.figures.peak_bytes),
    ]
    first, last = steps[0].step, steps[-1].step
    headers = ("", "predicted", "measured", "ratio")
    words = f"Steps {first} to {last} of a run. Times are medians without the first step; memory is the maximum."
    compared = table(headers, rows, "Predicted beside measured", 3) if rows else None
    return section("Predicted beside measured", compared, element("div", curves, class_="curves"), intro=words)


def _settled(values: list[float]) -> list[float]:
    """Return the values without the first step, which compiles and warms up."""
    return values[1:] or values


def _compared(facts: Facts) -> list[tuple[str, str, float, Callable[[float], str]]]:
    """Return (words, key of the log, predicted figure, formatting function) of each row."""
    figures = facts.figures
    return [
        ("seconds of a step", "step_seconds", figures.step_seconds, seconds_text),
        ("tokens/s", "tokens_per_second", figures.tokens_per_second, count_text),
        ("MFU", "mfu", figures.mfu, lambda value: percent(value, 1.0)),
        ("peak memory of a rank", "peak_bytes", figures.peak_bytes, bytes_text),
    ]


def _curve(
    steps: Sequence[LoggedStep], key: str, title: str, text: Callable[[float], str], predicted: float | None
) -> Markup | None:
    """Draw a line over steps, with a dashed line for the prediction; None for a log with fewer than two values."""
    logged = [(step.step, step.figures[key]) for step in steps if key in step.figures]
    if len(logged) < 2:
        return None
    points = _thinned(logged)
    values = [value for _, value in points] + ([predicted] if predicted else [])
    least, most = min(values), max(values)
    room = 0.06 * (most - least) or 0.05 * abs(most) or 1.0
    bottom, top = least - room, most + room
    first, last = logged[0][0], logged[-1][0]

    def height(value: float) -> float:
        return 100 - 100 * (value - bottom) / (top - bottom)

    line = " ".join(f"{100 * (step - first) / (last - first):.2f},{height(value):.2f}" for step, value in points)
    shapes = [element("polyline", points=line, class_="measured")]
    if predicted:
        level = f"{height(predicted):.2f}"
        shapes.append(element("line", x1="0", x2="100", y1=level, y2=level, class_="predicted"))
    words = f"{title}: {text(logged[0][1])} at step {first}, {text(logged[-1][1])} at step {last}"
    words += f"; predicted {text(predicted)}" if predicted else ""
    plot = element(
        "svg", shapes, viewBox="0 0 100 100", preserveAspectRatio="none", role="img", aria_label=words, class_="curve"
    )
    ticks = [
        element("span", text(value), class_="y", style=f"bottom:{100 - height(value):.1f}%") for value in (least, most)
    ]
    ticks += [
        element("span", f"step {first}", class_="x", style="left:0%"),
        element("span", f"step {last}", class_="x", style="left:100%"),
    ]
    parts = [("c0", "measured"), *([("c1", "predicted")] if predicted else [])]
    caption = element("figcaption", element("b", title), legend(parts))
    return element("figure", caption, element("div", plot, ticks, class_="plot small"), class_="chart")


def _thinned(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    """Return at most MOST_POINTS points, each the mean of consecutive steps."""
    width = math.ceil(len(points) / MOST_POINTS)
    runs = [points[first : first + width] for first in range(0, len(points), width)]
    return [(statistics.fmean(s for s, _ in run), statistics.fmean(v for _, v in run)) for run in runs]
