"""`autopar fit`: what fits on a cluster, from a machine without it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from autopar.cli.options import Flags, Json, Model, console, read_cluster, read_job
from autopar.cli.output import print_json, working
from autopar.cluster import ClusterSpec
from autopar.compile import Traced, padded_search, planned_alone, request_of, traced_of
from autopar.errors import AutoparError, ConstraintError, InfeasibleError, ModelError
from autopar.explain.fitting import Answer, Fits, Fitted, OnCluster, Planner, Question, fits, fitted_of
from autopar.explain.processes import spare_processes
from autopar.integrations.job import Job, parse_settings
from autopar.planning.layer_pool import LayerPool
from autopar.planning.planner import POLISH_ONLY, SearchResult, fits_soon
from autopar.planning.request import Request
from autopar.report.json_facts import record_json
from autopar.report.tables import table_of
from autopar.settings.compile_options import CompileOptions
from autopar.units import bytes_text, count_text, fit_text, seconds_text

FITS = {"yes": "fits", "no": "does not fit", "within the error": "within the error"}
"""The verdict on a cluster, by `Certainty.fit`."""
KEPT_LENGTHS = 8
"""Sequence lengths at which models and their traces are kept, none of which has memory of its own."""


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
    seconds: Annotated[float, typer.Option(help="after which no further plan is looked for")] = 60.0,
    as_json: Json = False,
) -> None:
    """Will it fit, with which longest sequence, largest batch and fewest GPUs, and where is it cheapest."""
    prices = parse_settings(price or (), "--price")
    clusters = [read_cluster(text, flags.processes, model) for text in cluster]
    asking = _Planner(model, flags, clusters[0].num_devices)
    seq_len, no_seq = asking.sequence()
    with working("planning for " + ", ".join(map(str, clusters))):
        found = fits(
            asking,
            clusters,
            seq_len=seq_len,
            longest=asking.longest(),
            no_seq=no_seq,
            prices=prices,
            seconds=seconds,
            processes=spare_processes(),
        )
    if as_json:
        print_json(record_json("fit", found))
    else:
        for part in _panels(found):
            console().print(part)
    if all(on.asked.found is None for on in found.clusters):
        raise typer.Exit(1)


class _Planner(Planner):
    """Plans questions about the model of a command line. The rows of the first cluster are those of all."""

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
        """Tokens of a row as asked, and why others cannot be asked about."""
        try:
            length = self.job.seq_len
        except ModelError:
            return None, "the model takes no token numbers"
        try:
            other = self.job_at(length).seq_len
        except AutoparError:
            return length, "the factory takes no seq_len"
        return length, "" if other == length else "the factory makes a batch of its own length"

    def longest(self) -> int | None:
        """Tokens that the model's configuration allows, where it has one."""
        config: Any = getattr(self.job.model, "config", None)
        found = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        return found if isinstance(found, int) else None

    def __call__(self, question: Question) -> Fitted:
        job, asked = self._asked(question)
        traced, is_own = self.traced_at(question.seq_len), question == Question(question.cluster)

        def search(request: Request) -> SearchResult:
            """The plan of `plan` for the job itself; of others the exact search only polishes what it need not find."""
            if not is_own:
                with contextlib.suppress(InfeasibleError):
                    return padded_search(request, self.pool, POLISH_ONLY)
            return padded_search(request, self.pool)

        planned = planned_alone(job.model, question.cluster, asked, search, traced)
        return fitted_of(planned.request, planned.best, _seq_len(job))

    def fits_soon(self, question: Question) -> bool:
        """See `Planner`."""
        job, asked = self._asked(question)
        request = request_of(job.model, question.cluster, asked, self.traced_at(question.seq_len))
        return fits_soon(request, self.pool)

    def _asked(self, question: Question) -> tuple[Job, CompileOptions]:
        length = question.seq_len or self.flags.seq
        job = self.job if question.seq_len is None else self.job_at(length)
        options = dict(self.options)
        options["global_batch_size"] = question.rows or self.flags.batch or self.job.batch_size
        if question.in_one:
            given: Mapping[str, Any] = options.get("constraints") or {}
            if given.get("micro_batches", 1) != 1:
                raise ConstraintError("the number of micro-batches is pinned")
            options["constraints"] = {**given, "micro_batches": 1}
        return job, CompileOptions(example_inputs=job.inputs, loss_fn=job.loss_fn, **options)

    def _traced_at(self, seq_len: int | None) -> Traced:
        job, asked = self._asked(Question(ClusterSpec.parse("1 cpu"), seq_len=seq_len))
        return traced_of(job.model, asked)


def _seq_len(job: Job) -> int | None:
    try:
        return job.seq_len
    except ModelError:
        return None


def _panels(found: Fits) -> Iterator[RenderableType]:
    for on in found.clusters:
        yield from _of_cluster(on)
    if found.cheapest is not None and len(found.clusters) > 1:
        yield Text(f"Cheapest: {found.cheapest}", style="bold")


def _of_cluster(on: OnCluster) -> Iterator[RenderableType]:
    found = on.asked.found
    if found is None:
        needed = "" if on.needed_bytes is None else f"; {bytes_text(on.needed_bytes)} per rank would do"
        yield Text(
            f"{on.cluster}: {FITS[on.needed.fit if on.needed else 'no']} ({on.asked.words}{needed})", style="bold"
        )
        if on.needed is not None and on.needed.fit != "no":
            yield Text(f"  the leanest plan: {fit_text(on.needed)}")
    else:
        free = max(found.capacity_bytes - found.peak_bytes, 0)
        verdict, capacity = FITS[found.certainty.fit], bytes_text(found.capacity_bytes)
        yield Text(f"{on.cluster}: {verdict}, {bytes_text(free)} of {capacity} free", style="bold")
        yield Text(f"  as asked: {fit_text(found.certainty)}")
    table = table_of(
        "",
        ("question", 17),
        ("answer", 14),
        ("step", 8, "right"),
        ("tokens/s", 8, "right"),
        ("peak", 9, "right"),
    )
    notes = []
    for name, answer, value in _answers(on):
        if answer.found is not None:
            each = answer.found
            rate = count_text(each.tokens_per_second) if each.tokens else "-"
            table.add_row(name, value, seconds_text(each.step_seconds), rate, bytes_text(each.peak_bytes))
            is_sure = each.certainty.fit == "yes" or name == "as asked"
            notes.append(f"{name}: {each.plan}" + ("" if is_sure else f"; {each.certainty.fit}"))
        if answer.words and name != "as asked":
            refused = f" at {answer.refused}" if answer.refused is not None else ""
            notes.append(f"{name}{refused}: {answer.words}")
    if table.row_count:
        yield table
    for note in notes:
        yield Text(f"  - {note}")
    if on.dollars is not None:
        per = on.dollars_per_million_tokens
        yield Text(f"  ${on.dollars:.4g} a step" + ("" if per is None else f", ${per:.4g} per million tokens"))
    yield Text("")


def _answers(on: OnCluster) -> Iterator[tuple[str, Answer, str]]:
    """Name, answer and its number in words."""

    def of(answer: Answer, words: str, name: str) -> str:
        return "" if answer.found is None else f"{getattr(answer.found, name)} {words}"

    yield "as asked", on.asked, of(on.asked, "rows", "rows")
    yield "longest sequence", on.longest, of(on.longest, "tokens", "seq_len")
    yield "largest batch", on.largest, of(on.largest, "rows", "rows")
    yield "in 1 micro-batch", on.in_one, of(on.in_one, "rows", "rows")
    yield "fewest devices", on.fewest, of(on.fewest, "devices", "num_devices")
