"""The choice among a kernel's candidate tiles: measured once per device and kind of problem, and written down.

A kernel names its candidates, a short tuple beside it, the heuristic choice first, and how to run with one of them.
What is fastest depends on the device, on dtypes and flags (which gradients are needed, ...) and on the shape, each
dim rounded up to a power of two: that is a `Case`. The tile of a case is looked up in memory, then in the program's
file (`tuning_file.py`), and else measured: every candidate compiles and runs once, then in rounds one after another,
each launch between two CUDA events behind a pause that covers its enqueueing; the median decides. Another candidate
than the first has to be faster by a share that medians differ by without cause. One that does not compile or does not
fit the device's shared memory is left out.

The file is what AUTOPAR_TUNING names, else `tuning.json` in the program's folder, beside the kernels' own, where there
is one: saved programs have it, empty at first; others have a link there, to a file of the user's that all of them share
(autopar/tune.py). Without a file, and with AUTOPAR_TUNING=off, nothing is measured and
first candidates run. They also do on a CPU, in Triton's interpreter, while torch.compile traces, and, where neither
memory nor the file knows the case, while a CUDA graph is captured and where the file cannot be written.

Ranks that share the file launch alike: whoever writes a case first decides it for all, before anything is launched
with it whose result counts, and nobody waits for anybody. That matters where ranks compute the same, as tensor
parallel ranks compute norms of whole rows: with unequal tiles their sums would differ in the last fp32 bits, and so,
in time, their copies of a weight. Nodes that share no folder therefore had better be given copies of one file, such as
a run of one step leaves behind.

Numbers that are sums over a row depend on the tile, within fp32 rounding; the kernels' files say which. All others
are equal to the bit for every candidate.
"""

from __future__ import annotations

import functools
import os
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch

from .dispatch import launch_device, power_of_2_at_least, triton
from .tile import Candidate
from .tuning_file import Entry, TuningFile

Result = TypeVar("Result")
Tile = TypeVar("Tile", bound=Candidate)
Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of one run on the device."""

VARIABLE: Final = "AUTOPAR_TUNING"
FILE_NAME: Final = "tuning.json"
ROUNDS: Final = 9
FASTER: Final = 0.97
"""A candidate is taken instead of the first one if it takes at most this share of the first one's time."""
_PAUSE_CYCLES: Final = 1_000_000
"""Half a millisecond: longer than Triton takes to enqueue a few kernels."""


class Case(NamedTuple):
    """The case that one choice is for; its text is the key in the file."""

    kernel: str
    flags: tuple[tuple[str, bool], ...]
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        flags = [name for name, is_set in self.flags if is_set]
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return " ".join((self.kernel, *flags, *dtypes, "x".join(map(str, self.shape))))


@dataclass(slots=True)
class Tuner:
    """The choices of this process, read from `file` and written to it.

    chosen: the tile of each case. settled: the same, of each launch (kernel, shape, device, flags, dtypes), whose key
    takes the host less to make than a case.
    """

    file: TuningFile
    timer: Timer
    device_text: Callable[[torch.device], str]
    is_capturing: Callable[[], bool]
    chosen: dict[Case, Any] = field(default_factory=dict)
    settled: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def choose(self, case: Case, tiles: Sequence[Tile], run_tile: Callable[[Tile], object]) -> Tile:
        """One of `tiles`, by running `run_tile` where no one has done so before."""
        tile: Tile | None = self.chosen.get(case)
        return self._settle(case, tiles, run_tile) if tile is None else tile

    def _settle(self, case: Case, tiles: Sequence[Tile], run_tile: Callable[[Tile], object]) -> Tile:
        # Short rows make the same launch of several candidates.
        distinct: dict[object, Tile] = {}
        for tile in tiles:
            distinct.setdefault(tile.launched(case.shape), tile)
        if len(distinct) == 1:
            return self._keep(case, tiles[0])
        device, by_text = self.device_text(case.device), {str(tile): tile for tile in tiles}
        entry = self.file.entry(device, str(case), by_text)
        if entry is None:
            if self.is_capturing():
                return tiles[0]
            try:
                entry = self.file.settle(device, str(case), by_text, self._measure(list(distinct.values()), run_tile))
            except OSError as error:
                warnings.warn(f"launch parameters cannot be written down, so none are chosen: {error}", stacklevel=2)
                return self._keep(case, tiles[0])
        return self._keep(case, by_text[entry["tile"]])

    def _keep(self, case: Case, tile: Tile) -> Tile:
        kept: Tile = self.chosen.setdefault(case, tile)
        return kept

    def _measure(self, tiles: Sequence[Tile], run_tile: Callable[[Tile], object]) -> Entry:
        """The entry of the fastest. Raises what the last candidate did, if none runs."""
        milliseconds: dict[Tile, list[float]] = {}
        for index, tile in enumerate(tiles):
            try:
                run_tile(tile)
                milliseconds[tile] = []
            except _failures():
                if not milliseconds and index == len(tiles) - 1:
                    raise
        for _ in range(ROUNDS):
            for tile, times in milliseconds.items():
                times.append(self.timer(functools.partial(run_tile, tile)))
        medians = {tile: statistics.median(times) for tile, times in milliseconds.items()}
        return {
            "tile": str(fastest(medians)),
            "milliseconds": {str(tile): medians.get(tile) for tile in tiles},
            "torch": torch.__version__,
        }


def fastest(milliseconds: Mapping[Tile, float]) -> Tile:
    """The first, unless another takes at most FASTER of its time; then the one that takes least."""
    first, best = next(iter(milliseconds)), min(milliseconds, key=milliseconds.__getitem__)
    return best if milliseconds[best] <= FASTER * milliseconds[first] else first


def choose(
    kernel: str,
    tiles: Sequence[Tile],
    run_tile: Callable[[Tile], object],
    shape: tuple[int, ...],
    *tensors: torch.Tensor,
    **flags: bool,
) -> Tile:
    """The tile to launch `kernel` with.

    Args:
        kernel: its name in the file, and of the direction if it has two.
        tiles: the candidates.
        run_tile: launches with a tile, as often as is asked, and changes only what the launch overwrites.
        shape: of the problem, columns last: candidates are asked what they launch for it.
        tensors: on one device; their dtypes are part of the case.
        flags: what else is compiled in.
    """
    device = tensors[0].device
    if device.type != "cuda" or torch.compiler.is_compiling():
        return tiles[0]
    tuner = program_tuner()
    if tuner is None:
        return tiles[0]
    dtypes = tuple([tensor.dtype for tensor in tensors])
    problem = (kernel, shape, device, dtypes, *flags.values())
    settled: Tile | None = tuner.settled.get(problem)
    if settled is not None:
        return settled
    rounded = tuple(power_of_2_at_least(size) for size in shape)
    case = Case(kernel=kernel, flags=tuple(flags.items()), dtypes=dtypes, shape=rounded, device=device)
    tile = tuner.choose(case, tiles, run_tile)
    if case in tuner.chosen:
        tuner.settled[problem] = tile
    return tile


def launch(
    kernel: str,
    tiles: Sequence[Tile],
    run: Callable[[Tile], Result],
    shape: tuple[int, ...],
    *tensors: torch.Tensor,
    **flags: bool,
) -> Result:
    """`run` with the tile that `choose` gives, on the device of the first tensor.

    run: allocates what it writes and returns it, so that a measurement takes no more memory than a launch.
    """
    with launch_device(tensors[0]):
        return run(choose(kernel, tiles, run, shape, *tensors, **flags))


@functools.cache
def program_tuner() -> Tuner | None:
    """The tuner of these kernels in this process, made at first use; None where nothing is to be tuned."""
    path = program_file()
    if path is None:
        return None
    return Tuner(TuningFile(path), device_milliseconds, _device_text, torch.cuda.is_current_stream_capturing)


def program_file() -> Path | None:
    """The file of the program that these kernels belong to; None where nothing is to be tuned."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return None if named == "off" else Path(named)
    beside = Path(__file__).resolve().parents[1] / FILE_NAME
    # The file itself where it is a link: what is written takes the place of a name.
    return beside.resolve() if beside.exists() else None


def device_milliseconds(run: Callable[[], object]) -> float:
    """Milliseconds that `run` takes on the device, by CUDA events on the current stream."""
    cuda: Any = torch.cuda
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    cuda._sleep(_PAUSE_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


@functools.cache
def _device_text(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return f"{name}, compute capability {major}.{minor}, triton {triton.__version__}"


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that a candidate may fail with: of the compiler, shared memory, or the driver at launch."""
    return RuntimeError, *(() if triton is None else (triton.TritonError,))
