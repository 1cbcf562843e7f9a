"""Count the calls of one training step of ten model families, by a run on a CPU (no GPU is needed).

    python -m benchmarks.family_calls                       count all, in four CPU minutes
    python -m benchmarks.family_calls --family bert t5      count some
    python -m benchmarks.family_calls --family bert --size narrow

Rows replace those of the same family and side in benchmarks/results/family_calls.csv. --size only prints.

Models have the layers of the measured rows and a small width (`families.py`), bf16 with fp32 masters and AdamW. Sides:

    hf          Hugging Face's module in bf16, eager, with torch's fused AdamW on masters
    emitted     the program that autopar emits for one H100, with kernels; Triton's interpreter runs them
    compile     the module under torch.compile: the kernels of inductor's graphs, both ways, and the same AdamW

Columns, per step:

    calls       calls of torch that compute, and launches of Triton. Views and allocations are left out
    launches    kernels that a GPU would start for them: `LAUNCHES` for each call of torch, one for each of Triton
    casts       copies to another dtype
    sorts       sort, argsort, topk, and the sort inside the gradient of an embedding
    masks       calls that make or apply a mask (comparisons, where, masked_fill, triangles)
    reads       values that the host reads (item, tolist, nonzero, ...), on a GPU a wait for the device

The second step is counted: the first one builds tables and checks the batch. Two small depths are
counted, and extended to the layers of the measured rows.

Inductor's kernels are counted in its scheduler after fusion, under the rules of its Triton backend, on CPU tensors: one
per fused node and one per library call. Nothing is compiled: each graph then runs eagerly. Rules that ask for a GPU's
properties (splits of reductions, templates) may differ there.

`LAUNCHES` is read off the kernel rows of shared/data/gpu_h100_families.jsonl (torch 2.11, H100). Gradient copies
(`_foreach_copy_`) and AdamW depend on the width: they take more launches at the measured sizes.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when codegen.kernels is imported
os.environ["AUTOPAR_TUNING"] = "off"

import argparse
import copy
import csv
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.costs.updates import DefaultAdamW
from benchmarks.families import FAMILIES, Size
from benchmarks.hugging_face import HuggingFace
from examples.models import Example

RESULTS = Path(__file__).resolve().parent / "results" / "family_calls.csv"
COLUMNS = ("calls", "launches", "casts", "sorts", "masks", "reads")
SIDES = ("hf", "emitted", "compile")

SORT_LAUNCHES = 10
"""Eight radix passes of an int64 key, a histogram and a prefix sum."""
LAUNCHES = {
    "sort": SORT_LAUNCHES,
    "argsort": SORT_LAUNCHES,
    "topk": 2,
    "embedding_dense_backward": SORT_LAUNCHES + 3,
    "native_layer_norm_backward": 2,
    "native_batch_norm": 2,
    "cudnn_batch_norm": 2,
    # Two or three conversions between NCHW and NHWC surround the kernels of a convolution.
    "convolution": 3,
    "convolution_backward": 4,
    # bprop, the sums of dO O, the conversion of dQ.
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
    "index_put": SORT_LAUNCHES + 1,
    "_index_put_impl_": SORT_LAUNCHES + 1,
    "cumsum": 2,
}
"""Kernels of calls that start more than one on a GPU."""
FOREACH_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors per launch of multi_tensor_apply by its number of lists (ATen/native/cuda/MultiTensorApply.cuh)."""
ALLOCATIONS = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
        "lift_fresh",
        "_unsafe_view",
        "_local_scalar_dense",
        "equal",
    }
)
SORTS = frozenset({"sort", "argsort", "topk", "embedding_dense_backward", "index_put", "_index_put_impl_", "unique2"})
MASKS = frozenset(
    {"where", "masked_fill", "masked_fill_", "tril", "triu", "logical_and", "logical_or", "logical_not"}
    | {"bitwise_and", "bitwise_or", "bitwise_not"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)
HOST_READS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"})
HOST_FUNCTIONS = frozenset({"cpu", "tolist", "numpy"})
"""Methods that read on a GPU, and call no operator on a CPU."""


class Counting(TorchDispatchMode):
    """Count the operators below autograd that are called while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            self._count(func, args, kwargs or {})
        return result

    def _count(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        name = func.overloadpacket.__name__
        self.counts["reads"] += name in HOST_READS
        if func.is_view or name in ALLOCATIONS or not _computes(func):
            return
        self.names[name] += 1
        self.counts["calls"] += 1
        self.counts["launches"] += launches(name, args)
        self.counts["casts"] += _is_cast(name, args, kwargs)
        self.counts["sorts"] += name in SORTS
        self.counts["masks"] += name in MASKS

    def count_launch(self, name: str) -> None:
        """Count a launch of Triton."""
        self.names[f"triton {name}"] += 1
        self.counts["calls"] += 1
        self.counts["launches"] += 1


class HostReads(TorchFunctionMode):
    """Count the methods that read a tensor on the host."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting
        self.on_host: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_FUNCTIONS and not self.counting.is_paused and id(args[0]) not in self.on_host:
            self.counting.counts["reads"] += 1
        result = func(*args, **(kwargs or {}))
        if name == "cpu":
            self.on_host[id(result)] = result
        return result


def launches(name: str, args: Sequence[Any]) -> int:
    """Return the kernels that a GPU starts for one call of torch."""
    if name.startswith(("_foreach_", "_fused_")):
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
        # AdamW: parameters, gradients and two moments; the counts of steps are read by one more kernel.
        depth = 4 if name.startswith("_fused_") else len(lists)
        return -(-len(lists[0]) // FOREACH_TENSORS[min(depth, 5)]) if lists else 1
    return LAUNCHES.get(name, 1)


def _computes(func: Any) -> bool:
    """Return whether an operator makes or changes tensors; the profiler's records and promotions of dtypes do not."""
    return func._schema.is_mutable or any("Tensor" in str(value.type) for value in func._schema.returns)


def _is_cast(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    if name == "_to_copy":
        return kwargs.get("dtype") not in (None, args[0].dtype)
    if name == "copy_":
        return bool(args[0].dtype != args[1].dtype)
    if name == "_foreach_copy_":
        return bool(args[0][0].dtype != args[1][0].dtype)
    return False


@contextmanager
def counted() -> Iterator[Counting]:
    """Count while the context lasts; the interpreter's calls of torch are left out."""
    from triton.runtime.interpreter import GridExecutor

    counting, run = Counting(), GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        counting.count_launch(executor.fn.__name__)
        counting.is_paused = True
        try:
            return run(executor, *args, **kwargs)
        finally:
            counting.is_paused = False

    with mock.patch.object(GridExecutor, "__call__", launched), HostReads(counting), counting:
        yield counting


def emitted_step(example: Example) -> Callable[[], Tensor]:
    """Return a step of the program for one H100."""
    compiled = autopar.compile(
        example.model,
        "1 h100-sxm",
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        optimizer=DefaultAdamW(1e-4),
        precision="bf16",
        kernels="on",
    )
    program = compiled.build()
    local = compiled.local_batch(example.inputs)
    # Not the device's work: this compares the user's model, which stays on the host, with what was compiled.
    program.state_check = None
    for buffers in gc.get_objects():
        if str(type(buffers).__module__).endswith(".runtime.flat") and hasattr(buffers, "moves_at_once"):
            buffers.moves_at_once = False  # as on a GPU

    def step() -> Tensor:
        loss: Tensor = program(local)
        return loss

    return step


def eager_counts(step: Callable[[], Tensor]) -> Counting:
    """Return the counts of the second step."""
    step()
    with counted() as counting:
        step()
    return counting


class _Scheduled(BaseException):
    """Ends the compilation of a graph after its scheduling. No `except Exception` may catch it on its way."""


class Kernels:
    """A backend of torch.compile that counts the kernels of inductor's graphs, and runs the graphs eagerly."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(cpu_backend="triton", force_disable_caches=True):
            return compile_fx(graph, inputs, inner_compile=self._schedule)

    def _schedule(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """Schedule a graph of aten calls. Return the graph, which adds its kernels to the counts when it runs."""
        from functorch.compile import make_boxed_func
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.scheduler import Scheduler

        eager, names = copy.deepcopy(graph), list[str]()

        def stop(scheduler: Any) -> None:
            names.extend(filter(None, map(kernel_name, scheduler.nodes)))
            raise _Scheduled

        with config.patch(cpu_backend="triton"), mock.patch.object(Scheduler, "codegen", stop), suppress(_Scheduled):
            compile_fx_inner(graph, inputs, **options)

        def run(*args: Any) -> Any:
            self._add(names)
            return eager(*args)

        return make_boxed_func(run)

    def _add(self, names: Sequence[str]) -> None:
        self.num_graphs += 1
        for name in names:
            self.names[name] += 1
            self.counts["calls"] += 1
            self.counts["launches"] += launches(name, ())
            self.counts["sorts"] += name in SORTS
            self.counts["reads"] += name in HOST_READS


def kernel_name(node: Any) -> str:
    """Return the operator of a library call, "fused" for a kernel of inductor's, nothing for a node without one."""
    from torch._inductor.scheduler import NopKernelSchedulerNode

    if isinstance(node, NopKernelSchedulerNode):
        return ""
    if not node.is_extern():
        return "fused"
    overload = getattr(node.node, "op_overload", None)
    return overload.overloadpacket.__name__ if hasattr(overload, "overloadpacket") else type(node.node).__name__


def compile_counts(example: Example) -> Kernels:
    """Return the counts of the second step under torch.compile. Calls between two graphs are left out."""
    kernels = Kernels()
    torch._dynamo.reset()
    training = HuggingFace.of(example, lambda model: torch.compile(model, dynamic=False, backend=kernels))
    training.step()
    kernels.counts.clear()
    kernels.names.clear()
    kernels.num_graphs = 0
    training.forward_backward()
    with counted() as counting:
        training.owner.update()
    kernels.counts.update(counting.counts)
    return kernels


def counts_at(family: str, side: str, size: Size) -> Counter[str]:
    """Return the counts of one step at a size, "graphs" among them."""
    example = FAMILIES[family].build(size)
    if side == "compile":
        kernels = compile_counts(example)
        return kernels.counts + Counter(graphs=kernels.num_graphs)
    step = HuggingFace.of(example).step if side == "hf" else emitted_step(example)
    return eager_counts(step).counts


def row_of(family: str, side: str, sizes: Sequence[Size]) -> dict[str, str]:
    """Return a row. sizes: one, whose counts are returned, or ("tiny", "short"), which are extended to all layers."""
    row = dict.fromkeys(("family", "side", "graphs", *COLUMNS, "error"), "") | {"family": family, "side": side}
    try:
        first, *others = (counts_at(family, side, size) for size in sizes)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
        return row
    names = ("graphs", "calls", "launches", "sorts", "reads") if side == "compile" else COLUMNS
    periods = FAMILIES[family].more_periods
    for name in names:
        more = sum(other[name] - first[name] for other in others)
        row[name] = str(first[name] + more * periods)
    return row


def record(rows: Sequence[dict[str, str]]) -> None:
    """Replace the rows of the same families and sides in the table."""
    old = list(csv.DictReader(RESULTS.open(encoding="utf-8"))) if RESULTS.exists() else []
    table = {(row["family"], row["side"]): row for row in (*old, *rows)}
    order = [(family, side) for family in FAMILIES for side in SIDES]
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[key] for key in order if key in table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--side", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument(
        "--size", choices=("tiny", "narrow"), help="count this size alone; all of narrow takes ten minutes"
    )
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    sizes: tuple[Size, ...] = (options.size,) if options.size else ("tiny", "short")
    rows = []
    for family in options.family:
        for side in options.side:
            started = time.process_time()
            rows.append(row := row_of(family, side, sizes))
            print(" ".join(f"{row[name]:>9}" for name in row), f"{time.process_time() - started:6.1f} s", flush=True)
    if not options.size:
        record(rows)
    return 1 if any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
