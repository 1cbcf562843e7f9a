"""Whether a program made from the training trace computes in evaluation mode what `model.eval()` does.

The generated program in evaluation mode is the training trace without dropout and with the running statistics of batch
and instance norm (codegen/evaluation.py). Whether the model's own evaluation is just that is read off two records of
forward, one in each mode, which cost a hundredth of an export: with those flags put aside, and without what the loss
does not depend on (counters), they must be equal operator by operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.frontend import fakes
from autopar.frontend.depth import Truncation, shorten
from autopar.frontend.export import forward_and_loss
from autopar.frontend.fakes import Results
from autopar.frontend.inputs import fake_input, name_inputs
from autopar.frontend.recorder import Source, record
from autopar.frontend.skeleton import skeleton_of
from autopar.ir.operators import named_arguments

_FLAGS: Mapping[str, tuple[str, Any]] = {
    "aten.dropout.default": ("train", False),
    "aten.dropout_.default": ("train", False),
    "aten.scaled_dot_product_attention.default": ("dropout_p", 0.0),
    "aten.batch_norm.default": ("training", False),
    "aten.instance_norm.default": ("use_input_stats", False),
}
"""Operator -> the argument that a program in evaluation mode has otherwise than in training, and its value then."""


@fakes.probing()
def why_no_evaluation(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None = None,
    cuts: tuple[Truncation, ...] = (),
    *,
    with_logits: bool = False,
) -> str:
    """ "" where the program can evaluate, else what differs, in one clause.

    cuts: runs of equal blocks to shorten. with_logits: what the model returns as logits must be equal, too.
    """
    fake = fakes.mode()
    named = name_inputs(model, example_inputs, loss_fn)
    batch = named.map(lambda value: fake_input(value, fake, 0, None))

    def operators(is_training: bool) -> list[Any] | None:
        skeleton = skeleton_of(model, fake, cuts=cuts)
        if not is_training:
            skeleton.eval()
        shorten(skeleton, cuts)
        forward = partial(forward_and_loss, loss_fn=loss_fn, batch=batch, with_logits=with_logits)
        with contextlib.suppress(Exception):  # what cannot be recorded may still be exported; it only cannot evaluate
            return _compared(record(skeleton, (), batch, forward, Results(fake)).outside, is_training)
        return None

    training, evaluating = operators(True), operators(False)
    if training is None or evaluating is None:
        return "the model's forward could not be followed in evaluation mode"
    for own, other in zip(training, evaluating, strict=False):
        if own != other:
            return f"the model calls {other[0]} in evaluation mode where it calls {_text(own, other)} in training"
    if len(training) != len(evaluating):
        return f"the model calls {len(evaluating)} operators in evaluation mode, and {len(training)} in training"
    return ""


def _text(own: Any, other: Any) -> str:
    return str(own[0]) if own[0] != other[0] else "it with other arguments"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A recorded call. what: all that must be equal. counts: whether it does even if the loss reads no result."""

    key: tuple[Any, ...]
    name: str
    what: Any
    counts: bool


def _compared(entries: list[Any], in_program: bool) -> list[Any]:
    """The operators that the loss depends on, comparable between records.

    in_program: as the program runs them in evaluation mode, rather than as they were called.
    """
    renamed: dict[Any, Any] = {}  # the result of an identity -> what it is
    kept: list[_Kept] = []
    for position, entry in enumerate(entries[:-1], 1):
        name = str(entry[0])
        if name in ("enter", "grad mode"):
            kept.append(_Kept(("mode", position), name, entry[1], True))
            continue
        operator, (args, kwargs), *results = entry
        named = named_arguments(operator, args, dict(kwargs))
        if name in _FLAGS and not (name.endswith("norm.default") and named.get("running_mean") is None):
            flag, value = _FLAGS[name]
            if in_program:
                named[flag] = value
            named.pop("momentum", None)  # which counts in training alone
        is_identity = name.startswith("aten.dropout") and (not named["train"] or not named["p"])
        if is_identity or name == "aten.contiguous.default":  # whether that copies depends on strides, not on values
            renamed["result", position, 0] = next(iter(named.values()))
            continue
        # What reads a tensor that was written to does not name the call; only what a buffer becomes stays out of sight.
        counts = operator._schema.is_mutable and not _is_buffer(next(iter(named.values())))
        what = (tuple(sorted(named.items())), tuple(result[:2] for result in results))
        kept.append(_Kept(("result", position), name, what, counts))
    return _live(kept, entries[-1][1], renamed)


def _live(kept: list[_Kept], loss: Any, renamed: dict[Any, Any]) -> list[Any]:
    """What the loss depends on, with results numbered anew."""

    def source(value: Any) -> Any:
        while isinstance(value, Source) and value[1] in renamed:
            value = renamed[value[1]]
        return value

    def sources(value: Any) -> Iterator[Any]:
        value = source(value)
        if isinstance(value, Source):
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from sources(item)

    needed = {value[1][:2] for value in sources(loss)}
    live: list[_Kept] = []
    for call in reversed(kept):
        if call.counts or call.key in needed:
            live.append(call)
            needed |= {value[1][:2] for value in sources(call.what)}
    live = _with_needed_modes(live[::-1])
    number = {call.key: index for index, call in enumerate(live)}

    def numbered(value: Any) -> Any:
        value = source(value)
        if isinstance(value, Source):
            name = value[1]
            return ("result", number.get(name[:2], -1), *name[2:]) if name[0] == "result" else tuple(value)
        return tuple(map(numbered, value)) if isinstance(value, (tuple, list)) else value

    return [(call.name, numbered(call.what)) for call in live] + [("loss", numbered(loss))]


def _with_needed_modes(live: list[_Kept]) -> list[_Kept]:
    """The calls with those switches of the grad mode that a call after them sees."""
    found: list[_Kept] = []
    mode, switch = True, None
    for call in live:
        if call.name == "grad mode":
            switch = call
            continue
        if switch is not None and switch.what != mode:
            mode = switch.what
            found.append(switch)
        switch = None
        found.append(call)
    return found


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Source) and bool(value[1][0] == "tensor")
