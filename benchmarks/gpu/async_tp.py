"""Do products beside their transfers (backend="async-tp") make tensor and sequence parallelism faster?

    python -m benchmarks.gpu.async_tp            # from the repository's root, on a machine with two GPUs or more
    python -m benchmarks.gpu.async_tp --smoke    # anywhere: a tiny model on two CPU processes, are the losses equal?

Whole training steps of a Llama whose weights and sequences are cut over all GPUs of the machine, in bf16: one plan, run
by the eager program and by the asynchronous one, in turns. The losses of their first steps must agree, or there is no
row. Seconds of a step are rank 0's, from the start of a turn's steps to the end of its last, medians over all turns;
the ratio is the median over turns. `shared` says whether the ranks share memory: where not, both programs wait for
their collectives, and the ratio says how far equal programs scatter. Rows are appended to
benchmarks/results/async_tp.csv.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.launch import run_ranks
from benchmarks.table import append
from examples.models import EXAMPLES

RESULTS = Path(__file__).parents[1] / "results" / "async_tp.csv"
PINS = {
    "parameters": {
        **{f"*.{name}_proj.weight": {"tp": "S(0)"} for name in ("q", "k", "v", "gate", "up")},
        **{f"*.{name}_proj.weight": {"tp": "S(1)"} for name in ("o", "down")},
    },
    "activations": {name: {"tp": "S(1)"} for name in ("*layernorm", "model.norm")},
}
FULL = {"layers": 4, "width": 4096, "num_heads": 32, "ffn_width": 14336, "seq_len": 4096, "vocab_size": 32768}
SMOKE = {"layers": 2, "width": 32, "num_heads": 4, "seq_len": 16, "vocab_size": 96}
BATCHES = (1, 4)
"""Rows: torch's operators copy less with one."""
LOSS_TOLERANCE = 2e-2
CHECKED_STEPS, STEPS_PER_TURN = 3, 5
BACKENDS = ("eager", "async-tp")


def programs_of(
    sizes: Mapping[str, int], cluster: Any, num_ranks: int, rows: int
) -> dict[str, autopar.CompiledProgram]:
    """One plan's program under each backend."""
    example = EXAMPLES["llama"](**sizes, batch_size=rows)
    found: dict[str, autopar.CompiledProgram] = {}
    for backend in BACKENDS:
        found[backend] = autopar.compile(
            example.model,
            cluster,
            example_inputs=example.inputs,
            precision="bf16",
            constraints={**PINS, "pp": 1, "dp": 1, "tp": num_ranks, "recompute": "none", "micro_batches": 1},
            backend=backend,
            plan=found["eager"].plan if found else None,
        )
    return found


def seconds_of_turn(step: Any, batch: Any, on_gpu: bool) -> float:
    """Mean of a turn's steps."""
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        step(batch)
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS_PER_TURN


def measure(programs: Mapping[str, autopar.CompiledProgram], inputs: Any, turns: int) -> dict[str, Any]:
    """One row, on every rank."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda" if on_gpu else "cpu")
    steps = {backend: program.build(device=device) for backend, program in programs.items()}
    batch = {name: value.to(device) for name, value in programs["eager"].local_batch(inputs).items()}
    losses = {backend: [step(batch).item() for _ in range(CHECKED_STEPS)] for backend, step in steps.items()}
    error = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
    if not error <= LOSS_TOLERANCE:
        raise RuntimeError(f"losses differ: {losses}")
    times: dict[str, list[float]] = {backend: [] for backend in steps}
    for _ in range(turns):
        for backend, step in steps.items():
            times[backend].append(seconds_of_turn(step, batch, on_gpu))
    ratios = [ours / plain for plain, ours in zip(*times.values(), strict=True)]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "rows": next(iter(batch.values())).shape[0],
        "shared": "yes" if steps["async-tp"].mesh.tp.symmetric else "no",
        "turns": turns,
        "eager_seconds": f"{statistics.median(times['eager']):.5g}",
        "async_seconds": f"{statistics.median(times['async-tp']):.5g}",
        "ratio": f"{statistics.median(ratios):.4f}",
        "ratio_spread": f"{max(ratios) - min(ratios):.4f}",
        "loss_error": f"{error:.1e}",
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print and append; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    num_ranks = 2 if options.smoke else torch.cuda.device_count()
    if num_ranks < 2:
        print(f"GPUs here: {num_ranks}. Transfers between GPUs need two, so nothing was compared; --smoke runs on CPUs")
        return []
    sizes, turns = (SMOKE, 1) if options.smoke else (FULL, options.turns)
    cluster = "2 cpu" if options.smoke else autopar.ClusterSpec.detect(num_ranks)
    rows = []
    for batch in BATCHES:
        programs = programs_of(sizes, cluster, num_ranks, batch)
        inputs = EXAMPLES["llama"](**sizes, batch_size=batch).inputs
        rows.append(run_ranks(measure, (programs, inputs, turns), num_ranks)[0])
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if not options.smoke:
        append(rows, options.output)
    return rows


if __name__ == "__main__":
    main()
