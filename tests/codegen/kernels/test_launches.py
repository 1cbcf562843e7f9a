"""Launches of compiled kernels without a GPU: Triton compiles for an H100, and a stub stands for the driver.

A later launch must start what Triton would, and cost the host less.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from codegen.kernels import dispatch, tuning
from codegen.kernels.dispatch import jit, tl
from codegen.kernels.tile import Tile
from codegen.kernels.tuning_file import TuningFile

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(dispatch.INTERPRETING, reason="kernels are interpreted in this process")
GRID = (4, 2)


@jit
def _copy_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    absent_ptr: tl.tensor,
    size: tl.tensor,
    factor: tl.tensor,
    BLOCK: tl.constexpr,
    IS_ADDED: tl.constexpr,
) -> None:
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = offsets < size
    x = tl.load(x_ptr + offsets, mask=ok, other=0.0)
    if IS_ADDED:
        x += tl.load(y_ptr + offsets, mask=ok, other=0.0)
    tl.store(y_ptr + offsets, x * factor, mask=ok)


class Driver:
    """An H100's driver that starts nothing. started: (compiled function, grid, arguments) of all launches."""

    def __init__(self) -> None:
        functions = itertools.count(1)
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, next(functions), 32, 0, 1024),
            unload_module=lambda *_: None,
            get_device_properties=lambda _: properties,
        )
        self.started: list[tuple[int, tuple[int, ...], tuple[Any, ...]]] = []

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        def start(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            self.started.append((function, (x, y, z), rest[4:]))

        return start

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The stub as Triton's driver. Compiled files go to a folder of the test's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stub, before = Driver(), dict(vars(triton.runtime.driver))
    triton.runtime.driver.set_active(stub)
    _copy_kernel.launches.clear()
    _copy_kernel.device_caches.clear()
    yield stub
    _copy_kernel.launches.clear()
    _copy_kernel.device_caches.clear()
    vars(triton.runtime.driver).update(before)


def launches() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Positional arguments and constants that Triton compiles for, one kind of argument after another."""
    x, y = torch.zeros(2, 80)
    constants = {"BLOCK": 32, "IS_ADDED": False, "num_warps": 4}
    for size in (1, 15, 16, 0, 2**31 - 1, 2**31, 2**31 + 16, 2**63 - 1, 2**63, -1, -16, -(2**31), -(2**31) - 1):
        yield (x, y, None, size, 0.5), constants
    for tensor in (x[1:], x.half(), x.bfloat16(), x.half()[1:], torch.nn.Parameter(x)):
        yield (tensor, y, None, 80, 0.5), constants
    yield (x, y, x, 80, 2.0), constants
    yield (x, y, None, 80, 3), constants
    yield (x, y, None, 80, 0.5), constants | {"BLOCK": 64}
    yield (x, y, None, 80, 0.5), constants | {"IS_ADDED": True}
    yield (x, y, None, 80, 0.5), constants | {"num_warps": 8}


def test_a_later_launch_starts_what_triton_would(driver, monkeypatch):
    """Of every kind of arguments, after all others were launched."""
    cases = list(launches())
    for args, constants in cases:
        _copy_kernel[GRID](*args, **constants)
    wanted = [
        triton.JITFunction.run(_copy_kernel, *args, grid=GRID, warmup=False, **constants).function
        for args, constants in cases
    ]
    assert len(set(wanted)) >= 12, "the cases are not told apart"
    monkeypatch.setattr(triton.JITFunction, "run", lambda *_, **__: pytest.fail("Triton was asked again"))
    driver.started.clear()
    for args, constants in cases:
        _copy_kernel[GRID](*args, **constants)
    assert [function for function, _, _ in driver.started] == wanted
    for (args, _), (_, grid, passed) in zip(cases, driver.started, strict=True):
        assert grid == (*GRID, 1)
        assert len(passed) == len(_copy_kernel.params) and all(a is b for a, b in zip(args, passed, strict=False))


def least_seconds(*runs: Callable[[], object]) -> list[float]:
    """CPU seconds of 300 runs, the least of rounds in which they take turns."""
    least = [float("inf")] * len(runs)
    for _ in range(9):
        for index, run in enumerate(runs):
            start = time.process_time()
            for _ in range(300):
                run()
            least[index] = min(least[index], time.process_time() - start)
    return least


def test_a_later_launch_takes_less_than_tritons(driver):
    """Half of it, when this was written."""
    args, constants = next(launches())
    ours, tritons = least_seconds(
        lambda: _copy_kernel[GRID](*args, **constants),
        lambda: triton.JITFunction.run(_copy_kernel, *args, grid=GRID, warmup=False, **constants),
    )
    assert ours <= 0.8 * tritons, ours / tritons


class OnDevice:
    """As much of a tensor on a GPU as a launch looks at."""

    device, dtype, is_cuda = torch.device("cuda", 0), torch.float16, True

    @staticmethod
    def get_device() -> int:
        return 0


def test_a_later_choice_looks_a_tuple_up(tmp_path, monkeypatch):
    tiles = (Tile(4096), Tile(2048))
    tuner = tuning.Tuner(TuningFile(tmp_path / "file"), lambda run: 1.0, lambda _: "device", lambda: False)
    monkeypatch.setattr(tuning, "program_tuner", lambda: tuner)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def launch(shape: tuple[int, int] = (1000, 8192)) -> Tile:
        return tuning.launch("norm", tiles, lambda tile: tile, shape, OnDevice, dx=True, dw=False)

    assert launch() == tiles[0]
    before = len(tuner.chosen)
    with monkeypatch.context() as context:
        context.setattr(tuning.Tuner, "choose", lambda *_: pytest.fail("the choice was looked for again"))
        context.setattr(tuning, "Case", lambda *_, **__: pytest.fail("a case was written"))
        assert launch() == tiles[0]
    assert launch((900, 8192)) == tiles[0] and len(tuner.chosen) == before, "another case than (1000, 8192)"


def test_while_a_graph_is_captured_nothing_is_kept(tmp_path, monkeypatch):
    capturing = [True]
    tuner = tuning.Tuner(
        TuningFile(tmp_path / "file"), lambda run: run.args[0].most, lambda _: "d", lambda: capturing[0]
    )
    monkeypatch.setattr(tuning, "program_tuner", lambda: tuner)
    tiles = (Tile(4096), Tile(2048))

    def choose() -> Tile:
        return tuning.choose("norm", tiles, lambda tile: None, (1024, 8192), OnDevice)

    assert choose() == tiles[0]
    capturing[0] = False
    assert choose() == tiles[1], "the unmeasured choice was kept"


@pytest.mark.parametrize("current", [0, 1])
def test_the_device_is_made_current_where_it_is_not(current, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    context = dispatch.launch_device(OnDevice)
    assert isinstance(context, torch.cuda.device if current else contextlib.nullcontext)
    assert isinstance(dispatch.launch_device(torch.zeros(1)), contextlib.nullcontext)
