"""The page as a whole, and its file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from autopar.errors import PlanError
from autopar.files.outputs import write_output
from autopar.page.gantt import gantt_section
from autopar.page.headline import headline
from autopar.page.layer import layer_section
from autopar.page.markup import Child, Markup, details, element, section, table
from autopar.page.memory import memory_section
from autopar.page.mesh import mesh_section
from autopar.page.plans import plans_section
from autopar.page.run_log import read_log, run_section
from autopar.page.step_time import time_section
from autopar.page.what_if import Outcome, lean_plans, limits_words, outcomes
from autopar.program import GeneratedProgram
from autopar.report.facts import Facts, ScopeFacts, facts_of
from autopar.report.tables import percent
from autopar.report.timeline import simulation_of
from autopar.units import count_text, seconds_text
from codegen.program import Program

LEAST_CHANGE = 0.005
"""Share of the speed from which on a change is coloured."""


def write_page(
    compiled: GeneratedProgram, path: str | Path, *, log: str | Path | None = None, force: bool = False
) -> Path:
    """Write the report as one HTML page that needs no network; returns the path.

    log: of a run, a JSON object per line and step (`step`, `loss`, `step_seconds`, `tokens_per_second`, `mfu`,
    `peak_bytes`, ...), to be shown beside the prediction. force: also over a file that autopar did not write.
    Planning again within less memory and pricing what-ifs takes some seconds. Raises OutputError where the page cannot
    be written or the log not be read, PlanError on a program without its request.
    """
    return write_output(path, page_text(compiled, log=log), force)


def page_text(compiled: GeneratedProgram, *, log: str | Path | None = None) -> str:
    """The page's HTML, as `write_page` writes it."""
    if compiled.request is None:
        raise PlanError("the program came from another process, without what it was planned for")
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
        element("footer", "Predicted by autopar's cost models. This page needs no network."),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{facts.title}: autopar report"),
        element("style", Markup(_own("page.css"))),
    )
    script = element("script", Markup(_own("page.js")))
    return f"<!doctype html>\n{element('html', head, element('body', body, script), lang='en')}\n"


def _own(name: str) -> str:
    """A file beside this one."""
    return resources.files("autopar.page").joinpath(name).read_text(encoding="utf-8")


def _what_if(facts: Facts, found: Sequence[Outcome]) -> Markup | None:
    """The same plan under changed conditions."""
    if not found:
        return None
    own = facts.figures
    before = own.rows_per_second
    rows: list[list[Child]] = [
        ["as it is", seconds_text(own.step_seconds), _rate(own.rows, own.step_seconds, facts), "", percent(own.mfu, 1)]
    ]
    for each in found:
        if not each.seconds:
            rows.append([each.words, element("span", each.problem, class_="problem"), "", "", ""])
            continue
        gain = each.rows / each.seconds / before - 1
        words: Child = [each.words, element("span", f" {each.problem}", class_="problem") if each.problem else None]
        kind = "better" if gain > LEAST_CHANGE else "worse" if gain < -LEAST_CHANGE else None
        change = element("span", f"{gain:+.1%}", class_=kind)
        rate = _rate(each.rows, each.seconds, facts)
        rows.append([words, seconds_text(each.seconds), rate, change, percent(each.mfu, 1.0)])
    unit = "tokens/s" if own.tokens else "rows/s"
    headers = ("changed", "one step", unit, "speed", "MFU")
    intro = "The same plan priced under one change at a time; another plan may be better then (autopar explain)."
    return section("What if", table(headers, rows, "What if", 4), intro=intro)


def _rate(rows: int, seconds: float, facts: Facts) -> str:
    """Tokens a second, or rows for a model without tokens."""
    each = facts.figures.tokens / facts.figures.rows if facts.figures.tokens else 1
    return count_text(rows * each / seconds) if seconds else ""


def _sharding(facts: Facts) -> Markup:
    """Every layer class as the terminal's report has it, folded."""
    return section("All layers", [_scope(scope) for scope in facts.scopes])


def _scope(scope: ScopeFacts) -> Markup:
    how: list[list[Child]] = [[row.what, row.how] for row in scope.parameters]
    results: list[list[Child]] = [[row.what, row.how] for row in scope.results]
    sent: list[list[Child]] = [[row.words, row.traffic, row.count] for row in scope.transfers]
    return details(
        scope.title,
        table(("parameters", "how they lie"), how, f"Parameters: {scope.title}") if how else None,
        table(("results of", "how they lie"), results, f"Results: {scope.title}") if results else None,
        table(("what is sent", "each time", "times a step"), sent, f"Sent: {scope.title}", 1)
        if sent
        else element("p", "Nothing is sent."),
    )


def _source(compiled: GeneratedProgram) -> Markup | None:
    """The emitted class of the layer that the model has most of."""
    programs: Sequence[Program] = compiled.program.programs
    counts = {layer.name: sum(len(p.paths(layer.name)) for p in programs) for p in programs for layer in p.layers}
    if not counts:
        return None
    name = max(counts, key=lambda each: counts[each])
    text = class_source(compiled.source, name)
    summary = f"class {name}, {len(text.splitlines())} lines"
    return section("Emitted program", details(summary, element("pre", element("code", text), tabindex="0")))


def class_source(source: str, name: str) -> str:
    """The text of one class of a generated file; of several files, of the first that has it."""
    lines = source.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith((f"class {name}(", f"class {name}:"))), 0)
    ends = (n for n in range(first + 1, len(lines)) if lines[n].strip() and not lines[n].startswith((" ", ")")))
    return "\n".join(lines[first : next(ends, len(lines))]).rstrip()


def _notes(facts: Facts) -> Markup | None:
    if not facts.notes:
        return None
    return section("Notes", element("ul", [element("li", note) for note in facts.notes]))
