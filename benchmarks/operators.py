"""The predicted time of transformer sub-layers against times that others measured, by device, sub-layer and pass.

    python -m benchmarks.operators [--rows] [--csv] [--leave-one-out] [--fit]

Table: ../shared/data/measured_ops.json, which is Dazz993/Mist's run of Aceso's op profiler (microsoft/SuperScaler,
branch EuroSys24AE, profiler/op_profiler.py and runtime/megatron/model/flex_ops.py, with Mist's super_scaler.patch) on
one layer of GPT: fp16, sequences of 4096 (A100) or 2048 tokens, attention with a fused causal softmax but no flash
kernel. What the profiler does decides what its times mean:

* 40 calls (10 where one takes over 5 ms) between two synchronisations, by the host's clock: below about 0.1 ms forward
  and 0.2 ms backward the host is timed, not the GPU. Such rows are skipped.
* Backward asks for the gradients of the inputs only: no weight gradient, except in the A10G rows, whose linear layers
  take twice as long and hence make both. Its incoming gradients come from a max-pool and are zero nearly everywhere.
  Zeros draw little power, so that a GPU at its power limit clocks higher than in training: efficiencies are fitted to
  forward rows.
* Under tensor parallelism, forward of row-parallel and backward of column-parallel layers contains an all_reduce:
  skipped.
* Only the L4 (72 W) changes its rate while it is timed: linear layers below 1 ms (40 ms of load) end before its power
  limit acts: skipped.

Errors are |predicted / measured - 1| of seconds; bias is the median of predicted / measured - 1. `--fit` prints the
constants of FITTED refitted to all forward rows; `--leave-one-out` gives every device what was fitted to the others.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models import catalog
from cost_models.compute import Work, seconds
from cost_models.hardware import Device

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT.parent / "shared" / "data" / "measured_ops.json"
RESULTS = ROOT / "benchmarks" / "results" / "operators.csv"

DEVICES = {
    "a100-sxm4-40gb": ("a100-40g", 4096),
    "a100-sxm4-40gb-larger-model": ("a100-40g", 4096),
    "v100-sxm2-32gb-seq2048": ("v100-32g", 2048),
    "a10g": ("a10g", 2048),
    "l4": ("l4", 2048),
}
"""Cluster of a row -> its device and tokens per sequence."""

MODELS = {
    "gpt-1.3B": (2048, 32), "gpt-2.6B": (2560, 32), "gpt-6.7B": (4096, 32), "gpt-13B": (5120, 40),
    "gpt-20B": (6144, 64), "gpt-22B": (6144, 64), "gpt-40B": (8192, 64),
}  # fmt: skip
"""Hidden size and attention heads (Mist's patch of profiler/model_configs.py)."""

VOCABULARY = 51200
HOST_SECONDS = {"forward": 1e-4, "backward": 2e-4}
POWER_LIMITED = {"l4": 1e-3}
OUTLIER = 10.0
"""Times this many times the predicted ones contain something else: the first call of a process."""

SKIPPED = {
    "encoder-embedding": "all token ids are zero, so that its backward adds every row to one",
    "final-layernorm": "the profiler transposes and copies its own input once more in every call",
}

NORM_BYTES = {"l4": (4, 16)}
"""Per element. Apex's kernels read the rows twice forward (2 + 2 + 2), and backward twice for the input (8 + 2) and
once for the weights (4), after which the residual's gradient is added (6). The L4's rows fit one reading only."""

Kernels = list[Work]


@dataclass(frozen=True, slots=True)
class Row:
    """One timed pass of one sub-layer, and the kernels that it runs."""

    device: str
    layer: str
    which: str
    model: str
    micro_batch: int
    tensor_parallel: int
    measured: float
    kernels: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one layer on one rank. heads: of this rank, times the micro-batch; each has sequence x sequence scores."""

    tokens: int
    hidden: int
    ways: int
    heads: int
    sequence: int
    head_dim: int
    device: str


def main() -> None:
    """Prints errors per device, sub-layer and pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--csv", action="store_true", help=f"rewrite {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--leave-one-out", action="store_true", help="every device with the constants of the others")
    parser.add_argument("--fit", action="store_true", help="print the constants refitted to all forward rows")
    args = parser.parse_args()
    rows, skipped = read_rows()
    print(f"{len(rows)} rows; constants of the model: {num_constants()}")
    for reason, count in sorted(skipped.items()):
        print(f"  skipped {count:5d}  {reason}")
    summary = list(summaries(rows, catalog.device, "fitted"))
    if args.rows:
        for row in rows:
            predicted = predict(row, catalog.device(row.device))
            print(
                f"{row.device:9s} {row.model:9s} mbs{row.micro_batch} tp{row.tensor_parallel} {row.layer:28s}"
                f" {row.which:8s} {row.measured * 1e6:9.0f} us  {predicted / row.measured - 1:+.1%}"
            )
    if args.fit:
        for name, device in fit(rows, sorted({row.device for row in rows})).items():
            print(
                f"{name:9s} matmul_efficiency {device.matmul_efficiency:.3f} memory_efficiency"
                f" {device.memory_efficiency:.3f} output_exposed {device.output_exposed}"
            )
    if args.leave_one_out:
        for name in sorted({row.device for row in rows}):
            family = left_out(rows, name)
            summary += summaries([r for r in rows if r.device == name], lambda _, family=family: family, "left out")
    for line in summary:
        print("{:9s} {:30s} {:9s} {:9s} n {:4d}  median {:6.1%}  p90 {:6.1%}  bias {:+6.1%}".format(*line))
    if args.csv:
        write(summary)


# --- what the rows contain --------------------------------------------------------------------------------------------


def read_rows() -> tuple[list[Row], dict[str, int]]:
    """The rows that tell something about a device, and how many do not, by reason."""
    rows: list[Row] = []
    skipped: dict[str, int] = {}
    for table in json.loads(TABLE.read_text(encoding="utf-8"))["rows"]:
        if "cluster" not in table:
            continue
        device, sequence = DEVICES[table["cluster"]]
        hidden, heads = MODELS[table["model"]]
        ways, tokens = table["tp"], table["mbs"] * sequence
        sizes = Sizes(tokens, hidden, ways, table["mbs"] * heads // ways, sequence, hidden // heads, device)
        for layer, columns in table["ops"].items():
            for which, time in (("forward", columns[0]), ("backward", columns[1])):
                row = _row(table, layer, which, time * 1e-6, sizes)
                if isinstance(row, Row):
                    rows.append(row)
                elif row:
                    skipped[row] = skipped.get(row, 0) + 1
    return rows, skipped


def _row(table: Mapping[str, Any], layer: str, which: str, time: float, sizes: Sizes) -> Row | str:
    """A row, or why there is none ("": a copy of another row)."""
    linear = layer in ("enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2")
    # `algo` changes only how the first linear layer is split; the other times of algo 1 are copies or repetitions.
    row_parallel_qkv = table["algo"] == 1 and layer == "enc-attention-qkv" and table["tp"] > 1
    if table["algo"] == 1 and not row_parallel_qkv:
        return ""
    if layer in SKIPPED:
        return f"{layer}: {SKIPPED[layer]}"
    row_parallel = row_parallel_qkv or layer in ("enc-attention-dense", "enc-MLP-GEMM-2")
    reduces = which == ("forward" if row_parallel else "backward")
    if table["tp"] > 1 and ((linear and reduces) or layer == "gpt-post-process"):
        return "contains collectives"
    if layer == "enc-attention-softmax" and sizes.heads % 4:
        return "softmax: not fused where heads x batch is no multiple of 4"
    if time < HOST_SECONDS[which]:
        return f"{which} below {HOST_SECONDS[which] * 1e6:.0f} us: the host's time"
    if time < POWER_LIMITED.get(sizes.device, 0.0) and which == "forward" and linear:
        return f"{sizes.device}: linear layers below 1 ms, before its power limit acts"
    kernels = _kernels(layer, which, sizes, row_parallel)
    row = Row(sizes.device, layer, which, table["model"], table["mbs"], table["tp"], time, tuple(kernels))
    return (
        f"over {OUTLIER:.0f} x the predicted time"
        if time > OUTLIER * predict(row, catalog.device(sizes.device))
        else row
    )


def _kernels(layer: str, which: str, sizes: Sizes, row_parallel: bool) -> Kernels:
    forward = which == "forward"
    tokens, hidden, ways = sizes.tokens, sizes.hidden, sizes.ways
    scores = sizes.heads * sizes.sequence**2
    match layer:
        case "enc-1st-layernorm" | "enc-2nd-layernorm":
            return [_moves(tokens * hidden * NORM_BYTES.get(sizes.device, (6, 20))[not forward])]
        case "enc-attention-qkv":
            # The output is cut into three contiguous tensors; backward joins their gradients.
            output = tokens * 3 * hidden // (1 if row_parallel else ways)
            parts = [_moves(4 * output)] if not forward else [_moves(4 * output / 3)] * 3
            return [*_linear(sizes, hidden, 3 * hidden, forward, row_parallel), *parts]
        case "enc-attention-dense":
            return _linear(sizes, hidden, hidden, forward, True)
        case "enc-MLP-GEMM-1":
            return _linear(sizes, hidden, 4 * hidden, forward, False)
        case "enc-MLP-GEMM-2":
            return _linear(sizes, 4 * hidden, hidden, forward, True)
        case "enc-attention-score":
            if forward:
                return [_batched(sizes, sizes.sequence, sizes.head_dim)]
            return [_batched(sizes, sizes.head_dim, sizes.sequence)] * 2
        case "enc-attention-context":
            copy = _moves(4 * tokens * hidden // ways)
            if forward:
                return [_batched(sizes, sizes.head_dim, sizes.sequence), copy]
            return [
                _batched(sizes, sizes.sequence, sizes.head_dim),
                _batched(sizes, sizes.head_dim, sizes.sequence),
                copy,
            ]
        case "enc-attention-softmax":
            # Causal: only the lower half is read, all is written.
            return [_moves(scores * (3 if forward else 4))]
        case "enc-attention-dropout":
            return [_moves(scores * 5)]
        case "enc-post-attention-dropout" | "enc-post-MLP-dropout":
            # TorchScript: bias, dropout and residual one after the other; backward masks, then scales.
            return [_moves(tokens * hidden * width) for width in ((4, 5, 6) if forward else (5, 4))]
        case "enc-MLP-gelu":
            # Fused with the bias, whose gradient is a sum of its own.
            elements = tokens * 4 * hidden // ways
            return [_moves(elements * width) for width in ((4,) if forward else (6, 2))]
        case "gpt-post-process":
            # To fp32, maximum, difference, exponential, sum, quotient; backward: scaled, to fp16.
            logits = tokens * VOCABULARY
            parts = [_moves(logits * width) for width in ((6, 4, 8, 8, 4, 8) if forward else (8, 6))]
            return [*_linear(sizes, hidden, VOCABULARY, forward, False), *parts]
    raise ValueError(f"unknown sub-layer {layer!r}")


def _moves(num_bytes: float) -> Work:
    return Work("memory", 0.0, float(num_bytes))


def _matmul(rows: int, columns: int, depth: int, count: int = 1) -> Work:
    num_bytes = 2.0 * count * (rows * depth + depth * columns + rows * columns)
    return Work("matmul", 2.0 * count * rows * columns * depth, num_bytes, "fp16", (rows, columns, depth))


def _linear(sizes: Sizes, inputs: int, outputs: int, forward: bool, row_parallel: bool) -> Kernels:
    local_inputs = inputs // sizes.ways if row_parallel else inputs
    local_outputs = outputs if row_parallel else outputs // sizes.ways
    if forward:
        return [_matmul(sizes.tokens, local_outputs, local_inputs)]
    wrt_input = _matmul(sizes.tokens, local_inputs, local_outputs)
    return [wrt_input, _matmul(local_outputs, local_inputs, sizes.tokens)] if sizes.device == "a10g" else [wrt_input]


def _batched(sizes: Sizes, columns: int, depth: int) -> Work:
    return _matmul(sizes.sequence, columns, depth, sizes.heads)


# --- errors -----------------------------------------------------------------------------------------------------------


def predict(row: Row, device: Device) -> float:
    """Seconds of the row's kernels, one after the other."""
    return sum(seconds(work, device) for work in row.kernels)


Summary = tuple[str, str, str, str, int, float, float, float]


def summaries(rows: Sequence[Row], device: Callable[[str], Device], constants: str) -> Iterator[Summary]:
    """(device, sub-layer, pass, constants, rows, median, 90th percentile, bias), sub-layer "all" last."""
    for name in sorted({row.device for row in rows}):
        mine = [row for row in rows if row.device == name]
        for which in ("forward", "backward"):
            for layer in (*dict.fromkeys(row.layer for row in mine), "all"):
                group = [r for r in mine if r.which == which and layer in (r.layer, "all")]
                if group:
                    ratios = [predict(row, device(name)) / row.measured - 1 for row in group]
                    sizes = sorted(map(abs, ratios))
                    p90 = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
                    yield (
                        name,
                        layer,
                        which,
                        constants,
                        len(group),
                        statistics.median(sizes),
                        p90,
                        statistics.median(ratios),
                    )


def write(summary: Sequence[Summary]) -> None:
    """Rewrites RESULTS."""
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["device", "sub_layer", "pass", "constants", "rows", "median_error", "p90_error", "bias"])
        for line in summary:
            writer.writerow([*line[:5], *(f"{value:.4f}" for value in line[5:])])


# --- constants --------------------------------------------------------------------------------------------------------

FITTED = ("matmul_efficiency", "memory_efficiency")
"""Of each device, to its forward rows: the memory's to those that only move bytes, the other to the linear layers."""

OUTPUT_EXPOSED = (("a100-40g", "v100-32g"), ("a10g", "l4"))
"""Devices that share output_exposed: with HBM and with GDDR. Fitted to linear layers and attention scores."""

SHARED = ("rate of a halved tile",)
"""Of all devices."""

OF_ONE = ("l4.cache_bytes_per_second",)


def num_constants() -> int:
    """Constants of the model that were fitted to these rows."""
    num_devices = len({device for device, _ in DEVICES.values()})
    return len(FITTED) * num_devices + len(OUTPUT_EXPOSED) + len(SHARED) + len(OF_ONE)


def fit(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Device]:
    """The devices with FITTED and OUTPUT_EXPOSED fitted to their forward rows: least mean of |log|, capped at 0.3."""
    forward = {name: [r for r in rows if r.device == name and r.which == "forward"] for name in names}
    fitted = {}
    for family in OUTPUT_EXPOSED:
        members = [name for name in family if name in names]
        candidates = [{name: _fit_one(name, forward[name], x) for name in members} for x in (0.0, 0.25, 0.5, 0.75, 1.0)]
        fitted.update(
            min(
                candidates,
                key=lambda c: sum(_distance(_linear_rows(forward[n], True), device) for n, device in c.items()),
            )
        )
    return fitted


def _fit_one(name: str, forward: Sequence[Row], output_exposed: float) -> Device:
    device = replace(catalog.device(name), output_exposed=output_exposed)
    moving = [row for row in forward if all(work.kind == "memory" for work in row.kernels)]
    return _best(_best(device, "memory_efficiency", moving), "matmul_efficiency", _linear_rows(forward, False))


def _linear_rows(rows: Sequence[Row], scores: bool) -> list[Row]:
    layers = ["enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2"]
    return [row for row in rows if row.layer in layers or (scores and row.layer == "enc-attention-score")]


def left_out(rows: Sequence[Row], name: str) -> Device:
    """The device with the means of what was fitted to the others, and without what only it showed."""
    others = fit(rows, sorted({row.device for row in rows} - {name}))
    means = {key: statistics.fmean(getattr(device, key) for device in others.values()) for key in FITTED}
    family = next(family for family in OUTPUT_EXPOSED if name in family)
    exposed = statistics.fmean(others[other].output_exposed for other in family if other != name)
    return replace(catalog.device(name), output_exposed=exposed, cache_bytes=0, cache_bytes_per_second=0.0, **means)


def _best(device: Device, key: str, rows: Sequence[Row]) -> Device:
    candidates = [replace(device, **{key: value / 100}) for value in range(30, 101)]
    return min(candidates, key=lambda candidate: _distance(rows, candidate))


def _distance(rows: Sequence[Row], device: Device) -> float:
    return statistics.fmean(min(abs(math.log(predict(row, device) / row.measured)), 0.3) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
