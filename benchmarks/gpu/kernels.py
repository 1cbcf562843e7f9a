"""Are the Triton kernels right on this GPU, and faster than eager torch and torch.compile?

    python -m benchmarks.gpu.kernels            # from the repository's root, on a machine with one GPU; six minutes
    python -m benchmarks.gpu.kernels --smoke    # anywhere: the same checks on tiny shapes, interpreted, untimed

First every kernel is compared with the same formula in fp64, several kernels at a time, with the first candidates of
its launch parameters. Then each implementation is timed forward and forward + backward with CUDA events, the L2 cache
flushed before each repetition, after a pause that covers the time that the host takes to enqueue it. Here our kernels
choose their launch parameters as in a program (codegen/kernels/tuning.py), anew in every run, and each choice is
printed; --tuning keeps them in a file, or leaves the first candidates with "off"; what is timed is compared with fp64
before. Achieved bytes per second count each input read once and each output written once, whatever an implementation
really moves, beside the bandwidth of a large device-to-device copy measured in the same process. What consists of
matrix products is also compared with the rate of a large bf16 product (printed: rate and share follow from a row's
shape and seconds; a share of fp8 products may exceed 1). liger-kernel is timed too where it is installed.

Rows are appended to benchmarks/results/kernels.csv as they are measured; --kernels picks some of them. What fails is a
row with its error and ends nothing else (isolated.py), but the exit code is 1. What --seconds leave no time for is
named at the end.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Run by its path, a script has its own folder first, and there `profile` would hide a standard module.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.gpu.cases.case import BOTH, FORWARD, TOLERANCE, Case, Operation, Shape
from benchmarks.gpu.cases.every import KERNELS, make_case
from benchmarks.gpu.isolated import Outcome, outcomes
from benchmarks.table import append

RESULTS = Path(__file__).resolve().parents[1] / "results" / "kernels.csv"
CHECKING_PROCESSES = 6
ITEM_SECONDS = 150.0
"""Of one kernel's checks, or of one shape: some ten times what is expected."""
FASTEST_CLOCK = 2e9
"""Cycles per second, at least what GPUs of today run at: a pause of so many lasts a second or more."""
FIELDS = (
    "date",
    "device",
    "torch",
    "triton",
    "kernel",
    "implementation",
    "direction",
    "shape",
    "dtype",
    "num_repeats",
    "median_seconds",
    "interquartile_seconds",
    "bytes_per_second",
    "copy_bytes_per_second",
    "relative_error",
    "error",
)


def relative_error(case: Case) -> float:
    """The largest ||out - ref|| / ||ref|| over the output and each gradient, ref in fp64; nan never passes."""
    errors = _errors(case) if case.exact_error is None else [case.exact_error()]
    worst = max(errors) if all(error == error for error in errors) else float("nan")
    if not worst <= (TOLERANCE[case.dtype] if case.tolerance is None else case.tolerance):
        raise RuntimeError(f"{case.kernel} {case.shape} {case.dtype}: relative errors {errors}")
    return worst


def _errors(case: Case) -> list[float]:
    out = _outputs(case.fused(*case.inputs))
    if not all(isinstance(o.grad_fn, torch.autograd.function.BackwardCFunction) for o in out):
        raise RuntimeError(f"{case.kernel}: the torch reference ran, not the kernel")
    grad_out = [torch.randn_like(o) for o in out]
    actual = [*out, *torch.autograd.grad(out, case.differentiable, grad_out)]
    exact_inputs = [t.detach().double().requires_grad_() if t.requires_grad else t for t in case.inputs]
    exact = _outputs(case.eager(*exact_inputs))
    leaves = [t for t in exact_inputs if t.requires_grad]
    wanted = [*exact, *torch.autograd.grad(exact, leaves, [g.double() for g in grad_out])]
    return [((a.double() - w).norm() / w.norm()).item() for a, w in zip(actual, wanted, strict=True)]


def _outputs(out: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (out,) if isinstance(out, torch.Tensor) else out


def time_seconds(work: Callable[[], object], num_repeats: int) -> list[float]:
    """Seconds on the device of each repetition, after warm-up (compilation, allocator), on a cold L2 cache."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")  # larger than any L2 cache of today
    host_seconds = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        host_seconds = time.perf_counter() - started
    seconds = []
    for _ in range(num_repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        # The device waits while the host enqueues, so that no launch latency is in the figure.
        torch.cuda._sleep(int(FASTEST_CLOCK * (2 * host_seconds + 1e-4)))
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def copy_bytes_per_second(num_repeats: int) -> float:
    """Bytes read plus written per second by a 1 GiB copy within the device."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(time_seconds(lambda: target.copy_(source), num_repeats))


def product_flops_per_second(num_repeats: int) -> float:
    """Of a bf16 matrix product large enough to fill the device."""
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / statistics.median(time_seconds(lambda: torch.mm(a, b), num_repeats))


def implementations(case: Case) -> dict[str, Operation]:
    """Ours, the same formula in eager torch, that formula under torch.compile, and what others have for it.

    An optimiser's step is not compiled: torch has a fused one to compare with.
    """
    compiled = {"compile": torch.compile(case.eager, dynamic=False)} if case.inputs else {}
    return {"triton": case.fused, "eager": case.eager, **compiled, **case.others}


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel at a shape that is timed."""

    kernel: str
    shape: Shape
    num_repeats: int
    output: Path


@functools.cache
def rates(num_repeats: int) -> tuple[float, float]:
    """(bytes per second of a copy, FLOP/s of a product) of this process' GPU, printed when they are measured."""
    copy, product = copy_bytes_per_second(num_repeats), product_flops_per_second(num_repeats)
    print(f"copy: {copy / 1e9:.0f} GB/s; bf16 products: {product / 1e12:.0f} TFLOP/s", flush=True)
    return copy, product


def row_of(kernel: str, shape: Shape, **measured: object) -> dict[str, object]:
    """A CSV row, empty where nothing was measured."""
    import triton

    known = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernel": kernel,
        "shape": "x".join(map(str, shape)),
    }
    return dict.fromkeys(FIELDS, "") | known | measured


def measure(case: Case, num_repeats: int, error: float) -> Iterator[dict[str, object]]:
    """One CSV row per implementation and direction, or per implementation that raises."""
    for name, operation in implementations(case).items():
        try:
            yield from _measure(case, name, operation, num_repeats, error)
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
            print(f"  {name:17} {reason}", flush=True)
            yield row_of(case.kernel, case.shape, implementation=name, dtype=_text(case.dtype), error=reason)
        # Where the device is broken, this raises: nothing more can be measured in this process.
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


def _measure(
    case: Case, name: str, operation: Operation, num_repeats: int, error: float
) -> Iterator[dict[str, object]]:
    copy_rate, product_rate = rates(num_repeats)

    def forward() -> None:
        operation(*case.inputs)

    works: dict[str, Callable[[], None]] = {FORWARD: forward}
    if case.differentiable:
        grad_out = [torch.randn_like(out) for out in _outputs(operation(*case.inputs))]

        def both() -> None:
            torch.autograd.grad(_outputs(operation(*case.inputs)), case.differentiable, grad_out)

        works[BOTH] = both
    for direction, work in works.items():
        seconds = time_seconds(work, num_repeats)
        quartiles = statistics.quantiles(seconds, n=4)
        median = statistics.median(seconds)
        num_bytes = case.num_bytes_moved[direction]
        share = f"{num_bytes / median / copy_rate:5.0%} of copy"
        if case.num_flops:
            share += f"  {case.num_flops[direction] / median / product_rate:5.0%} of bf16 products"
        rate = f"{num_bytes / median / 1e9:7.0f} GB/s"
        print(f"  {name:17} {direction:17} {median * 1e6:9.1f} us  {rate}  {share}", flush=True)
        yield row_of(
            case.kernel,
            case.shape,
            implementation=name,
            direction=direction,
            dtype=_text(case.dtype),
            num_repeats=num_repeats,
            median_seconds=f"{median:.4e}",
            interquartile_seconds=f"{quartiles[2] - quartiles[0]:.1e}",
            bytes_per_second=f"{num_bytes / median:.4e}",
            copy_bytes_per_second=f"{copy_rate:.4e}",
            relative_error=f"{error:.1e}" if name == "triton" else "",
        )


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def time_shape(timed: Timed) -> None:
    """Compares a kernel with fp64 at a shape that is timed, times all implementations and appends the rows."""
    from codegen.kernels.tuning import program_tuner

    torch.manual_seed(0)
    torch._dynamo.reset()  # compiled formulas of earlier shapes count against a limit
    tuner = program_tuner()
    known = set(tuner.chosen) if tuner else set()
    rates(timed.num_repeats)
    case = make_case(timed.kernel, timed.shape, torch.bfloat16, "cuda")
    error = relative_error(case)
    print(f"{timed.kernel} {timed.shape} bfloat16: relative error {error:.1e}", flush=True)
    for row in measure(case, timed.num_repeats, error):
        append([row], timed.output)
    for chosen, tile in (tuner.chosen if tuner else {}).items():
        if chosen not in known:
            print(f"  {chosen}: {tile}", flush=True)


def check_kernel(kernel: str) -> None:
    """Compares a kernel with fp64 at every shape to check and dtype."""
    torch.manual_seed(0)
    check({kernel: KERNELS[kernel].checked}, "cuda")


def check(shapes: Mapping[str, tuple[Shape, ...]], device: str) -> None:
    """Compares every kernel with fp64 at every shape and dtype; raises RuntimeError at the first that is off."""
    for kernel, kernel_shapes in shapes.items():
        for shape in kernel_shapes:
            for dtype in TOLERANCE:
                error = relative_error(make_case(kernel, shape, dtype, device))
                print(f"{kernel} {shape} {dtype}: relative error {error:.1e}", flush=True)


def main(arguments: list[str]) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes in Triton's interpreter, no timing, no CSV")
    parser.add_argument("--num-repeats", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=450.0, help="after which nothing more is begun")
    parser.add_argument("--output", type=Path, default=RESULTS, help="CSV to append to")
    parser.add_argument(
        "--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), metavar="KERNEL", help=", ".join(KERNELS)
    )
    parser.add_argument("--tuning", metavar="FILE", help='of launch parameters to read and add to, or "off"')
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
        check({kernel: KERNELS[kernel].interpreted for kernel in options.kernels}, "cpu")
        return
    if not torch.cuda.is_available():
        parser.error("no CUDA device; --smoke runs without one")
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        tuning = options.tuning or str(Path(folder) / "tuning.json")
        failed = run(options.kernels, options.num_repeats, options.output, tuning, deadline)
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))


def run(kernels: list[str], num_repeats: int, output: Path, tuning: str, deadline: float) -> list[str]:
    """Checks and times `kernels`, and appends the rows to `output`; a line for each that fails."""
    failed = []
    for kernel, found in zip(kernels, check_all(kernels, deadline), strict=True):
        if found.error:
            print(found.error, flush=True)
            failed.append(f"{kernel}, checks: {found.reason}")
            append([row_of(kernel, (), error=f"checks: {found.reason}")], output)
    os.environ["AUTOPAR_TUNING"] = tuning
    items = [Timed(kernel, shape, num_repeats, output) for kernel in kernels for shape in KERNELS[kernel].timed]
    for found in outcomes(time_shape, items, ITEM_SECONDS, deadline):
        if found.error:
            print(found.error, flush=True)
            failed.append(f"{found.item.kernel} {found.item.shape}: {found.reason}")
            append([row_of(found.item.kernel, found.item.shape, error=found.reason)], output)
    return failed


def check_all(kernels: list[str], deadline: float) -> list[Outcome]:
    """What became of the checks of each kernel. Several processes share the GPU: nearly all time is compilation."""
    os.environ["AUTOPAR_TUNING"] = "off"
    groups = [kernels[first::CHECKING_PROCESSES] for first in range(CHECKING_PROCESSES)]
    with ThreadPoolExecutor(CHECKING_PROCESSES) as pool:
        done = pool.map(lambda group: list(outcomes(check_kernel, group, ITEM_SECONDS, deadline)), groups)
        found = {each.item: each for group in done for each in group}
    return [found[kernel] for kernel in kernels]


if __name__ == "__main__":
    main(sys.argv[1:])
