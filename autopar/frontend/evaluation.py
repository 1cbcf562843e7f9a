"""Decide whether a program made from the training trace computes in evaluation mode the same as `model.eval()`.

The generated program in evaluation mode is the training trace without dropout and with the running statistics of batch
and instance norm (codegen/evaluation.py). Two records of forward, one in each mode, show whether the model's evaluation
is just that; they cost a hundredth of an export. Without those flags, and without calls that the loss does not depend
on (counters), they must be equal operator by operator. Other behavior of training (stochastic depth, averages that it
updates) must have a counterpart that evaluation reads in its place (training_only.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.frontend import fakes
from autopar.frontend.depth import Truncation, shorten
from autopar.frontend.export import forward_and_loss
from autopar.frontend.fakes import Results
from autopar.frontend.inputs import fake_input, name_inputs
from autopar.frontend.other_rows import UnlikeError
from autopar.frontend.recorded_calls import RecordedCalls
from autopar.frontend.recorder import Record, record
from autopar.frontend.skeleton import loss_skeleton, skeleton_of
from autopar.frontend.training_only import replacements


@fakes.probing()
def why_no_evaluation(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None = None,
    cuts: tuple[Truncation, ...] = (),
    *,
    with_logits: bool = False,
) -> str:
    """Return "" if the program can evaluate, else the difference, in one clause.

    cuts: runs of equal blocks to shorten. with_logits: the model's logits must be equal, too.
    """
    fake = fakes.mode()
    named = name_inputs(model, example_inputs, loss_fn)
    batch = named.map(lambda value: fake_input(value, fake, 0, None))

    def recorded(is_training: bool) -> Record | None:
        skeleton = skeleton_of(model, fake, cuts=cuts)
        if not is_training:
            skeleton.eval()
        shorten(skeleton, cuts)
        loss = loss_skeleton(loss_fn, fake)
        forward = partial(forward_and_loss, loss_fn=loss, batch=batch, with_logits=with_logits)
        with contextlib.suppress(Exception):  # it may still be exported; the program only cannot evaluate
            return record(skeleton, (), batch, forward, Results(fake), loss)
        return None

    training, evaluating = recorded(True), recorded(False)
    if training is None or evaluating is None:
        return "the model's forward could not be followed in evaluation mode"
    reason = difference(training, evaluating)
    if reason:
        with contextlib.suppress(UnlikeError):
            replacements(training, evaluating)
            return ""
    return reason


def difference(training: Record, evaluating: Record) -> str:
    """Return the difference between a program in evaluation mode and the model, in one clause."""
    owns = RecordedCalls(training.outside, True).numbered()
    others = RecordedCalls(evaluating.outside, False).numbered()
    for call, other in zip(owns, others, strict=False):
        if call != other:
            return f"the model calls {other[0]} in evaluation mode where it calls {_text(call, other)} in training"
    if len(owns) != len(others):
        return f"the model calls {len(others)} operators in evaluation mode, and {len(owns)} in training"
    return ""


def _text(call: Any, other: Any) -> str:
    return str(call[0]) if call[0] != other[0] else "it with other arguments"
