"""Does a job fit: its plan, its longest sequence, its largest batch, its fewest devices, and its cheapest cluster.

Every answer is a plan for exactly that question, never an extrapolation. Memory grows with rows and tokens, so the
search brackets the largest number by doubling and then bisects. Bisection assumes that less fits where more does. That
holds for memory but not for every divisor, so batches grow in steps that the devices divide.
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
from autopar.planning.request import Request
from autopar.report.figures import tokens_of
from autopar.report.plan_words import full_words
from autopar.sharding.assignment import Candidate
from cost_models.certainty import Certainty
from cost_models.machine import Cluster
from cost_models.mixed_cluster import AnyCluster

LONGEST_TRIED = 2**20
"""The longest row, in tokens, that is tried for a model without a limit."""
SHORTEST_TRIED = 8
MOST_TIMES = 64
"""The largest batch that is tried, as a multiple of the job's rows: with micro-batches nearly any batch fits."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request to the planner. rows: of the batch, None for the job's. seq_len: None for the job's. in_one: the
    whole batch is one micro-batch."""

    cluster: AnyCluster
    rows: int | None = None
    seq_len: int | None = None
    in_one: bool = False


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan that fits. Seconds and tokens are of one step over all ranks, bytes of the fullest rank. tokens is 0 for a
    model without tokens. certainty: the 90 % interval of the peak, and whether it fits."""

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
    """An answer. found: the best plan for the question, or None. refused: the nearest number that was tried and has no
    plan. words: why the search ended, or why there is no answer."""

    found: Fitted | None = None
    refused: int | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class OnCluster:
    """The answers for one cluster. needed_bytes: a sufficient budget if the job does not fit; needed: its certainty.
    dollars: of one step, None without a price; dollars_per_million_tokens: None also for models without tokens."""

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
    """All answers. cheapest: the cheapest cluster on which the job fits, in words; None without prices."""

    clusters: tuple[OnCluster, ...]
    cheapest: str | None


class Planner(Protocol):
    """A function from questions to plans."""

    def __call__(self, question: Question) -> Fitted:
        """Return the best plan. Raises InfeasibleError if nothing fits, another AutoparError for an invalid
        question."""

    def fits_soon(self, question: Question) -> bool:
        """Return whether a quick check finds a plan that fits, without the search for the best. Raises as a call
        does."""
        return False


def fitted_of(request: Request, best: Candidate, seq_len: int | None) -> Fitted:
    """Return the figures of a plan for a request."""
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
    """Answer all questions for every cluster.

    seq_len: tokens of a row of the job. longest: the most tokens that the model takes, if it says so. no_seq: why
    other sequence lengths cannot be tried, or "". prices: dollars per device and hour, by the device's name. seconds:
    the time limit; the first question of every cluster is always answered. processes: processes that answer a
    cluster's questions; more than one are forked, which is safe if no other thread holds locks that they need.
    Raises ClusterError for a device without a price if there are prices, ConstraintError for a price below zero.
    """
    hourly = [dollars_per_hour(cluster, prices) for cluster in clusters]
    end = time.monotonic() + seconds
    asker = _Asker(planner, end)
    firsts = [asker.first(Question(cluster)) for cluster in clusters]
    priced = []
    for number, (cluster, price, (first, error)) in enumerate(zip(clusters, hourly, firsts, strict=True)):
        now = time.monotonic()
        asker.limit = now + (end - now) / (len(clusters) - number)  # the clusters left share the time left
        in_one, fewest, longest_one, largest = asker.others(cluster, first, seq_len, longest, no_seq, processes)
        cluster_answers = OnCluster(
            cluster=str(cluster),
            asked=first,
            needed_bytes=error.needed_bytes if error else None,
            needed=error.certainty if error else None,
            longest=longest_one,
            largest=largest,
            in_one=in_one,
            fewest=fewest,
        )
        priced.append(_priced(cluster_answers, price))
    return Fits(tuple(priced), _cheapest(priced))


@dataclass
class _Asker:
    """Asks the planner each question once, until the time limit."""

    planner: Planner
    limit: float
    outcomes: dict[Question, Fitted | AutoparError] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.limit

    def ask(self, question: Question) -> Fitted | AutoparError:
        if question not in self.outcomes:
            try:
                self.outcomes[question] = self.planner(question)
            except AutoparError as error:
                self.outcomes[question] = error
        return self.outcomes[question]

    def refusal(self, question: Question) -> AutoparError | None:
        """Return why the question has no plan, or None if it has one, which need not be the best."""
        outcome = None if self.fits_soon(question) else self.ask(question)
        return outcome if isinstance(outcome, AutoparError) else None

    def fits_soon(self, question: Question) -> bool:
        """Return whether the question has a plan, as known or by a quick check."""
        if question in self.outcomes:
            return isinstance(self.outcomes[question], Fitted)
        try:
            return not self.is_over and self.planner.fits_soon(question)
        except AutoparError:
            return False

    def first(self, question: Question) -> tuple[Answer, InfeasibleError | None]:
        """Answer the job itself, with the error that says what it needs. Raises any error except InfeasibleError."""
        outcome = self.ask(question)
        if isinstance(outcome, Fitted):
            return Answer(outcome), None
        if not isinstance(outcome, InfeasibleError):
            raise outcome
        return Answer(words=outcome.constraint), outcome

    def others(
        self,
        cluster: AnyCluster,
        first: Answer,
        seq_len: int | None,
        longest: int | None,
        no_seq: str,
        processes: int,
    ) -> list[Answer]:
        """Answer the other questions, the slowest first: in one micro-batch, fewest devices, longest sequence, largest
        batch. longest, no_seq, processes: as `fits` takes them."""
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
        """Find the longest row among powers of two, the halves between them, and the model's limit."""
        assert base.seq_len is not None
        candidates = lengths(base.seq_len, most or LONGEST_TRIED)
        return self._last(
            [replace(base, seq_len=length) for length in candidates],
            candidates,
            candidates.index(base.seq_len),
            first,
            f"{most} is the model's limit" if most else f"rows of more than {LONGEST_TRIED} tokens are not tried",
        )

    def largest(self, base: Question, first: Answer) -> Answer:
        """Find the largest batch in steps that the devices divide, up to MOST_TIMES the job's rows."""
        if first.found is None:
            return Answer(words="the job itself does not fit")
        rows = first.found.rows
        step = math.gcd(rows, base.cluster.num_devices)
        candidates = list(range(step, MOST_TIMES * rows + 1, step))
        first_answer = Answer() if base.in_one else first
        return self._last(
            [replace(base, rows=count) for count in candidates],
            candidates,
            candidates.index(rows),
            first_answer,
            f"more than {MOST_TIMES} times the job's rows are not tried: micro-batches need little more memory",
        )

    def _last(
        self, questions: Sequence[Question], numbers: Sequence[int], start: int, first: Answer, end: str
    ) -> Answer:
        """Find the last question that fits in a list of growing difficulty. start: the first index to try.

        Only the answer is planned exactly; a quick check settles the other questions where it can."""
        low, best = -1, first.found
        high, width = len(questions), 1
        index, error = start, None
        if best is not None:
            low, index = start, start + 1
        while low + 1 < high and not self.is_over:
            soon_index = self._last_soon(questions, low, high) if low >= 0 else low
            if soon_index > low:
                low, best, index = soon_index, None, soon_index + 1
            if index < high:
                refused = self.refusal(questions[index])
                if refused is None:
                    low, best = index, None
                else:
                    high, error = index, refused
            width *= 2
            if high == len(questions):
                index = min(low + width, high - 1)
            elif low == -1:
                index = max(high - width, 0)
            else:
                index = (low + high) // 2
        words = end if high == len(questions) else _refusal(error)
        if low + 1 < high:
            words = "the time limit ended the search: more may fit"
        if low >= 0 and best is None:
            outcome = self.ask(questions[low])
            best = outcome if isinstance(outcome, Fitted) else None
        return Answer(best, numbers[high] if high < len(questions) else None, words)

    def _last_soon(self, questions: Sequence[Question], low: int, high: int) -> int:
        """Return the last question before `high` that a quick check finds to fit, or `low`. It tries the very last one,
        then steps that double while they fit, then bisects the last step."""
        if high == len(questions) and self.fits_soon(questions[-1]):
            return high - 1
        width = 1
        while low + width < high and self.fits_soon(questions[low + width]):
            low, width = low + width, 2 * width
        high = min(low + width, high)
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits_soon(questions[middle]) else (low, middle)
        return low

    def fewest(self, base: Question, first: Answer) -> Answer:
        """Halve the nodes while the job fits, then the devices of the node."""
        cluster = base.cluster
        if not isinstance(cluster, Cluster):
            return Answer(words="a cluster of unlike groups of nodes cannot be halved")
        if first.found is None:
            return Answer(words="the job itself does not fit")
        fitting, refused, words = base, None, ""
        for smaller in halves(cluster):
            question = replace(base, cluster=smaller)
            error = None if self.is_over else self.refusal(question)
            if self.is_over or error is not None:
                refused = smaller.num_devices
                words = _refusal(error) or "the time limit ended the search: fewer may be enough"
                break
            fitting = question
        best = first.found if fitting == base else self.ask(fitting)
        return Answer(best if isinstance(best, Fitted) else None, refused, words)


def lengths(length: int, most: int) -> list[int]:
    """Return powers of two, the halves between them, `length` and `most`, in ascending order."""
    powers = [2**power for power in range(most.bit_length())]
    between = [power + power // 2 for power in powers[1:]]
    return sorted({n for n in (*powers, *between) if SHORTEST_TRIED <= n <= most} | {length, most})


def halves(cluster: Cluster) -> list[Cluster]:
    """Return the cluster with half the nodes, repeatedly while they are even, then with half the devices of a node."""
    smaller = []
    while cluster.num_devices > 1:
        if cluster.num_nodes > 1:
            cluster = replace(cluster, num_nodes=cluster.num_nodes // 2)
        else:
            cluster = replace(cluster, devices_per_node=cluster.devices_per_node // 2)
        smaller.append(cluster)
    return smaller


def dollars_per_hour(cluster: AnyCluster, prices: Mapping[str, float] | None) -> float | None:
    """Return the price of all devices together; None without prices. Raises ClusterError and ConstraintError."""
    if not prices:
        return None
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < math.inf:
            raise ConstraintError(
                "a price is a number of dollars per device and hour, 0 or more",
                values=f"{name}={price}",
                alternatives=f'--price "{name}=2.5"',
            )
    missing = [group.device.name for group in cluster.groups if group.device.name not in prices]
    if missing:
        raise ClusterError(
            "--price has no entry for a device",
            values=", ".join(missing),
            alternatives=f'also --price "{missing[0]}=2.5"',
        )
    return sum(group.num_devices * prices[group.device.name] for group in cluster.groups)


def _refusal(error: AutoparError | None) -> str:
    if error is None:
        return ""
    return "more does not fit the memory" if isinstance(error, InfeasibleError) else error.constraint


def _priced(answers_of: OnCluster, hourly: float | None) -> OnCluster:
    fitted = answers_of.asked.found
    if hourly is None or fitted is None:
        return answers_of
    dollars = hourly * fitted.step_seconds / 3600
    return replace(
        answers_of, dollars=dollars, dollars_per_million_tokens=dollars / fitted.tokens * 1e6 if fitted.tokens else None
    )


def _cheapest(answered: Sequence[OnCluster]) -> str | None:
    """Return the cluster with the lowest price per row, and so per token: clusters may take different numbers of
    rows."""
    priced = [
        (answers_of.dollars / answers_of.asked.found.rows, answers_of.cluster)
        for answers_of in answered
        if answers_of.dollars is not None and answers_of.asked.found
    ]
    return min(priced)[1] if priced else None
