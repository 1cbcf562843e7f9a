"""The whole page, and its file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from autopar.errors import PlanError
from autopar.files.outputs import write_output
from autopar.page.gantt import gantt_section
from autopar.page.headline import headline, time_section
from autopar.page.layer_diagram import layer_section
from autopar.page.markup import Child, Markup, details, element, section, table
from autopar.page.memory import memory_section
from autopar.page.mesh_diagram import mesh_section
from autopar.page.plans import plans_section
from autopar.page.run_log import read_log, run_section
from autopar.page.what_if import Outcome, lean_plans, limits_words, outcomes
from autopar.program import GeneratedProgram
from autopar.report.facts import Facts, ScopeFacts, facts_of
from autopar.report.tables import percent
from autopar.report.timeline import simulation_of
from autopar.units import count_text, seconds_text
from codegen.program import Program

LEAST_CHANGE = 0.005
"""Changes of speed from this share on are colored."""


def write_page(
    compiled: GeneratedProgram, path: str | Path, *, log: str | Path | None = None, force: bool = False
) -> Path:
    """Write the report as one HTML page that works offline. Returns the path.

    log: the log of a run, one JSON object per line and step (`step`, `loss`, `step_seconds`, `tokens_per_second`,
    `mfu`, `peak_bytes`, ...), to show beside the prediction. force: replace a file that autopar did not write. The
    search for leaner plans and the what-ifs take some seconds. Raises OutputError if the page cannot be written or
    the log cannot be read, PlanError for a program without its request.
    """
    return write_output(path, page_text(compiled, log=log), force)


def page_text(compiled: GeneratedProgram, *, log: str | Path | None = None) -> str:
    """Return the page's HTML, as `write_page` writes it."""
    if compiled.request is None:
        raise PlanError(
            "a program of another process has no report page",
            alternatives="call it in the process that called autopar.compile",
        )
    steps = read_log(log) if log is not None else ()
    facts, simulated = facts_of(compiled), simulation_of(compiled)
    lean, is_cut = lean_plans(compiled)
    body = [
        headline(facts),
        element(
            "main",
            run_section(facts, steps) if steps else None,
            mesh_section(compiled),
            time_section(facts),
            memory_section(facts, simulated),
            gantt_section(facts, simulated),
            layer_section(compiled),
            plans_section(facts, lean, limits_words(compiled.plan), is_cut),
            _what_if(facts, outcomes(compiled)),
            _sharding(facts),
            _source(compiled),
            _notes(facts),
        ),
        element("footer", "Predicted by autopar's cost models. This page works offline."),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{facts.title}: autopar report"),
        element("style", Markup(_resource("page.css"))),
    )
    script = element("script", Markup(_resource("page.js")))
    return f"<!doctype html>\n{element('html', head, element('body', body, script), lang='en')}\n"


def _resource(name: str) -> str:
    """Return the text of a file of this package."""
    return resources.files("autopar.page").joinpath(name).read_text(encoding="utf-8")


def _what_if(facts: Facts, changed: Sequence[Outcome]) -> Markup | None:
    """Return the table of the same plan under changed conditions."""
    if not changed:
        return None
    figures = facts.figures
    before, mfu = figures.rows_per_second, percent(figures.mfu, 1)
    rows: list[list[Child]] = [
        ["today", seconds_text(figures.step_seconds), _rate(figures.rows, figures.step_seconds, facts), "", mfu]
    ]
    for outcome in changed:
        if not outcome.seconds:
            rows.append([outcome.words, element("span", outcome.problem, class_="problem"), "", "", ""])
            continue
        gain = outcome.rows / outcome.seconds / before - 1
        words: Child = [
            outcome.words,
            element("span", f" {outcome.problem}", class_="problem") if outcome.problem else None,
        ]
        kind = "better" if gain > LEAST_CHANGE else "worse" if gain < -LEAST_CHANGE else None
        change = element("span", f"{gain:+.1%}", class_=kind)
        rate = _rate(outcome.rows, outcome.seconds, facts)
        rows.append([words, seconds_text(outcome.seconds), rate, change, percent(outcome.mfu, 1.0)])
    unit = "tokens/s" if figures.tokens else "rows/s"
    headers = ("changed", "one step", unit, "speed", "MFU")
    intro = "The same plan, priced under one change at a time. Another plan may then be faster (autopar explain)."
    return section("What if", table(headers, rows, "What if", 4), intro=intro)


def _rate(rows: int, seconds: float, facts: Facts) -> str:
    """Return tokens per second, or rows per second for a model without tokens."""
    per_row = facts.figures.tokens / facts.figures.rows if facts.figures.tokens else 1
    return count_text(rows * per_row / seconds) if seconds else ""


def _sharding(facts: Facts) -> Markup:
    """Return every layer class as in the terminal's report, folded."""
    return section("All layers", [_scope(scope) for scope in facts.scopes])


def _scope(scope: ScopeFacts) -> Markup:
    parameters: list[list[Child]] = [[row.what, row.how] for row in scope.parameters]
    results: list[list[Child]] = [[row.what, row.how] for row in scope.results]
    sent: list[list[Child]] = [[row.words, row.traffic, row.count] for row in scope.transfers]
    return details(
        scope.title,
        table(("parameters", "placement"), parameters, f"Parameters: {scope.title}") if parameters else None,
        table(("results of", "placement"), results, f"Results: {scope.title}") if results else None,
        table(("communication", "size", "times a step"), sent, f"Communication: {scope.title}", 1)
        if sent
        else element("p", "No communication."),
    )


def _source(compiled: GeneratedProgram) -> Markup | None:
    """Return the emitted class of the most frequent layer."""
    programs: Sequence[Program] = compiled.program.programs
    counts = {layer.name: sum(len(p.paths(layer.name)) for p in programs) for p in programs for layer in p.layers}
    if not counts:
        return None
    name = max(counts, key=lambda layer: counts[layer])
    text = class_source(compiled.source, name)
    summary = f"class {name}, {len(text.splitlines())} lines"
    return section("Emitted program", details(summary, element("pre", element("code", text), tabindex="0")))


def class_source(source: str, name: str) -> str:
    """Return the text of a class in a generated file, or in the first of several files that has it."""
    lines = source.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith((f"class {name}(", f"class {name}:"))), 0)
    ends = (n for n in range(first + 1, len(lines)) if lines[n].strip() and not lines[n].startswith((" ", ")")))
    return "\n".join(lines[first : next(ends, len(lines))]).rstrip()


def _notes(facts: Facts) -> Markup | None:
    if not facts.notes:
        return None
    return section("Notes", element("ul", [element("li", note) for note in facts.notes]))
