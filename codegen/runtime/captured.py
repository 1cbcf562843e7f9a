"""Device work of a step as CUDA graphs, so that no GPU waits for Python.

The first runs of a piece of work are issued call by call: they choose tiles, compile regions and open connections. Then
one run is captured as a graph, and from then on the graph is replayed: one launch instead of thousands.

- A step has three pieces: gradients (forward, backward, reductions), the norm of the gradients, and the update. Between
  them the host decides, as without graphs: whether loss and norm are finite, and what a script does to gradients.
- A graph reads and writes the same memory in every replay. So inputs are copied into fixed tensors, and results out of
  them. Numbers that change between steps are on the device: the learning rate, the loss scale and the keys of draws.
- Work that reads the device in between cannot be captured. `refuse_capture` stands before such reads.
- The first replay is compared with the same work issued call by call. Where they differ, or where a capture fails on
  any rank, all ranks go on without graphs after one warning.

AUTOPAR_CAPTURE=off issues every step call by call.

All pieces run on one stream of their own. Capture needs one: torch's default stream cannot be captured, and a gradient
is accumulated on the stream on which its leaf got its hook (pytorch/pytorch#180090).
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from . import collectives
from .device_keys import DeviceKeys
from .mesh import Mesh

Result = TypeVar("Result")
Inputs = Mapping[str, Tensor]

VARIABLE = "AUTOPAR_CAPTURE"
WARM_UPS = 3
"""Runs of a piece before its capture, as torch's documentation has them for work with collectives."""
MOST_PIECES = 16
"""Pieces at a time; the one that ran longest ago goes, for example where every step clips at another norm."""
TOLERANCE = 1e-3
"""Relative difference between a piece's first replay and its run call by call. Sums by atomic additions scatter by
less; a graph that reads freed memory is off by more. Numbers that a graph holds are equal in both."""


class CaptureError(RuntimeError):
    """Work that cannot be part of a graph."""


def refuse_capture(call: str) -> None:
    """Raise CaptureError while this thread captures a graph. call: what reads the device."""
    if is_capturing():
        raise CaptureError(f"{call} reads the device")


def is_capturing() -> bool:
    """Return whether this thread captures a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Graph(Protocol):
    """A piece of work that is captured once and replayed."""

    def capture(self, work: Callable[[], Result]) -> Result:
        """Record the work without doing it. Return its results, which every replay fills."""
        ...

    def replay(self) -> None:
        """Do the work on the memory that it was captured with."""
        ...


class _CudaGraph:
    """A CUDA graph. stream: of the capture. pool: memory of all graphs of a step, of which one replays at a time."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph, self._stream, self._pool = torch.cuda.CUDAGraph(), stream, pool

    def capture(self, work: Callable[[], Result]) -> Result:
        # "thread_local": data loaders and NCCL's watchdog query events in other threads.
        mode = "thread_local"
        with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            # A read of the device raises before CUDA sees it: a capture that CUDA ends keeps its memory for good.
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return work()
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def replay(self) -> None:
        self._graph.replay()


@dataclass(slots=True)
class _Piece:
    """A piece of work. inputs, results: of its graph, in fixed memory."""

    num_runs: int = 0
    graph: Graph | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    results: Any = None

    def replay(self, inputs: Inputs) -> Any:
        """Return the results for these inputs."""
        assert self.graph is not None
        for name, value in inputs.items():
            self.inputs[name].copy_(value, non_blocking=True)
        self.graph.replay()
        return _copied(self.results)


class Captured:
    """The graphs of one rank's step. All ranks make the same calls.

    keys: of random draws, on the device. new_graph: makes an empty graph; by default a CUDA graph. On a CPU, where
    there is none, work runs as it is.
    """

    def __init__(self, mesh: Mesh, new_graph: Callable[[], Graph] | None = None) -> None:
        self._mesh = mesh
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        if new_graph is None and mesh.device.type == "cuda":
            self._stream = torch.cuda.Stream(mesh.device)  # type: ignore[no-untyped-call]
            new_graph = self._cuda_graph
        self._new_graph = new_graph
        self.is_on = new_graph is not None and os.environ.get(VARIABLE, "") != "off"
        self._pieces: dict[Hashable, _Piece] = {}
        self.keys = DeviceKeys(mesh.device)
        if not _alive:
            # Before other packages end the process group at exit, as Lightning does.
            atexit.register(forget_all)
        _alive.add(self)
        if self._stream is not None and self.is_on and _may_register_freed_memory(mesh):
            self._give_up("NCCL registers the memory of graphs, which expandable segments may move")

    def _cuda_graph(self) -> Graph:
        """Return an empty graph. A pool whose graphs are all gone cannot be captured into, so `forget` drops it."""
        assert self._stream is not None
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return _CudaGraph(self._stream, self._pool)

    @property
    def num_graphs(self) -> int:
        """The number of pieces that are replayed."""
        return sum(piece.graph is not None for piece in self._pieces.values())

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Context manager for work on the stream of the graphs, in order with the current stream's."""
        if self._stream is None or not self.is_on:
            yield
            return
        current = torch.cuda.current_stream(self._mesh.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def run(
        self,
        key: Hashable,
        work: Callable[[Inputs], Any],
        inputs: Inputs | None = None,
        *,
        written: Sequence[Tensor] = (),
        checked: Callable[[Any], Tensor] | None = None,
        abandon: Callable[[], object] | None = None,
    ) -> Any:
        """Run `work(inputs)`, from its fourth run with this key on as a graph, and return what it returns.

        key: equal only for work that does the same to the same memory. work: returns tensors, numbers, or a tuple of
        them. checked: makes of the result the numbers that the first replay and a run call by call are compared by.
        written: the tensors that the work changes and reads, so that it may be done twice. abandon: called after work
        that was cut short.
        """
        inputs = inputs or {}
        if not self.is_on:
            return work(inputs)
        with self.on_stream():
            piece = self._piece(key)
            if piece.graph is not None:
                return piece.replay(inputs)
            try:
                return self._run_without_graph(piece, work, inputs, written, checked, abandon)
            except BaseException:
                if abandon is not None:
                    abandon()
                raise

    def _piece(self, key: Hashable) -> _Piece:
        """Return the piece of this key. One that ran long ago makes room."""
        while len(self._pieces) >= MOST_PIECES and key not in self._pieces:
            del self._pieces[next(iter(self._pieces))]
        piece = self._pieces.pop(key) if key in self._pieces else _Piece()
        self._pieces[key] = piece
        return piece

    def _run_without_graph(
        self,
        piece: _Piece,
        work: Callable[[Inputs], Any],
        inputs: Inputs,
        written: Sequence[Tensor],
        checked: Callable[[Any], Tensor] | None,
        abandon: Callable[[], object] | None,
    ) -> Any:
        """Run the work call by call, and capture it after its warm-ups."""
        piece.num_runs += 1
        if piece.num_runs <= WARM_UPS:
            return work(inputs)
        before = [value.clone() for value in written] if checked is not None else []
        result = work(inputs)
        if checked is None:
            # The work must not be done twice: this run was the last without a graph.
            self._capture(piece, work, inputs, abandon)
            return result
        expected = checked(result)
        _restore(written, before)
        reason = self._capture(piece, work, inputs, abandon)
        if not reason:
            result = piece.replay(inputs)
            reason = self._agree(_difference(expected, checked(result)))
        if reason:
            self._give_up(reason)
            piece.graph, piece.results, result = None, None, None  # their memory is needed now
            _restore(written, before)
            result = work(inputs)
        return result

    def _capture(
        self, piece: _Piece, work: Callable[[Inputs], Any], inputs: Inputs, abandon: Callable[[], object] | None
    ) -> str:
        """Capture the work. Return why that failed on a rank, if it did; no rank has graphs then."""
        assert self._new_graph is not None
        piece.inputs = {name: value.to(self._mesh.device, copy=True) for name, value in inputs.items()}
        reason, graph = "", self._new_graph()
        try:
            piece.results = graph.capture(lambda: work(piece.inputs))
        except Exception as error:  # of whatever class: CUDA, NCCL and kernels raise their own
            reason = _first_line(error)
        reason = self._agree(reason)
        if reason:
            if abandon is not None:
                abandon()
            self._give_up(reason)
        else:
            piece.graph = graph
        return reason

    def _agree(self, reason: str) -> str:
        """Return this rank's reason, or that another rank has one; "" if none has. Collective."""
        if self._mesh.everyone.size > 1:
            num_failed = torch.tensor(float(bool(reason)), device=self._mesh.device)
            collectives.all_reduce(num_failed, self._mesh.everyone.group)
            reason = reason or ("another rank could not capture it" if num_failed.item() else "")
        return reason

    def _give_up(self, reason: str) -> None:
        if self.is_on and self._mesh.everyone.rank == 0:
            warnings.warn(f"steps run without CUDA graphs, call by call: {reason}", stacklevel=2)
        self.is_on = False
        self._pieces.clear()

    def forget(self) -> None:
        """Drop all graphs, whose memory may be another's now. They are captured anew."""
        self._pieces.clear()
        self._pool = None


def _may_register_freed_memory(mesh: Mesh) -> bool:
    """Return whether NCCL and the allocator together fault in graphs (pytorch/pytorch#158029)."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    is_registering = os.environ.get("NCCL_GRAPH_REGISTER", "1") != "0"
    return mesh.everyone.size > 1 and is_registering and "expandable_segments:True" in settings


_alive: weakref.WeakSet[Captured] = weakref.WeakSet()


def forget_all() -> None:
    """Drop all graphs of this process before its process group ends: `destroy_process_group` waits forever for graphs
    with collectives of NCCL (pytorch/pytorch#115388)."""
    for captured in _alive:
        captured.forget()


def _first_line(error: BaseException) -> str:
    """Return what failed first: the end of a capture that has failed raises an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _copied(results: Any) -> Any:
    """The results in memory that the next replay leaves alone."""
    if isinstance(results, tuple):
        return tuple(map(_copied, results))
    return results.clone() if isinstance(results, Tensor) else results


def _restore(written: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for value, kept in zip(written, before, strict=True):
        value.copy_(kept)


def _difference(expected: Tensor, actual: Tensor) -> str:
    """Return how the first replay differs from the run call by call; "" if it does not."""
    if torch.allclose(actual, expected, rtol=TOLERANCE, atol=0.0, equal_nan=True):
        return ""
    return f"the first replay gives {actual.tolist()}, the same calls without a graph gave {expected.tolist()}"
