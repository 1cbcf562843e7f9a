"""Operators with every optional argument away from its default, one at a time, through the real emitter.

Of every operator that has a rule, each overload is called on small tensors; the emitted source is run by the ranks of
one axis of two under every placement that the rule offers (replicated, and what dp2 or tp2 may choose), forward and
backward, and compared with torch's operator on the whole tensors in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from autopar.proofs.rule_proof import check_options, torch_alone
from autopar.rules.registry import known_ops
from autopar.sharding.call_options import rule_or_blank
from benchmarks.faults.case import Case, Result, drawn
from benchmarks.operator_calls import T, Written, base_calls, make_node, varied


def cases(count: int | None, seed: int) -> list[Case]:
    """Each takes some hundred milliseconds."""
    found = (Case(text_of(call), partial(attempt, call)) for call in all_calls())
    return drawn(found, count, seed)


def all_calls() -> Iterator[Written]:
    """Every call that torch takes: each base call, then with each optional argument away from its default."""
    for packet in known_ops():
        for base in base_calls(packet):
            for call in (base, *varied(base)):
                try:
                    make_node(call[0], *call[1], **call[2])
                except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                    continue  # torch itself does not take these together
                yield call


def attempt(call: Written) -> Result:
    """Right if every option of the call equals torch, clear if torch itself refuses it."""
    op, args, kwargs = call
    node, inputs = make_node(op, *args, **kwargs)
    metas = dict(zip(node.inputs, inputs, strict=True))
    try:
        torch_alone(node, inputs)
    except (RuntimeError, ValueError) as error:
        return Result("refused", f"torch itself: {error}".splitlines()[0])
    try:
        rule, _ = rule_or_blank(node, metas)
        _, wrong = check_options(node, inputs, rule)
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0])
    if not wrong:
        return Result("right")
    return Result("wrong" if any("differs" in text for text in wrong) else "raw", wrong[0])


def text_of(call: Written) -> str:
    """`aten.sum.dim_IntList((4, 6), [1], keepdim=True)`."""

    def one(value: Any) -> str:
        if isinstance(value, T):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"[{', '.join(map(one, value))}]" if isinstance(value, list) else repr(value)

    op, args, kwargs = call
    return f"{op}({', '.join([*map(one, args), *(f'{k}={one(v)}' for k, v in kwargs.items())])})"
