"""Are the Triton kernels right on this GPU, and faster than eager torch and torch.compile?

    python -m benchmarks.gpu.kernels            # from the repository's root, on a machine with one GPU
    python -m benchmarks.gpu.kernels --smoke    # anywhere: the same checks on tiny shapes, interpreted, untimed

Our kernels choose their launch parameters as in a program (codegen/kernels/tuning.py), anew in every run, and each
choice is printed; --tuning keeps them in a file, or leaves the first candidates with "off". First every kernel is
compared with the same formula in fp64; any error above the tolerance ends the run. Then each implementation is timed
forward and forward + backward with CUDA events, the L2 cache flushed before each repetition. Achieved bytes per second
count each input read once and each output written once, whatever an implementation really moves, beside the bandwidth
of a large device-to-device copy measured in the same run. What consists of matrix products is also compared with the
rate of a large bf16 product (printed: rate and share follow from a row's shape and seconds; a share of fp8 products may
exceed 1). liger-kernel is timed too where it is installed. Rows are appended to benchmarks/results/kernels.csv;
--kernels picks some of them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.gpu.cases.case import BOTH, FORWARD, TOLERANCE, Case, Operation, Shape
from benchmarks.gpu.cases.every import KERNELS, make_case
from benchmarks.table import append

RESULTS = Path(__file__).parents[1] / "results" / "kernels.csv"
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
    for _ in range(3):
        work()
    seconds = []
    for _ in range(num_repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The flush also keeps the device busy while the host enqueues, so launch latency stays out of the figure
        # as long as it is shorter than the flush.
        flush.zero_()
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


def measure(
    case: Case, num_repeats: int, copy_rate: float, product_rate: float, error: float
) -> list[dict[str, object]]:
    """One CSV row per implementation and direction."""
    import triton

    rows = []
    for name, operation in implementations(case).items():

        def forward(operation: Operation = operation) -> None:
            operation(*case.inputs)

        works: dict[str, Callable[[], None]] = {FORWARD: forward}
        if case.differentiable:
            grad_out = [torch.randn_like(out) for out in _outputs(operation(*case.inputs))]

            def both(operation: Operation = operation, grad_out: list[torch.Tensor] = grad_out) -> None:
                torch.autograd.grad(_outputs(operation(*case.inputs)), case.differentiable, grad_out)

            works[BOTH] = both
        for direction, work in works.items():
            seconds = time_seconds(work, num_repeats)
            quartiles = statistics.quantiles(seconds, n=4)
            median = statistics.median(seconds)
            num_bytes = case.num_bytes_moved[direction]
            values = (
                datetime.datetime.now(datetime.UTC).date().isoformat(),
                torch.cuda.get_device_name(),
                torch.__version__,
                triton.__version__,
                case.kernel,
                name,
                direction,
                "x".join(map(str, case.shape)),
                str(case.dtype).removeprefix("torch."),
                num_repeats,
                f"{median:.4e}",
                f"{quartiles[2] - quartiles[0]:.1e}",
                f"{num_bytes / median:.4e}",
                f"{copy_rate:.4e}",
                f"{error:.1e}" if name == "triton" else "",
            )
            rows.append(dict(zip(FIELDS, values, strict=True)))
            share = f"{num_bytes / median / copy_rate:5.0%} of copy"
            if case.num_flops:
                share += f"  {case.num_flops[direction] / median / product_rate:5.0%} of bf16 products"
            print(f"  {name:17} {direction:17} {median * 1e6:9.1f} us  {num_bytes / median / 1e9:7.0f} GB/s  {share}")
    return rows


def print_choices(printed: set[object]) -> None:
    """What launch parameters were chosen and are not yet among `printed`, which they then are."""
    from codegen.kernels.tuning import program_tuner

    tuner = program_tuner()
    for case, tile in (tuner.chosen if tuner else {}).items():
        if case not in printed:
            printed.add(case)
            print(f"  {case}: {tile}")


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
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_TUNING"] = options.tuning or str(Path(folder) / "tuning.json")
        run(options.kernels, options.num_repeats, options.output)


def run(kernels: list[str], num_repeats: int, output: Path) -> None:
    """Checks and times `kernels`, and appends the rows to `output`."""
    check({kernel: KERNELS[kernel].checked for kernel in kernels}, "cuda")
    printed: set[object] = set()
    copy_rate = copy_bytes_per_second(num_repeats)
    product_rate = product_flops_per_second(num_repeats)
    print(f"copy: {copy_rate / 1e9:.0f} GB/s; bf16 products: {product_rate / 1e12:.0f} TFLOP/s")
    for kernel in kernels:
        for shape in KERNELS[kernel].timed:
            case = make_case(kernel, shape, torch.bfloat16, "cuda")
            error = relative_error(case)
            print(f"{kernel} {shape} bfloat16: relative error {error:.1e}", flush=True)
            rows = measure(case, num_repeats, copy_rate, product_rate, error)
            print_choices(printed)
            append(rows, output)


if __name__ == "__main__":
    main(sys.argv[1:])
