"""Decide which runs of blocks that look repeated also behave so, so that the first blocks may be traced for all.

Blocks of equal classes and shapes may still depend on their index, or forward may treat one of them differently (a skip
from the third block on). Therefore forward runs once at full depth, on fake tensors, and every operator is recorded as
(operator, scalars, where each tensor comes from, shapes and dtypes of the results). A run may be cut if

- its blocks are called once each, in order, with no operator between them;
- only the next block uses a block's results, and only the block uses its parameters (`Origin`);
- the blocks from the second on have the records of those a period before: equal operators on the same outside tensors
  and on the same results of their predecessor. (The trace itself compares the first one.)

Where blocks look equal and depend on their index, the period may be a longer one.

A second forward, of the cut model, must then leave the same records: operators outside of the runs and the blocks that
were kept must not depend on how many blocks there are. Grad mode is part of the record. Nothing is computed, and a copy
of the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.frontend.attributes import named_tensors
from autopar.frontend.copies import deep_copy
from autopar.frontend.depth import Dropped, Truncation, can_repeat, dropped_blocks, shorten
from autopar.frontend.fakes import Results
from autopar.frontend.recorder import Forward, Record, record


def verified(
    skeletons: Iterator[nn.Module],
    cuts: tuple[Truncation, ...],
    batch: Mapping[str, Any],
    forward: Forward,
    fake: FakeTensorMode,
) -> tuple[Truncation, ...]:
    """Return the cuts among `cuts`, some with a longer period, that do not change the loss; none if `forward` cannot
    run on fake tensors.

    skeletons: equal copies of the model, with fake parameters; up to two are used up. batch: the fake inputs by name.
    forward: the function to be exported, on that batch.
    """
    results = Results(fake)
    try:
        model = next(skeletons)
        short = _copy(model, cuts)
        whole = record(model, cuts, batch, forward, results)
        longer = (_repeating(whole, cut, model) for cut in cuts)
        sound = tuple(cut for cut in longer if cut is not None)
        if not sound:
            return ()
        if sound != cuts:  # blocks of other lists are outside operators now, and more blocks may be kept
            model = next(skeletons)
            short = _copy(model, sound)
            whole = record(model, sound, batch, forward, results)
        shorten(short, sound)
        kept = tuple(replace(cut, num_blocks=cut.end) for cut in sound)
        return sound if _extends(whole, record(short, kept, batch, forward, results)) else ()
    except Exception:  # any failure of forward on fake tensors: the full trace reports it, or succeeds
        return ()


def _copy(model: nn.Module, cuts: tuple[Truncation, ...]) -> nn.Module:
    """Return a copy with its own state that shares the fake parameters and buffers. The blocks that `cuts` delete are
    left out.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [parameter for _, parameter in named_tensors(model)]}
    memo |= {id(block): Dropped() for block in dropped_blocks(model, cuts)[0]}
    return deep_copy(model, memo)


def _repeating(whole: Record, cut: Truncation, model: nn.Module) -> Truncation | None:
    """Return the cut with the shortest period for which the run's blocks from the second on behaved alike."""
    blocks = model.get_submodule(cut.path)
    assert isinstance(blocks, nn.ModuleList)
    longer = (longer_cut for longer_cut in cut.with_longer_periods() if can_repeat(blocks, longer_cut))
    return next((longer_cut for longer_cut in longer if _repeats(whole, longer_cut)), None)


def _repeats(whole: Record, cut: Truncation) -> bool:
    """Return whether the run's blocks from the second on have the records of those a period before."""
    run = whole.runs[cut.path]
    complete = run.entered == cut.num_repeating
    pairs = zip(run.records[1:], run.records[1 + cut.period :], strict=False)
    return complete and not run.refused and all(one == other for one, other in pairs)


def _extends(whole: Record, short: Record) -> bool:
    """Return whether `whole` is `short` with some of its blocks repeated."""
    if not all(_repeats(one, run.cut) for one in (whole, short) for run in one.runs.values()):
        return False
    kept = {path: run.records[: run.cut.num_kept] for path, run in whole.runs.items()}
    return whole.outside == short.outside and kept == {path: run.records for path, run in short.runs.items()}
