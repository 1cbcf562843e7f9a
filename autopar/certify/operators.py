"""Prove every (operator, option) of a plan on real tensors: the emitted call on simulated ranks against the whole call.

The call is lowered and emitted as in the program (`lowering/one_call.py`), shrunk (`shrunken_call.py`), and run
forward and backward in float64 by all ranks of its axes, in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.certify.certificate import Findings, grouped
from autopar.certify.shrunken_call import CannotShrink, SmallCall, small_call
from autopar.ir.graph import map_refs
from autopar.ir.plan_data import labels_text
from autopar.proofs.outcome import check_option
from autopar.sharding.assignment import Candidate
from autopar.sharding.call_options import Operator, Option

RANKS = (2, 3)
"""Sizes to which each axis is shrunk, in turn."""
MOST_RANKS = 27
"""The most ranks of one run."""


@dataclass
class _Tally:
    """The runs so far. proven: the error of each distinct small call."""

    proven: dict[object, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    gaps: list[tuple[str, str]] = field(default_factory=list)
    runs: int = 0
    worst: str = ""
    error: float = 0.0


def prove_operators(best: Candidate) -> Findings:
    """Run every distinct call of the plan under its option."""
    tally = _Tally()
    # On one device every call is the model's own and there is no option to prove.
    chosen = best.assignment.operators if best.plan.mesh.axes else {}
    for (scope, name), option in chosen.items():
        operator = best.operators[scope, name]
        _prove(tally, operator, option, best, f"{scope + '.' if scope else ''}{name}")
    return Findings(
        subject="operators",
        counts={
            "calls of the plan": len(best.assignment.operators),
            "distinct (operator, option)": len(tally.proven),
            "runs, forward and backward": tally.runs,
        },
        largest_error=tally.error if tally.runs else None,
        worst=tally.worst,
        failures=tuple(tally.failures),
        gaps=grouped(tally.gaps),
    )


def _prove(tally: _Tally, operator: Operator, option: Option, best: Candidate, name: str) -> None:
    mesh = best.plan.mesh
    place = f"{name}, {operator.node.op} under {labels_text(option.labels, mesh) or 'one rank'}"
    try:
        for small in _small_calls(operator, option, mesh.axes, mesh.sizes):
            key = key_of(small)
            if key in tally.proven:
                continue
            node, sizes = small.node, small.sizes
            outcome = check_option(node, small.inputs, small.rule, small.options, sizes)
            tally.runs += 1
            tally.proven[key] = outcome.error
            if outcome.fault is not None:
                tally.failures.append(f"{place} on {'x'.join(map(str, sizes))} ranks: {outcome.fault}")
            elif outcome.error >= tally.error:
                tally.error, tally.worst = outcome.error, place
    except CannotShrink as error:
        tally.gaps.append((place, str(error)))


def _small_calls(
    operator: Operator, option: Option, axes: tuple[str, ...], sizes: tuple[int, ...]
) -> Iterator[SmallCall]:
    """Yield the call on two ranks per axis, and on three if that is a different call with few enough ranks."""
    yield small_call(operator, option, axes, sizes, RANKS[0])
    for ranks in RANKS[1:]:
        try:
            more = small_call(operator, option, axes, sizes, ranks)
        except CannotShrink:
            continue
        product = 1
        for size in more.sizes:
            product *= size
        if product <= MOST_RANKS:
            yield more


def key_of(small: SmallCall) -> object:
    """Return a key that is equal for calls that compute the same under the same options."""
    constants = map_refs((small.node.args, tuple(value for _, value in small.node.kwargs)), lambda _: "tensor")
    return small.node.op, repr(constants), small.inputs, small.node.outputs, small.options, small.sizes
