"""Which runs of blocks that look equal also behave equally, so that two of them may be traced for all.

Blocks of equal classes and shapes may still act by their index, or forward may use one of them in its own way (a
skip from the third block on). Therefore forward runs once at full depth, on fake tensors, and every operator is
written down as (operator, scalars, where each tensor comes from, shapes and dtypes of the results). A run may be cut if

- its blocks are called once each, in order, with no operator between them;
- nobody but the next block uses what a block computes, and nobody but the block its own parameters (`_origin`);
- the blocks from the second on have equal records: equal operators on the same outside tensors and on the same
  results of their predecessor. (The trace itself compares the first two.)

A second forward, of the cut model, must then leave the same records: operators outside of the runs and the blocks that
were kept must not depend on how many blocks there are. Grad mode is part of the record. Nothing is computed, and
it is a copy of the model that runs.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.tracing.depth import KEPT_BLOCKS, Dropped, Truncation, dropped_blocks, shorten

Forward = Callable[[nn.Module], Tensor]
"""Runs a (copy of the) model up to the scalar loss."""

_MAX_CONSTANT = 2**26  # bytes up to which a constant tensor is compared by value; larger ones count as unequal


def verified(
    skeletons: Iterator[nn.Module],
    cuts: tuple[Truncation, ...],
    batch: Mapping[str, Any],
    forward: Forward,
    fake: FakeTensorMode,
) -> tuple[Truncation, ...]:
    """Those of `cuts` that do not change what `forward` computes; none if forward cannot run on fake tensors.

    skeletons: equal ones of the model, with fake parameters; up to two are used up. batch: the fake inputs by name.
    forward: what will be exported, on that batch.
    """
    try:
        model = next(skeletons)
        short = _copy(model, cuts)
        whole = _record(model, cuts, batch, forward, fake)
        sound = tuple(cut for cut in cuts if whole.repeats(cut))
        if not sound:
            return ()
        if sound != cuts:  # blocks of the other lists are outside operators now
            model = next(skeletons)
            short = _copy(model, sound)
            whole = _record(model, sound, batch, forward, fake)
        shorten(short, sound)
        kept = tuple(Truncation(cut.path, cut.first + KEPT_BLOCKS, cut.first) for cut in sound)
        return sound if whole.extends(_record(short, kept, batch, forward, fake)) else ()
    except Exception:  # whatever forward cannot do on fake tensors: the full trace will say it, or do it
        return ()


def _copy(model: nn.Module, cuts: tuple[Truncation, ...]) -> nn.Module:
    """A copy whose state is its own, except for parameters and buffers: those are fake, and shared. The blocks that
    `cuts` delete are left out of it."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo |= {id(block): Dropped() for block in dropped_blocks(model, cuts)[0]}
    return copy.deepcopy(model, memo)


@dataclass(slots=True)
class _Run:
    """What was seen of one list's blocks from `cut.first` on."""

    cut: Truncation
    records: list[list[Any]] = field(default_factory=list)
    entered: int = 0  # blocks, so far
    left_at: int = 0  # number of operators recorded when the latest block returned
    refused: bool = False


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a tensor comes from: `position` of `run` (None: outside of all runs), and a name that is unique there."""

    run: _Run | None
    position: int
    name: tuple[Any, ...]
    meta: tuple[Any, ...]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator that forward calls, under the block that is running."""

    def __init__(self, runs: tuple[_Run, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs = {run.cut.path: run for run in runs}
        self.outside: list[Any] = []
        self.current: tuple[_Run | None, int] = (None, -1)
        self.record = self.outside
        self.count = 0
        self.origins: dict[int, _Origin] = {}
        self.alive: list[Tensor] = []  # an id stays unique while its tensor lives
        self.inside_operator = False
        self.grad_enabled = True

    # --- forward's progress through the blocks ---------------------------------------------------------------

    def enter(self, run: _Run, position: int) -> None:
        in_order = self.current[0] is None and position == run.entered
        undisturbed = position == 0 or self.count == run.left_at
        run.refused |= not (in_order and undisturbed)
        if position == 0:
            self.outside.append(("enter", run.cut.path))
        run.entered += 1
        run.records.append([])
        self.current, self.record = (run, position), run.records[-1]

    def leave(self, run: _Run, position: int) -> None:
        run.refused |= self.current != (run, position)
        run.left_at = self.count
        self.current, self.record = (None, -1), self.outside

    # --- operators -------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.inside_operator = True
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self.inside_operator = False
        if func.namespace == "prim":  # questions such as prim.device
            return result
        given = (self.describe(args), self.describe(kwargs) if kwargs else ())
        entry = [func, given]
        self.note(entry)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for index, value in enumerate(results):
            if isinstance(value, Tensor):
                meta = _meta(value)
                entry.append(meta)
                # A shared tensor that comes back as it is (`contiguous`) stays shared; one written to is new.
                if id(value) not in self.origins or func._schema.is_mutable:
                    self.name(value, _Origin(*self.current, ("result", len(self.record), index), meta))
        return result

    def note(self, entry: list[Any]) -> None:
        self.count += 1
        self.record.append(entry)

    def name(self, tensor: Tensor, origin: _Origin) -> None:
        self.origins[id(tensor)] = origin
        self.alive.append(tensor)

    def describe(self, value: Any) -> Any:
        """`value` with tensors replaced by where they come from, comparable between blocks and between records."""
        if isinstance(value, Tensor):
            return self.source(value)
        if isinstance(value, (tuple, list)):
            return tuple([self.describe(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self.describe(item)) for name, item in value.items()])
        return value

    def source(self, tensor: Tensor) -> tuple[Any, ...]:
        origin = self.origins.get(id(tensor)) or self.meet(tensor)
        run, position = self.current
        owner = origin.run
        if owner is None:
            return ("outside", origin.name)
        if owner is run and origin.position == position:
            return ("own", origin.name)
        is_result = origin.name[0] == "result"
        if owner is run and origin.position == position - 1 and is_result:
            return ("previous", origin.name, origin.meta)
        if origin.position == owner.cut.num_blocks - owner.cut.first - 1 and is_result:
            return ("last", owner.cut.path, origin.name)
        owner.refused = True
        return ("inner", owner.cut.path, origin.position, origin.name)

    def meet(self, tensor: Tensor) -> _Origin:
        """A tensor that no operator made, as `torch.tensor(0.5)` in forward or an attribute: equal if its bytes are."""
        meta = _meta(tensor)
        identity: Any = object()
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta and tensor.nbytes <= _MAX_CONSTANT:
            with _disable_current_modes():
                numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                identity = hashlib.sha256(numbers.tobytes()).digest()
        self.name(tensor, _Origin(None, -1, ("constant", meta, identity), meta))
        return self.origins[id(tensor)]

    # --- grad mode, which has no effect in inference mode -------------------------------------------------------

    @contextlib.contextmanager
    def grad_mode(self) -> Iterator[None]:
        """Forward finds gradients enabled, as when it is exported; where it switches them is recorded."""
        switch, ask = torch._C._set_grad_enabled, torch.is_grad_enabled

        def set_enabled(mode: bool) -> None:
            if self.inside_operator:
                switch(mode)
            elif mode != self.grad_enabled:
                self.grad_enabled = mode
                self.note(["grad mode", mode])

        def is_enabled() -> bool:
            return ask() if self.inside_operator else self.grad_enabled

        with (
            mock.patch.object(torch._C, "_set_grad_enabled", set_enabled),
            mock.patch.object(torch, "is_grad_enabled", is_enabled),
            mock.patch.object(torch, "is_inference_mode_enabled", lambda: False),
        ):
            yield


@dataclass(frozen=True, slots=True)
class _Record:
    """A forward, taken apart."""

    outside: list[Any]
    runs: Mapping[str, _Run]

    def repeats(self, cut: Truncation) -> bool:
        """Whether the run's blocks from the second on did the same."""
        run = self.runs[cut.path]
        second, *others = run.records[1:] or [[]]
        complete = run.entered == cut.num_blocks - cut.first
        return complete and not run.refused and all(record == second for record in others)

    def extends(self, short: _Record) -> bool:
        """Whether this is `short` with some of its blocks repeated."""
        if not all(record.repeats(run.cut) for record in (self, short) for run in record.runs.values()):
            return False
        kept = {path: run.records[:KEPT_BLOCKS] for path, run in self.runs.items()}
        return self.outside == short.outside and kept == {path: run.records for path, run in short.runs.items()}


def _record(
    model: nn.Module, cuts: tuple[Truncation, ...], batch: Mapping[str, Any], forward: Forward, fake: FakeTensorMode
) -> _Record:
    """Runs `forward` once. Inference mode hands over composite operators whole: half as many to look at."""
    runs = tuple(_Run(cut) for cut in cuts)
    recorder = _Recorder(runs)
    for run in runs:
        blocks = model.get_submodule(run.cut.path)
        assert isinstance(blocks, nn.ModuleList)
        for position, block in enumerate(blocks[run.cut.first :]):
            _watch(block, recorder, run, position)
    for name, value in batch.items():
        if isinstance(value, Tensor):
            recorder.name(value, _Origin(None, -1, ("input", name), _meta(value)))
    for tensor, origin in _origins(model, runs):
        recorder.name(tensor, origin)
    with (
        warnings.catch_warnings(action="ignore"),
        _as_exporting(),
        torch.inference_mode(),
        recorder.grad_mode(),
        fake,
        recorder,
    ):
        loss = forward(model)
    recorder.outside.append(("loss", recorder.source(loss)))
    return _Record(recorder.outside, recorder.runs)


def _watch(block: nn.Module, recorder: _Recorder, run: _Run, position: int) -> None:
    block.register_forward_pre_hook(lambda module, args: recorder.enter(run, position), prepend=True)
    block.register_forward_hook(lambda module, args, output: recorder.leave(run, position))


def _origins(model: nn.Module, runs: tuple[_Run, ...]) -> Iterable[tuple[Tensor, _Origin]]:
    """Parameters and buffers: a block's own by their relative name; shared ones and all others by their full name."""
    homes: dict[int, tuple[Tensor, list[str]]] = {}
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in (item for group in named for item in group):
        homes.setdefault(id(tensor), (tensor, []))[1].append(name)
    for tensor, names in homes.values():
        meta = _meta(tensor)
        owners = {_owner(name, runs) for name in names}
        (path, position), *others = owners
        if others or path is None:
            yield tensor, _Origin(None, -1, ("tensor", names[0]), meta)
        else:
            run = next(run for run in runs if run.cut.path == path)
            relative = names[0].removeprefix(f"{path}.{position + run.cut.first}.")
            yield tensor, _Origin(run, position, ("tensor", relative), meta)


def _owner(name: str, runs: tuple[_Run, ...]) -> tuple[str | None, int]:
    """Path of the run and position in it of the block that `name` lies in."""
    for run in runs:
        if name.startswith(run.cut.path + "."):
            index = int(name.removeprefix(run.cut.path + ".").partition(".")[0])
            if index >= run.cut.first:
                return run.cut.path, index - run.cut.first
    return None, -1


@contextlib.contextmanager
def _as_exporting() -> Iterator[None]:
    """What models ask in order to behave differently under export is answered as it will be then."""
    with contextlib.ExitStack() as stack:
        for name in ("_is_compiling_flag", "_is_exporting_flag"):
            if hasattr(torch.compiler, name):
                stack.enter_context(mock.patch.object(torch.compiler, name, True))
        yield


def _meta(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype)
