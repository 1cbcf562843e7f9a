"""`autopar fit`: find out whether a job fits a cluster, without the cluster."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from autopar.cli.options import Flags, Json, Model, read_cluster, read_job
from autopar.cli.output import print_json, show, working
from autopar.cluster import ClusterSpec
from autopar.compile import planned_alone
from autopar.errors import AutoparError, ConstraintError, InfeasibleError, ModelError
from autopar.explain.job_fit import Answer, Fits, Fitted, OnCluster, Planner, Question, fits, fitted_of
from autopar.explain.processes import spare_processes
from autopar.models.job import Job, parse_settings
from autopar.planning.layer_pool import LayerPool
from autopar.planning.make_request import request_of
from autopar.planning.planner import POLISH_ONLY, SearchResult, fits_soon, padded_search
from autopar.planning.request import Request
from autopar.planning.traced_model import TracedModel, traced_of
from autopar.report.json_facts import record_json
from autopar.report.tables import bullet, table_of
from autopar.settings.compile_options import CompileOptions
from autopar.units import bytes_text, count_text, counted, fit_text, seconds_text

FITS = {"yes": "fits", "no": "does not fit", "within the error": "within the error"}
"""Words for the verdict on a cluster, by `Certainty.fit`."""
KEPT_LENGTHS = 8
"""Cached sequence lengths; their models and traces are on meta and take no memory."""


def fit(
    model: Model,
    cluster: Annotated[
        list[str], typer.Option("--cluster", help='"4x8 h100-sxm" or a TOML file; may be repeated', show_default=False)
    ],
    flags: Flags,
    price: Annotated[
        list[str] | None,
        typer.Option("--price", help='dollars per GPU and hour: "h100-sxm=2.5"; may be repeated', metavar="NAME=VALUE"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="time limit; the answers so far are printed after it")] = 60.0,
    as_json: Json = False,
) -> None:
    """Find out whether a job fits, its longest sequence, largest batch, fewest GPUs and cheapest cluster."""
    prices = parse_settings(price or (), "--price")
    clusters = [read_cluster(text, flags.processes, model) for text in cluster]
    planner = _Planner(model, flags, clusters[0].num_devices)
    seq_len, no_seq = planner.sequence()
    with working("planning for " + ", ".join(map(str, clusters))):
        answers = fits(
            planner,
            clusters,
            seq_len=seq_len,
            longest=planner.longest(),
            no_seq=no_seq,
            prices=prices,
            seconds=seconds,
            processes=spare_processes(),
        )
    if as_json:
        print_json(record_json("fit", answers))
    else:
        for part in _panels(answers):
            show(part)
    if all(cluster_answers.asked.found is None for cluster_answers in answers.clusters):
        raise typer.Exit(1)


class _Planner(Planner):
    """Plans questions about the model of a command line. All clusters get the rows of the first."""

    def __init__(self, model: str, flags: Flags, num_devices: int) -> None:
        self.model, self.flags, self.num_devices = model, flags, num_devices
        self.options = flags.plan_options()
        self.job_at = functools.lru_cache(maxsize=KEPT_LENGTHS)(self._job_at)
        self.traced_at = functools.lru_cache(maxsize=KEPT_LENGTHS)(self._traced_at)
        self.pool = LayerPool()
        self.job: Job = self.job_at(flags.seq)

    def _job_at(self, seq_len: int | None) -> Job:
        return read_job(self.model, self.num_devices, replace(self.flags, seq=seq_len), meta=True)

    def sequence(self) -> tuple[int | None, str]:
        """Return the tokens of a row, and the reason why other lengths cannot be planned, or ""."""
        try:
            length = self.job.seq_len
        except ModelError:
            return None, "the model takes no token numbers"
        try:
            other = self.job_at(length).seq_len
        except AutoparError:
            return length, "the factory takes no seq_len"
        return length, "" if other == length else "the factory ignores seq_len"

    def longest(self) -> int | None:
        """Return the most tokens that the model's configuration allows, if it says so."""
        config: Any = getattr(self.job.model, "config", None)
        limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        return limit if isinstance(limit, int) else None

    def __call__(self, question: Question) -> Fitted:
        job, options = self._asked(question)
        traced, is_job = self.traced_at(question.seq_len), question == Question(question.cluster)

        def search(request: Request) -> SearchResult:
            """Search the job itself as `plan` does; for other questions the exact search only polishes."""
            if not is_job:
                with contextlib.suppress(InfeasibleError):
                    return padded_search(request, self.pool, POLISH_ONLY)
            return padded_search(request, self.pool)

        planned = planned_alone(job.model, question.cluster, options, search, traced)
        return fitted_of(planned.request, planned.best, _seq_len(job))

    def fits_soon(self, question: Question) -> bool:
        """See `Planner`."""
        job, options = self._asked(question)
        request = request_of(job.model, question.cluster, options, self.traced_at(question.seq_len))
        return fits_soon(request, self.pool)

    def _asked(self, question: Question) -> tuple[Job, CompileOptions]:
        length = question.seq_len or self.flags.seq
        job = self.job if question.seq_len is None else self.job_at(length)
        options = dict(self.options)
        options["global_batch_size"] = question.rows or self.flags.batch or self.job.batch_size
        if question.in_one:
            pinned: Mapping[str, Any] = options.get("constraints") or {}
            if pinned.get("micro_batches", 1) != 1:
                raise ConstraintError("micro_batches is pinned")
            options["constraints"] = {**pinned, "micro_batches": 1}
        return job, CompileOptions(example_inputs=job.inputs, loss_fn=job.loss_fn, **options)

    def _traced_at(self, seq_len: int | None) -> TracedModel:
        job, options = self._asked(Question(ClusterSpec.parse("1 cpu"), seq_len=seq_len))
        return traced_of(job.model, options)


def _seq_len(job: Job) -> int | None:
    try:
        return job.seq_len
    except ModelError:
        return None


def _panels(answers: Fits) -> Iterator[RenderableType]:
    for cluster_answers in answers.clusters:
        yield from _of_cluster(cluster_answers)
    if answers.cheapest is not None and len(answers.clusters) > 1:
        yield Text(f"Cheapest: {answers.cheapest}", style="bold")


def _of_cluster(cluster_answers: OnCluster) -> Iterator[RenderableType]:
    best = cluster_answers.asked.found
    if best is None:
        needed = (
            ""
            if cluster_answers.needed_bytes is None
            else f"; {bytes_text(cluster_answers.needed_bytes)} per rank would be enough"
        )
        verdict = FITS[cluster_answers.needed.fit if cluster_answers.needed else "no"]
        reason = f"{cluster_answers.asked.words}{needed}"
        yield Text(f"{cluster_answers.cluster}: {verdict} ({reason})", style="bold")
        if cluster_answers.needed is not None and cluster_answers.needed.fit != "no":
            yield Text(f"  the plan with least memory fits: {fit_text(cluster_answers.needed)}")
    else:
        free = max(best.capacity_bytes - best.peak_bytes, 0)
        verdict, capacity = FITS[best.certainty.fit], bytes_text(best.capacity_bytes)
        yield Text(f"{cluster_answers.cluster}: {verdict}, {bytes_text(free)} of {capacity} free", style="bold")
        yield Text(f"  the job fits: {fit_text(best.certainty)}")
    table = table_of(
        "",
        ("question", 17),
        ("answer", 14),
        ("step", 8, "right"),
        ("tokens/s", 8, "right"),
        ("peak", 9, "right"),
    )
    notes = []
    for name, answer, value in _answers(cluster_answers):
        if answer.found is not None:
            fitted = answer.found
            rate = count_text(fitted.tokens_per_second) if fitted.tokens else "-"
            table.add_row(name, value, seconds_text(fitted.step_seconds), rate, bytes_text(fitted.peak_bytes))
            is_sure = fitted.certainty.fit == "yes" or name == "the job"
            notes.append(f"{name}: {fitted.plan}" + ("" if is_sure else f"; {fitted.certainty.fit}"))
        if answer.words and name != "the job":
            refused = f" at {answer.refused}" if answer.refused is not None else ""
            notes.append(f"{name}{refused}: {answer.words}")
    if table.row_count:
        yield table
    for note in notes:
        yield bullet(note)
    if cluster_answers.dollars is not None:
        per = cluster_answers.dollars_per_million_tokens
        yield Text(
            f"  ${cluster_answers.dollars:.4g} a step" + ("" if per is None else f", ${per:.4g} per million tokens")
        )
    yield Text("")


def _answers(cluster_answers: OnCluster) -> Iterator[tuple[str, Answer, str]]:
    """Yield the name of each question, its answer, and the answer's number in words."""

    def words(answer: Answer, noun: str, field: str) -> str:
        return "" if answer.found is None else counted(getattr(answer.found, field), noun)

    yield "the job", cluster_answers.asked, words(cluster_answers.asked, "row", "rows")
    yield "longest sequence", cluster_answers.longest, words(cluster_answers.longest, "token", "seq_len")
    yield "largest batch", cluster_answers.largest, words(cluster_answers.largest, "row", "rows")
    yield "in 1 micro-batch", cluster_answers.in_one, words(cluster_answers.in_one, "row", "rows")
    yield "fewest devices", cluster_answers.fewest, words(cluster_answers.fewest, "device", "num_devices")
