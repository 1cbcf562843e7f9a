"""What fits: the plan of a job, its longest sequence, its largest batch, its fewest devices, and its cheapest cluster.

Every answer is a plan that the planner found for exactly that question, never an extrapolation. Memory grows with rows
and tokens, so the largest number is bracketed by doubling and then bisected; what a bisection assumes, that less fits
where more does, holds of memory but not of every divisor, which is why rows go in steps that the devices divide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from autopar.errors import AutoparError, ClusterError, ConstraintError, InfeasibleError
from autopar.explain.processes import answers
from autopar.options.assignment import Candidate
from autopar.planning.request import Request
from autopar.report.figures import tokens_of
from autopar.report.plan_words import full_words
from cost_models.certainty import Certainty
from cost_models.machine import Cluster
from cost_models.mixed import AnyCluster

LONGEST_TRIED = 2**20
"""Tokens per row beyond which no model without a limit of its own is asked about."""
SHORTEST_TRIED = 8
MOST_TIMES = 64
"""Times the given rows up to which a larger batch is looked for: micro-batches make nearly any batch fit."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request to the planner. rows: of the batch, None for the job's own. seq_len: None for the job's own.
    in_one: the batch may not be cut into micro-batches."""

    cluster: AnyCluster
    rows: int | None = None
    seq_len: int | None = None
    in_one: bool = False


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan that was found. Seconds and tokens are of one step over all ranks, bytes of the fullest rank; tokens is 0
    for a model that takes none. certainty: how sure the peak is, and so whether it fits."""

    cluster: str
    num_devices: int
    rows: int
    seq_len: int | None
    plan: str
    step_seconds: float
    tokens: int
    tokens_per_second: float
    peak_bytes: float
    capacity_bytes: float
    certainty: Certainty


@dataclass(frozen=True, slots=True)
class Answer:
    """found: the best plan of the question, None where none is known. refused: the nearest number that was tried
    without success. words: why it ends there, or why there is no answer."""

    found: Fitted | None = None
    refused: int | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class OnCluster:
    """The answers for one cluster. needed_bytes: a budget that would be enough where the job does not fit; needed: how
    sure that is. dollars: of
    one step; dollars_per_million_tokens: None for models without tokens, both None without a price."""

    cluster: str
    asked: Answer
    needed_bytes: int | None
    needed: Certainty | None
    longest: Answer
    largest: Answer
    in_one: Answer
    fewest: Answer
    dollars: float | None = None
    dollars_per_million_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Fits:
    """All answers, and the text of the cheapest cluster on which the job fits; None without prices."""

    clusters: tuple[OnCluster, ...]
    cheapest: str | None


class Planner(Protocol):
    """Plans questions."""

    def __call__(self, question: Question) -> Fitted:
        """The best plan. Raises InfeasibleError where nothing fits, another AutoparError where that cannot be asked."""

    def fits_soon(self, question: Question) -> bool:
        """Whether it is found out, without looking for the best plan, that one fits; raises as a call does."""
        return False


def fitted_of(request: Request, best: Candidate, seq_len: int | None) -> Fitted:
    """The figures of a plan that was found for a request."""
    plan = best.plan
    seconds = plan.prediction.step_seconds
    tokens = plan.num_micro_batches * tokens_of(best.graph)
    return Fitted(
        cluster=str(request.whole),
        num_devices=request.whole.num_devices,
        rows=plan.global_batch_size,
        seq_len=seq_len,
        plan=full_words(plan),
        step_seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        peak_bytes=plan.prediction.peak_bytes,
        capacity_bytes=float(request.capacity_bytes(plan.fullest_group)),
        certainty=request.certainty(plan.prediction.num_bytes, plan.fullest_group),
    )


def fits(
    planner: Planner,
    clusters: Sequence[AnyCluster],
    *,
    seq_len: int | None = None,
    longest: int | None = None,
    no_seq: str = "",
    prices: Mapping[str, float] | None = None,
    seconds: float = math.inf,
    processes: int = 1,
) -> Fits:
    """Answers for every cluster.

    seq_len: tokens of a row as asked. longest: tokens that the model takes at most, where it says so. no_seq: why
    sequences of other lengths cannot be asked about. prices: dollars per device and hour by the device's name. seconds:
    after which no further question is asked; the first one of every cluster always is. processes: in so many a
    cluster's questions are answered; more than one are forked, which is safe where no other thread holds what they
    need. Raises ClusterError for a device without a price where there are prices, ConstraintError for a price below
    zero.
    """
    hourly = [dollars_per_hour(cluster, prices) for cluster in clusters]
    end = time.monotonic() + seconds
    asking = _Asking(planner, end)
    firsts = [asking.first(Question(cluster)) for cluster in clusters]
    found = []
    for number, (cluster, price, (first, error)) in enumerate(zip(clusters, hourly, firsts, strict=True)):
        now = time.monotonic()
        asking.limit = now + (end - now) / (len(clusters) - number)  # what is left is shared by the clusters left
        in_one, fewest, longest_one, largest = asking.others(cluster, first, seq_len, longest, no_seq, processes)
        on = OnCluster(
            cluster=str(cluster),
            asked=first,
            needed_bytes=error.needed_bytes if error else None,
            needed=error.certainty if error else None,
            longest=longest_one,
            largest=largest,
            in_one=in_one,
            fewest=fewest,
        )
        found.append(_priced(on, price))
    return Fits(tuple(found), _cheapest(found))


@dataclass
class _Asking:
    """Asks the planner until the time is up, never the same twice."""

    planner: Planner
    limit: float
    known: dict[Question, Fitted | AutoparError] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.limit

    def ask(self, question: Question) -> Fitted | AutoparError:
        if question not in self.known:
            try:
                self.known[question] = self.planner(question)
            except AutoparError as error:
                self.known[question] = error
        return self.known[question]

    def refusal(self, question: Question) -> AutoparError | None:
        """Why the question has no plan, or None where it has one, which need not be the best."""
        found = None if self.fits_soon(question) else self.ask(question)
        return found if isinstance(found, AutoparError) else None

    def fits_soon(self, question: Question) -> bool:
        """Whether the question is known to have a plan, or that is soon found out."""
        if question in self.known:
            return isinstance(self.known[question], Fitted)
        try:
            return not self.is_over and self.planner.fits_soon(question)
        except AutoparError:
            return False

    def first(self, question: Question) -> tuple[Answer, InfeasibleError | None]:
        """The job as asked, and the error that says what it needs. Raises what is wrong with it other than memory."""
        found = self.ask(question)
        if isinstance(found, Fitted):
            return Answer(found), None
        if not isinstance(found, InfeasibleError):
            raise found
        return Answer(words=found.constraint), found

    def others(
        self,
        cluster: AnyCluster,
        first: Answer,
        seq_len: int | None,
        longest: int | None,
        no_seq: str,
        processes: int,
    ) -> list[Answer]:
        """In one micro-batch, the fewest devices, the longest sequence and the largest batch: what takes longest first.
        longest, no_seq, processes: as `fits` takes them."""
        base, rows = Question(cluster), first.found.rows if first.found else None
        asks = [
            partial(self.largest, replace(base, in_one=True), first),
            partial(self.fewest, replace(base, rows=rows), first),
            partial(Answer, words=no_seq)
            if no_seq or seq_len is None
            else partial(self.longest, replace(base, seq_len=seq_len), first, longest),
            partial(self.largest, base, first),
        ]
        return answers(lambda number: asks[number](), len(asks), processes)

    def longest(self, base: Question, first: Answer, most: int | None) -> Answer:
        """The longest row among powers of two, the halves between them, and the model's own limit."""
        assert base.seq_len is not None
        tried = lengths(base.seq_len, most or LONGEST_TRIED)
        return self._last(
            [replace(base, seq_len=length) for length in tried],
            tried,
            tried.index(base.seq_len),
            first,
            f"the model's positions end at {most}" if most else f"longer ones than {LONGEST_TRIED} are not tried",
        )

    def largest(self, base: Question, first: Answer) -> Answer:
        """The largest batch in steps that the devices divide, up to MOST_TIMES the given one."""
        if first.found is None:
            return Answer(words="the job as asked does not fit")
        rows = first.found.rows
        step = math.gcd(rows, base.cluster.num_devices)
        tried = list(range(step, MOST_TIMES * rows + 1, step))
        known = Answer() if base.in_one else first
        return self._last(
            [replace(base, rows=count) for count in tried],
            tried,
            tried.index(rows),
            known,
            f"more than {MOST_TIMES} times the given rows are not tried: micro-batches take little more memory",
        )

    def _last(self, asked: Sequence[Question], numbers: Sequence[int], start: int, first: Answer, end: str) -> Answer:
        """The last question that fits of a list that gets harder. start: where the search begins. Only that one is
        planned for its best plan. What is soon found to fit is not asked otherwise."""
        low, best = -1, first.found
        high, width = len(asked), 1
        at, error = start, None
        if best is not None:
            low, at = start, start + 1
        while low + 1 < high and not self.is_over:
            soon = self._last_soon(asked, low, high) if low >= 0 else low
            if soon > low:
                low, best, at = soon, None, soon + 1
            if at < high:
                refused = self.refusal(asked[at])
                if refused is None:
                    low, best = at, None
                else:
                    high, error = at, refused
            width *= 2
            if high == len(asked):
                at = min(low + width, high - 1)
            elif low == -1:
                at = max(high - width, 0)
            else:
                at = (low + high) // 2
        words = end if high == len(asked) else _refusal(error)
        if low + 1 < high:
            words = "the time was up: more may fit"
        if low >= 0 and best is None:
            found = self.ask(asked[low])
            best = found if isinstance(found, Fitted) else None
        return Answer(best, numbers[high] if high < len(asked) else None, words)

    def _last_soon(self, asked: Sequence[Question], low: int, high: int) -> int:
        """The last question before `high` that is soon found to fit, `low` if none is: the last of all, or in steps
        that double as long as they fit, and then between the last two."""
        if high == len(asked) and self.fits_soon(asked[-1]):
            return high - 1
        width = 1
        while low + width < high and self.fits_soon(asked[low + width]):
            low, width = low + width, 2 * width
        high = min(low + width, high)
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits_soon(asked[middle]) else (low, middle)
        return low

    def fewest(self, base: Question, first: Answer) -> Answer:
        """Half the nodes as long as they fit, then half the devices of the node."""
        cluster = base.cluster
        if not isinstance(cluster, Cluster):
            return Answer(words="unlike groups of nodes have no half")
        if first.found is None:
            return Answer(words="the job as asked does not fit")
        fitting, refused, words = base, None, ""
        for smaller in halves(cluster):
            question = replace(base, cluster=smaller)
            error = None if self.is_over else self.refusal(question)
            if self.is_over or error is not None:
                refused = smaller.num_devices
                words = _refusal(error) or "the time was up: fewer may do"
                break
            fitting = question
        best = first.found if fitting == base else self.ask(fitting)
        return Answer(best if isinstance(best, Fitted) else None, refused, words)


def lengths(given: int, most: int) -> list[int]:
    """Powers of two, the halves between, `given` and `most`, ascending."""
    powers = [2**power for power in range(most.bit_length())]
    between = [power + power // 2 for power in powers[1:]]
    return sorted({n for n in (*powers, *between) if SHORTEST_TRIED <= n <= most} | {given, most})


def halves(cluster: Cluster) -> list[Cluster]:
    """The cluster with half the nodes, again and again while they are even, and then half the devices of a node."""
    found = []
    while cluster.num_devices > 1:
        if cluster.num_nodes > 1:
            cluster = replace(cluster, num_nodes=cluster.num_nodes // 2)
        else:
            cluster = replace(cluster, devices_per_node=cluster.devices_per_node // 2)
        found.append(cluster)
    return found


def dollars_per_hour(cluster: AnyCluster, prices: Mapping[str, float] | None) -> float | None:
    """Of all devices together; None without prices. Raises ClusterError and ConstraintError."""
    if not prices:
        return None
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < math.inf:
            raise ConstraintError("a price is dollars per device and hour", values=f"{name}={price!r}")
    missing = [group.device.name for group in cluster.groups if group.device.name not in prices]
    if missing:
        raise ClusterError(
            "a device has no price", values=", ".join(missing), alternatives=f'--price "{missing[0]}=2.5"'
        )
    return sum(group.num_devices * prices[group.device.name] for group in cluster.groups)


def _refusal(error: AutoparError | None) -> str:
    if error is None:
        return ""
    return "more does not fit the memory" if isinstance(error, InfeasibleError) else error.constraint


def _priced(on: OnCluster, hourly: float | None) -> OnCluster:
    found = on.asked.found
    if hourly is None or found is None:
        return on
    dollars = hourly * found.step_seconds / 3600
    return replace(
        on, dollars=dollars, dollars_per_million_tokens=dollars / found.tokens * 1e6 if found.tokens else None
    )


def _cheapest(found: Sequence[OnCluster]) -> str | None:
    """By the dollars of a row, which are those of a token: clusters may take different numbers of rows."""
    priced = [
        (on.dollars / on.asked.found.rows, on.cluster) for on in found if on.dollars is not None and on.asked.found
    ]
    return min(priced)[1] if priced else None
