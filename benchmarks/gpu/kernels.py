"""Are the Triton kernels right on this GPU, and faster than eager torch and torch.compile?

    python -m benchmarks.gpu.kernels            # from the repository's root, on a machine with one GPU
    python -m benchmarks.gpu.kernels --smoke    # anywhere: the same checks on tiny shapes, interpreted, untimed

First every kernel is compared with the same formula in fp64; any error above the tolerance ends the run. Then each
implementation is timed forward and forward + backward with CUDA events, the L2 cache flushed before each repetition.
Achieved bytes per second count each input read once and each output written once, whatever an implementation really
moves, beside the bandwidth of a large device-to-device copy measured in the same run. Rows are appended to
benchmarks/results/kernels.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

Operation = Callable[..., torch.Tensor]
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
# Relative error in norm against fp64: a few roundings of the storage dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape.

    num_elements_moved maps "forward" and "forward+backward" to the fewest elements of `dtype` that device memory must
    move; vectors (weight, target, loss) are left out.
    """

    kernel: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[torch.Tensor, ...]
    fused: Operation
    eager: Operation
    num_elements_moved: dict[str, int]

    @property
    def differentiable(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in self.inputs if tensor.requires_grad)


def make_case(kernel: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """Fresh random inputs of `kernel` at `shape`; imported here because --smoke must set the interpreter first."""
    from codegen.kernels import cross_entropy, rms_norm, swiglu
    from codegen.kernels.cross_entropy import cross_entropy_reference
    from codegen.kernels.rms_norm import rms_norm_reference
    from codegen.kernels.swiglu import swiglu_reference

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device).requires_grad_()

    size = torch.Size(shape).numel()
    if kernel == "rms_norm":
        # Forward reads x, writes y; backward reads x and dy, writes dx.
        moved = {"forward": 2 * size, "forward+backward": 5 * size}
        inputs = (random(*shape), random(shape[-1]))
        return Case(kernel, shape, dtype, inputs, _with_eps(rms_norm), _with_eps(rms_norm_reference), moved)
    if kernel == "swiglu":
        # Forward reads two, writes one; backward reads three, writes two.
        moved = {"forward": 3 * size, "forward+backward": 8 * size}
        return Case(kernel, shape, dtype, (random(*shape), random(*shape)), swiglu, swiglu_reference, moved)
    if kernel == "cross_entropy":
        # Forward reads the logits; backward reads them again and writes their gradient.
        moved = {"forward": size, "forward+backward": 3 * size}
        target = torch.randint(shape[1], shape[:1], device=device)
        target[::7] = -100
        return Case(kernel, shape, dtype, (random(*shape), target), cross_entropy, cross_entropy_reference, moved)
    raise ValueError(f"no kernel {kernel!r}; there are rms_norm, swiglu, cross_entropy")


def _with_eps(operation: Operation) -> Operation:
    return lambda x, weight: operation(x, weight, 1e-6)


def relative_error(case: Case) -> float:
    """The largest ||out - ref|| / ||ref|| over the output and each gradient, ref in fp64; nan never passes."""
    out = case.fused(*case.inputs)
    if not isinstance(out.grad_fn, torch.autograd.function.BackwardCFunction):
        raise RuntimeError(f"{case.kernel}: the torch reference ran, not the kernel")
    grad_out = torch.randn_like(out)
    actual = [out, *torch.autograd.grad(out, case.differentiable, grad_out)]
    exact_inputs = [t.detach().double().requires_grad_() if t.requires_grad else t for t in case.inputs]
    exact = case.eager(*exact_inputs)
    wanted = [exact, *torch.autograd.grad(exact, [t for t in exact_inputs if t.requires_grad], grad_out.double())]
    errors = [((a.double() - w).norm() / w.norm()).item() for a, w in zip(actual, wanted, strict=True)]
    worst = max(errors) if all(error == error for error in errors) else float("nan")
    if not worst <= TOLERANCE[case.dtype]:
        raise RuntimeError(f"{case.kernel} {case.shape} {case.dtype}: relative errors {errors}")
    return worst


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


def implementations(case: Case) -> dict[str, Operation]:
    """Ours, the same formula in eager torch, and that formula under torch.compile."""
    return {"triton": case.fused, "eager": case.eager, "compile": torch.compile(case.eager, dynamic=False)}


def measure(case: Case, num_repeats: int, copy_rate: float, error: float) -> list[dict[str, object]]:
    """One CSV row per implementation and direction."""
    import triton

    rows = []
    for name, operation in implementations(case).items():
        grad_out = torch.randn_like(operation(*case.inputs))

        def forward(operation: Operation = operation) -> None:
            operation(*case.inputs)

        def both(operation: Operation = operation, grad_out: torch.Tensor = grad_out) -> None:
            torch.autograd.grad(operation(*case.inputs), case.differentiable, grad_out)

        for direction, work in (("forward", forward), ("forward+backward", both)):
            seconds = time_seconds(work, num_repeats)
            quartiles = statistics.quantiles(seconds, n=4)
            median = statistics.median(seconds)
            num_bytes = case.num_elements_moved[direction] * case.dtype.itemsize
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
            share = num_bytes / median / copy_rate
            print(
                f"  {name:8} {direction:17} {median * 1e6:9.1f} us  {num_bytes / median / 1e9:7.0f} GB/s  "
                f"{share:5.0%} of copy",
                flush=True,
            )
    return rows


def append_rows(rows: list[dict[str, object]], path: Path) -> None:
    """Appends to the CSV, with a header where the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


# Checked, not timed: odd sizes, rows shared by a tile, rows longer than the largest tile. No shape whose exact gradient
# is 0: the error is relative.
ODD_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rms_norm": [(1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)],
    "swiglu": [(1, 1), (3, 7), (2, 3, 65), (130, 5001)],
    "cross_entropy": [(4, 2), (3, 7), (70, 1000), (33, 50257)],
}
SMOKE_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rms_norm": [(3, 7), (2, 3, 65)],
    "swiglu": [(3, 7), (2, 3, 65)],
    "cross_entropy": [(3, 7), (5, 65)],
}
# Llama 3 8B's (tokens, hidden), (tokens, intermediate), (tokens, vocabulary); a query-key norm; 405B's hidden.
TIMED_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rms_norm": [(8192, 4096), (8192 * 32, 128), (8192, 16384)],
    "swiglu": [(8192, 14336)],
    "cross_entropy": [(4096, 128256)],
}


def check(shapes: dict[str, list[tuple[int, ...]]], device: str) -> None:
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
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
        check(SMOKE_SHAPES, "cpu")
        return
    if not torch.cuda.is_available():
        parser.error("no CUDA device; --smoke runs without one")
    check(ODD_SHAPES, "cuda")
    copy_rate = copy_bytes_per_second(options.num_repeats)
    print(f"copy: {copy_rate / 1e9:.0f} GB/s")
    for kernel, shapes in TIMED_SHAPES.items():
        for shape in shapes:
            case = make_case(kernel, shape, torch.bfloat16, "cuda")
            error = relative_error(case)
            print(f"{kernel} {shape} bfloat16: relative error {error:.1e}", flush=True)
            append_rows(measure(case, options.num_repeats, copy_rate, error), options.output)


if __name__ == "__main__":
    main(sys.argv[1:])
