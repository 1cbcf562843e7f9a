"""Record every operator that a forward calls: its name, its numbers, and the origin of each tensor.

Forward runs on fake tensors, so nothing is computed. Two records may be compared: of blocks that look equal
(`depth_check.py`), of the same model with another number of rows (`other_rows.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.frontend.attributes import blocks_of, named_tensors
from autopar.frontend.depth import Truncation
from autopar.frontend.fakes import Results, in_this_thread
from autopar.frontend.state.function_caches import functions_of, without_fakes
from autopar.frontend.trace_modes.drawn_numbers import floats_of_draws

Forward = Callable[[nn.Module], Any]
"""Runs a (copy of the) model up to the scalar loss, or to (loss, logits)."""

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MAX_CONSTANT = 2**26  # bytes up to which a constant tensor is compared by value; larger ones count as unequal


class _SameTensor:
    """A tensor in a key, equal only to an entry for the same tensor object."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameTensor) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


class Source(tuple[Any, ...]):
    """The origin of a tensor among an operator's recorded arguments, as seen from the running block."""

    __slots__ = ()


def sources_in(value: Any) -> Iterator[Source]:
    """Yield the tensors in an operator's recorded arguments."""
    if isinstance(value, Source):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from sources_in(item)


@dataclass(slots=True)
class Run:
    """Observations of one list's blocks from `cut.first` on."""

    cut: Truncation
    records: list[list[Any]] = field(default_factory=list)
    entered: int = 0  # blocks, so far
    left_at: int = 0  # number of operators recorded when the latest block returned
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a tensor: `position` of `run` (None: outside of all runs), and a name that is unique there."""

    run: Run | None
    position: int
    name: tuple[Any, ...]
    meta: tuple[Any, ...]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator that forward calls, under the block that is running."""

    def __init__(self, runs: tuple[Run, ...], results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results
        self.runs = {run.cut.path: run for run in runs}
        self.outside: list[Any] = []
        self.current: tuple[Run | None, int] = (None, -1)
        self.record = self.outside
        self.count = 0
        self.origins: dict[int, Origin] = {}
        self.symbols: dict[Any, str] = {}  # sizes that depend on values
        self.alive: list[Tensor] = []  # an id stays unique while its tensor lives
        self.inside_operator = False
        self.grad_enabled = True

    # --- forward's progress through the blocks ---------------------------------------------------------------

    def enter(self, run: Run, position: int) -> None:
        in_order = self.current[0] is None and position == run.entered
        undisturbed = position == 0 or self.count == run.left_at
        run.refused |= not (in_order and undisturbed)
        if position == 0:
            self.outside.append(("enter", run.cut.path))
        run.entered += 1
        run.records.append([])
        self.current, self.record = (run, position), run.records[-1]

    def leave(self, run: Run, position: int) -> None:
        run.refused |= self.current != (run, position)
        run.left_at = self.count
        self.current, self.record = (None, -1), self.outside

    # --- operators -------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.inside_operator = True
        try:
            result = self.results.call(func, args, kwargs or {})
        finally:
            self.inside_operator = False
        if func.namespace == "prim":  # queries such as prim.device
            return result
        operands = (self.describe(args), self.describe(kwargs) if kwargs else ())
        entry = [func, operands]
        self.note(entry)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for index, value in enumerate(results):
            if isinstance(value, Tensor):
                meta = self.meta(value)
                # A shared tensor that is returned unchanged (`contiguous`) stays shared; a written one is new.
                if id(value) in self.origins and not func._schema.is_mutable:
                    entry.append((*meta, self.source(value)))
                else:
                    entry.append(meta)
                    self.name(value, Origin(*self.current, ("result", len(self.record), index), meta))
        return result

    def note(self, entry: list[Any]) -> None:
        self.count += 1
        self.record.append(entry)

    def name(self, tensor: Tensor, origin: Origin) -> None:
        self.origins[id(tensor)] = origin
        self.alive.append(tensor)

    def describe(self, value: Any) -> Any:
        """Return `value` with tensors replaced by their origins, comparable between blocks and between records."""
        if isinstance(value, Tensor):
            return self.source(value)
        if isinstance(value, (tuple, list)):
            return tuple([self.describe(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self.describe(item)) for name, item in value.items()])
        return self.number(value) if isinstance(value, _SIZES) else value

    def meta(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the shape and dtype of a result."""
        shape, dtype = _meta(tensor)
        return tuple([self.number(size) if isinstance(size, _SIZES) else size for size in shape]), dtype

    def number(self, size: Any) -> Any:
        """Return a number that depends on values, as text that is the same in each record of the same forward."""
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            self.symbols.setdefault(symbol, f"size {len(self.symbols)}")
        text = str(expression)
        for symbol in expression.free_symbols:
            text = re.sub(rf"\b{symbol}\b", self.symbols[symbol], text)
        return text

    def source(self, tensor: Tensor) -> Source:
        origin = self.origins.get(id(tensor)) or self.meet(tensor)
        run, position = self.current
        owner = origin.run
        if owner is None:
            return Source(("outside", origin.name))
        if owner is run and origin.position == position:
            return Source(("own", origin.name))
        is_result = origin.name[0] == "result"
        if owner is run and origin.position == position - 1 and is_result:
            return Source(("previous", origin.name, origin.meta))
        if origin.position == owner.cut.num_blocks - owner.cut.first - 1 and is_result:
            return Source(("last", owner.cut.path, origin.name))
        owner.refused = True
        return Source(("inner", owner.cut.path, origin.position, origin.name))

    def meet(self, tensor: Tensor) -> Origin:
        """Register a tensor from no operator, as `torch.tensor(0.5)` in forward or an attribute: equal if its bytes
        are.
        """
        meta = _meta(tensor)
        identity: Any = _SameTensor(tensor)
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta and tensor.nbytes <= _MAX_CONSTANT:
            with _disable_current_modes():
                numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                identity = hashlib.sha256(numbers.tobytes()).digest()
        self.name(tensor, Origin(None, -1, ("constant", meta, identity), meta))
        return self.origins[id(tensor)]

    # --- grad mode, which has no effect in inference mode -------------------------------------------------------

    @contextlib.contextmanager
    def grad_mode(self) -> Iterator[None]:
        """Context manager that records switches of the grad mode; forward begins with gradients, as in an export."""
        switch, ask = torch._C._set_grad_enabled, torch.is_grad_enabled

        def set_enabled(mode: bool) -> None:
            if self.inside_operator:
                switch(mode)
            elif mode != self.grad_enabled:
                self.grad_enabled = mode
                self.note(["grad mode", mode])

        def is_enabled() -> bool:
            return ask() if self.inside_operator else self.grad_enabled

        answers = (
            (torch._C, "_set_grad_enabled", set_enabled),
            (torch, "is_grad_enabled", is_enabled),
            (torch, "is_inference_mode_enabled", lambda: False),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, answer in answers:
                stack.enter_context(mock.patch.object(owner, name, in_this_thread(answer, getattr(owner, name))))
            yield


@dataclass(frozen=True, slots=True)
class Record:
    """A forward, taken apart: the calls outside of the watched runs, and in each block of those.

    An operator's entry is [operator, (args, kwargs), (shape, dtype) of each result]: tensors among the arguments are
    `Source`s. The n-th entry of a list makes the results ("result", n, index), counted from one. A result that is one
    of the operands keeps its source, which follows its dtype.
    """

    outside: list[Any]
    runs: Mapping[str, Run]
    recorder: _Recorder

    def name_of(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Return the source of a tensor that the forward made or met; None for any other tensor."""
        origin = self.recorder.origins.get(id(tensor))
        return origin.name if origin is not None else None


def record(
    model: nn.Module,
    cuts: tuple[Truncation, ...],
    batch: Mapping[str, Any],
    forward: Forward,
    results: Results,
    loss_fn: Any = None,
    *,
    keeps_caches: bool = False,
) -> Record:
    """Run `forward` once and return its record.

    Inference mode leaves composite operators undecomposed, which halves the calls. cuts: the runs whose blocks are
    recorded one by one. batch: the fake inputs by name. loss_fn: the loss that `forward` calls, whose tensors get
    names, too. keeps_caches: leave the values that forward puts into caches outside of the model.
    """
    runs = tuple(Run(cut) for cut in cuts)
    recorder = _Recorder(runs, results)
    for run in runs:
        blocks = model.get_submodule(run.cut.path)
        assert isinstance(blocks, nn.ModuleList)
        for position, block in enumerate(blocks_of(blocks)[run.cut.first :]):
            if block is not None:
                _watch(block, recorder, run, position)
    for name, value in batch.items():
        if isinstance(value, Tensor):
            recorder.name(value, Origin(None, -1, ("input", name), _meta(value)))
    for tensor, origin in _origins(model, runs):
        recorder.name(tensor, origin)
    for name, tensor in named_tensors(loss_fn) if isinstance(loss_fn, nn.Module) else ():
        recorder.name(tensor, Origin(None, -1, ("tensor", f"loss_fn.{name}"), _meta(tensor)))
    with (
        warnings.catch_warnings(action="ignore"),
        _as_exporting(),
        torch.inference_mode(),
        recorder.grad_mode(),
        contextlib.nullcontext() if keeps_caches else without_fakes(model, (_loss_of(forward),)),
        floats_of_draws(functions_of(model, (_loss_of(forward),))),
        results.fake,
        recorder,
    ):
        loss = forward(model)
    sources = tuple(map(recorder.source, loss)) if isinstance(loss, tuple) else recorder.source(loss)
    recorder.outside.append(("loss", sources))
    return Record(recorder.outside, recorder.runs, recorder)


def _loss_of(forward: Forward) -> Any:
    return getattr(forward, "keywords", {}).get("loss_fn")


def _watch(block: nn.Module, recorder: _Recorder, run: Run, position: int) -> None:
    block.register_forward_pre_hook(lambda module, args: recorder.enter(run, position), prepend=True)
    block.register_forward_hook(lambda module, args, output: recorder.leave(run, position))


def _origins(model: nn.Module, runs: tuple[Run, ...]) -> Iterable[tuple[Tensor, Origin]]:
    """Return parameters and buffers: a block's own by their relative name; all others by their full name."""
    homes: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in named_tensors(model, remove_duplicate=False):
        homes.setdefault(id(tensor), (tensor, []))[1].append(name)
    for tensor, names in homes.values():
        meta = _meta(tensor)
        owners = {_owner(name, runs) for name in names}
        (path, position), *others = owners
        if others or path is None:
            yield tensor, Origin(None, -1, ("tensor", names[0]), meta)
        else:
            run = next(run for run in runs if run.cut.path == path)
            relative = names[0].removeprefix(f"{path}.{position + run.cut.first}.")
            yield tensor, Origin(run, position, ("tensor", relative), meta)


def _owner(name: str, runs: tuple[Run, ...]) -> tuple[str | None, int]:
    """Return the run's path and the position in it of the block that `name` belongs to."""
    for run in runs:
        if name.startswith(run.cut.path + "."):
            index = int(name.removeprefix(run.cut.path + ".").partition(".")[0])
            if index >= run.cut.first:
                return run.cut.path, index - run.cut.first
    return None, -1


@contextlib.contextmanager
def _as_exporting() -> Iterator[None]:
    """Context manager in which models that ask whether they are exported get the answers of an export."""
    with contextlib.ExitStack() as stack:
        for name in ("_is_compiling_flag", "_is_exporting_flag"):
            if hasattr(torch.compiler, name):
                stack.enter_context(mock.patch.object(torch.compiler, name, True))
        yield


def _meta(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype)
