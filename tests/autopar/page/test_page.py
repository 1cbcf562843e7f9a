"""The page: its numbers against the terminal report's, its drawings against the prediction, its text escaped."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.compiled import CompiledProgram
from autopar.costs.cost_table import unit_costs
from autopar.costs.evaluate import statement_costs
from autopar.costs.memory_timeline import memory_over_time
from autopar.errors import OutputError, PlanError
from autopar.models.loading import load_model
from autopar.page import page_text
from autopar.page.headline import headline
from autopar.page.markup import Markup, element
from autopar.page.mesh_diagram import places_of
from autopar.page.plans import Point, pareto_front, plans_section
from autopar.page.run_log import read_log
from autopar.page.what_if import outcomes
from autopar.planning.predict import priced_decisions
from autopar.report.costs import RunnerUp, tie_words
from autopar.report.facts import facts_of
from autopar.report.terminal import render_report
from autopar.report.timeline import simulation_of
from autopar.units import bytes_text, count_text, seconds_text
from benchmarks.faults.names import Blocks, Chain2
from cost_models.machine import Cluster
from tests.autopar.requests import hostless

SIZES = {"layers": 4, "width": 256, "num_heads": 4, "seq_len": 32, "batch_size": 8, "vocab_size": 512}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one stage": ("llama", "4 h100-sxm", {"dp": 2, "tp": 2}),
    "pipeline": ("gpt2", "4 a100-80g", {"pp": 2, "dp": 1, "tp": 2, "micro_batches": 4, "schedule": "zero-bubble"}),
}
VOID = {"meta", "br", "hr"}


def compiled(name: str, cluster: str, constraints: dict[str, Any]) -> CompiledProgram:
    loaded = load_model(f"examples.models:{name}", meta=True, **SIZES)
    return autopar.compile(
        loaded.model,
        hostless(Cluster.parse(cluster)),
        example_inputs=loaded.inputs,
        loss_fn=loaded.loss_fn,
        constraints=constraints,
    )


@cache
def case(name: str) -> CompiledProgram:
    return compiled(*CASES[name])


@pytest.fixture(scope="module", params=CASES)
def program(request: pytest.FixtureRequest) -> CompiledProgram:
    return case(request.param)


@pytest.fixture(scope="module")
def page(program: CompiledProgram) -> str:
    return page_text(program)


class Reader(HTMLParser):
    """Text, and every attribute; that elements close in the order in which they opened."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.num_scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_scripts += tag == "script"
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def words_of(text: str) -> str:
    return " ".join(" ".join(read(text).text).split())


@pytest.mark.slow
def test_numbers_are_those_of_the_terminal_report(program: CompiledProgram, page: str) -> None:
    """Every figure with a unit of the terminal's report is on the page."""
    shown = words_of(page)
    report = program.report()
    figures = set(re.findall(r"\b\d[\d.]*[kMG]? (?:s|ms|us|[KMG]iB|B)\b|\b\d+(?:\.\d)?%", report))
    assert len(figures) > 20
    assert {figure for figure in figures if figure not in shown} == set()
    own = facts_of(program).figures
    for figure in (count_text(own.tokens_per_second), count_text(own.tokens_per_second_per_device)):
        assert figure in shown and figure in report
    assert own.step_seconds == program.plan.prediction.step_seconds


def test_nothing_is_fetched(page: str) -> None:
    reader = read(page)
    assert not [each for each in reader.attributes if each[1] in ("src", "href", "srcset", "data", "action")]
    assert not re.search(r"url\(|@import|@font-face|fetch\(|XMLHttpRequest|<link|<iframe", page)


def test_drawings_have_labels(page: str) -> None:
    reader = read(page)
    by_tag: dict[str, int] = {}
    for tag, name, value in reader.attributes:
        if (name == "aria-hidden" and tag == "svg") or (name == "aria-label" and value):
            by_tag[tag] = by_tag.get(tag, 0) + 1
    assert by_tag["svg"] == page.count("<svg")
    assert re.search('<html lang="en">', page) and "<title>" in page


def test_bars_of_time_fill_the_step(program: CompiledProgram, page: str) -> None:
    exposed = page.partition('aria-label="exposed')[0].rpartition('<div class="bar-row">')[2]
    exposed += page.partition('aria-label="exposed')[2].partition("</div>")[0]
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", exposed)]
    assert len(widths) == sum(bool(row.exposed) for row in facts_of(program).seconds)
    assert sum(widths) == pytest.approx(100, abs=0.01)


def test_memory_over_time_peaks_at_the_prediction(program: CompiledProgram) -> None:
    simulated = simulation_of(program)
    ranks = memory_over_time(simulated)
    for rank, kinds in zip(ranks, simulated.memory, strict=True):
        assert rank.peak_bytes == pytest.approx(sum(kinds.values()), rel=1e-12)
        assert rank.moments[0].start == 0
        assert all(one.end == other.start for one, other in zip(rank.moments, rank.moments[1:], strict=False))
        assert rank.moments[-1].end == pytest.approx(program.plan.prediction.step_seconds)
        assert rank.moments[-1].kept == pytest.approx(0, abs=1e-6)


def test_statements_add_up_to_the_layer(program: CompiledProgram) -> None:
    assert program.request is not None
    best = program.best
    pricer, assignment = priced_decisions(program.request, best, best.plan.stage_meshes[0])
    units = unit_costs(best.graph, best.operators, pricer, assignment)
    found = statement_costs(best.graph, best.operators, pricer, assignment)
    (name,) = (name for name in found if name)
    calls = replace(units[name])
    forward = sum(each.forward for each in found[name])
    assert forward == pytest.approx(calls.forward_seconds, rel=1e-9) and forward > 0
    own = {kind: value for kind, value in calls.backward.items() if kind != "gradient accumulation"}
    synchronised = own.pop("gradient and parameter synchronisation", 0.0)
    assert sum(each.backward for each in found[name]) <= sum(own.values()) + synchronised + 1e-12
    assert sum(each.hidden for each in found[name]) == pytest.approx(calls.overlapped_seconds, rel=1e-9)


def test_places_of_ranks(program: CompiledProgram, page: str) -> None:
    """Ranks on the page, by their title: node by node, with the coordinates that their programs have."""
    places = places_of(program)
    assert [place.rank for place in places] == list(range(4))
    titles = re.findall(r'title="rank (\d+): node (\d+); ([^"]+)"', page)
    assert [int(rank) for rank, _, _ in titles] == list(range(4))
    axes = list(places[0].coordinate)
    last = [place.coordinate[axes[-1]] for place in places]
    assert last == [0, 1, 0, 1]
    assert [place.coordinate[axes[0]] for place in places] == [0, 0, 1, 1]


def test_the_emitted_layer_is_on_the_page(program: CompiledProgram, page: str) -> None:
    block = re.search(r"<pre[^>]*><code>(.*?)</code></pre>", page, re.DOTALL)
    assert block is not None
    text = html.unescape(block[1])
    assert text in program.source and text.startswith("class ") and "def forward" in text


def test_what_ifs_are_priced(program: CompiledProgram) -> None:
    found = {each.words: each for each in outcomes(program)}
    before = facts_of(program).figures.step_seconds
    assert found["bandwidth inside a node x0.5"].seconds > before > found["arithmetic rate x2"].seconds
    doubled = found["batch x2, micro-batches x2"]
    assert doubled.rows == 2 * program.plan.global_batch_size and before < doubled.seconds < 2.1 * before


def test_whether_it_fits_and_what_is_tied_are_said_as_on_a_terminal(given: CompiledProgram) -> None:
    facts = facts_of(given)
    fits = re.search(r"^fits +(.+)$", given.report(), re.MULTILINE)
    assert fits is not None and fits.group(1) in words_of(headline(facts))
    near = RunnerUp("tp3", 1.02 * facts.figures.step_seconds, "", 1.0, is_tied=True)
    for others in ((near,), (replace(near, peak_bytes=None, is_tied=False, is_bound=True),)):
        tied = tie_words(facts.plan, facts.figures.step_seconds, others)
        assert tied and tied in words_of(plans_section(replace(facts, others=others), (), "", False))


def test_pareto_front_by_hand() -> None:
    points = [Point(str(n), *at, "lean") for n, at in enumerate([(1, 9), (2, 5), (3, 5), (2, 6), (4, 1), (1, 9)])]
    assert [point.words for point in pareto_front(points)] == ["0", "1", "4", "5"]


# --- a run's log ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def given() -> CompiledProgram:
    """A program of a plan that was given, beside which no leaner ones are looked for."""
    program = case("one stage")
    inputs = load_model("examples.models:llama", meta=True, **SIZES).inputs
    return autopar.compile(program.model, program.cluster, example_inputs=inputs, plan=program.plan)


def test_log_beside_the_prediction(given: CompiledProgram, tmp_path: Path) -> None:
    program = given
    log = tmp_path / "metrics.jsonl"
    lines = [
        {"step": n, "loss": 4 / n, "step_seconds": 0.5 if n == 1 else 0.25, "peak_bytes": 2**30} for n in (1, 2, 3)
    ]
    lines += [{"step": 3, "loss": None, "mfu": 0.125, "skipped": True, "grad_norm": "inf"}, {"step": 4}]
    log.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 5, "lo')
    steps = read_log(log)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert steps[2].figures == {"mfu": 0.125}
    shown = words_of(page_text(program, log=log))
    predicted = seconds_text(program.plan.prediction.step_seconds)
    assert f"seconds of a step {predicted} 250 ms" in shown
    assert f"peak memory of a rank {bytes_text(program.plan.prediction.peak_bytes)} 1 GiB" in shown
    assert "Steps 1 to 4" in shown


@pytest.mark.parametrize("text", ["", "[1]\n{}\n", "step 1 loss 4\nstep 2\n", '{"loss": 1}\n{"step": 2}\n'])
def test_what_is_no_log_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(OutputError, match="log cannot be read"):
        read_log(path)
    with pytest.raises(OutputError, match="log cannot be read"):
        read_log(tmp_path / "missing")


# --- text of users ----------------------------------------------------------------------------------------------------


HOSTILE = '<img src=x onerror="alert(1)">&\'"</script><script>alert(2)</script>'


def test_names_are_escaped() -> None:
    model = type(HOSTILE, (Blocks,), {})(lambda: Chain2(("</style><b>up", "a&b")), "</code><i>blocks")
    program = autopar.compile(model, "2 cpu", example_inputs={"x": torch.randn(4, 8)})
    reader = read(page_text(program))
    assert not {"img", "i", "b"} & {tag for tag, _, _ in reader.attributes}
    assert reader.num_scripts == 1
    assert not [name for _, name, _ in reader.attributes if name.startswith("on") or name == "src"]
    assert "onerror" in "".join(reader.text) and "blocks" in "".join(reader.text)


def test_elements_escape() -> None:
    made = element("p", "a < b", ["&", Markup("<b>x</b>"), 3, None], class_='"q"', data_x=None, hidden=True)
    assert made == '<p class="&quot;q&quot;" hidden>a &lt; b&amp;<b>x</b>3</p>'


# --- the file ---------------------------------------------------------------------------------------------------------


def test_written_over_its_own_only(given: CompiledProgram, tmp_path: Path) -> None:
    program = given
    path = tmp_path / "report.html"
    assert program.report_html(path) == path
    program.report_html(path)
    path.write_text(path.read_text().replace("Mesh", "Mess"))
    with pytest.raises(OutputError, match="edited since"):
        program.report_html(path)
    program.report_html(path, force=True)
    with pytest.raises(PlanError, match="another process"):
        replace(program, request=None).report_html(path)


def test_large_clusters_are_summarised() -> None:
    program = compiled("llama", "24x8 h100-sxm", {"dp": 2, "ddp": 2, "tp": 8, "pp": 6, "micro_batches": 2})
    page = page_text(program)
    assert page.count('<figure class="node">') <= 16
    assert "one data-parallel replica, 48 ranks on 6 nodes" in words_of(page)
    assert "The cluster has 4 of them, on 24 nodes" in words_of(page)
    assert len(render_report(program, 80).splitlines()) < 90
