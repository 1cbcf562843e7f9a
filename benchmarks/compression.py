"""What compressed collectives save, and what they cost in accuracy, on real text.

    python -m benchmarks.compression               # from the repository's root; some minutes on two cores
    python -m benchmarks.compression --quick       # a tiny model, a few steps: does it run?

A Llama-style model learns the standard library's own source under one plan (data parallel, ZeRO), four times from equal
weights on equal batches: exactly, with gathers in int8, with sums in int8, with both. Per run:

    bytes       that one rank sends in a step, by collective of parameters, counted where they are handed to torch
    gradient    of the first step against the exact run's, over all parameters: ||g - g_exact|| / ||g_exact||
    loss        mean of the last WINDOW steps, its distance from the exact run's, and the largest distance between the
                two curves' running means of WINDOW steps
    CPU seconds of all ranks per step (median), since wall clock on shared cores says little

Rows are appended to benchmarks/results/compression.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import autopar
from autopar.launch import run_ranks
from cost_models.collective import wire_bytes
from examples.models import Example, llama
from examples.text import VOCAB_SIZE, standard_library

RESULTS = Path(__file__).parent / "results" / "compression.csv"
WINDOW = 20
KINDS = ("all_gather", "reduce_scatter", "all_to_all")
RUNS: Mapping[str, Mapping[str, str]] = {
    "exact": {},
    "gather": {"gather": "int8"},
    "reduce": {"reduce": "int8"},
    "both": {"gather": "int8", "reduce": "int8"},
}


@dataclass(frozen=True, slots=True)
class Job:
    """The model, its batch and how it is trained."""

    width: int = 128
    layers: int = 4
    seq_len: int = 128
    batch_size: int = 8
    steps: int = 200
    max_bytes: int | None = None

    def example(self) -> Example:
        sizes = {"layers": self.layers, "width": self.width, "seq_len": self.seq_len, "batch_size": self.batch_size}
        return llama(vocab_size=VOCAB_SIZE, **sizes)


QUICK = Job(width=32, layers=2, seq_len=32, steps=4, max_bytes=2**16)


@dataclass(frozen=True, slots=True)
class Course:
    """What one rank saw: losses, CPU seconds of each step, bytes sent in the last one, and the first gradient."""

    losses: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    num_bytes: Mapping[str, float]
    gradient: npt.NDArray[np.float32] | None


def train(program: Any, job: Job) -> Course:
    """On every rank."""
    step = program.build()
    batches = standard_library(max_bytes=job.max_bytes).batches(job.batch_size, job.seq_len)
    counted = _counting(step)
    losses: list[float] = []
    seconds: list[float] = []
    gradient = None
    for index in range(job.steps):
        local = program.local_batch(next(batches))
        counted.update(dict.fromkeys(KINDS, 0.0))
        started = time.process_time()
        loss = step.forward_backward(local)
        if index == 0:
            counts = dict(counted)
            gradient = torch.cat([value.flatten() for value in step.gradients().values()]).numpy()
            counted.update(counts)
        step.update()
        seconds.append(time.process_time() - started)
        losses.append(float(loss))
    return Course(tuple(losses), tuple(seconds), dict(counted), gradient if step.mesh.rank == 0 else None)


def _counting(step: Any) -> dict[str, float]:
    """Bytes that this rank sends from now on in the collectives of parameters, which alone are asynchronous."""
    collectives = sys.modules[type(step).__module__.rpartition(".")[0] + ".collectives"]
    counted = dict.fromkeys(KINDS, 0.0)
    size = step.mesh.dp.size

    def wrapped(kind: Any, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Tensor, part: Tensor, *args: Any, **options: Any) -> Any:
            if options.get("async_op"):
                whole = max(output.numel(), part.numel()) * part.element_size()
                counted[kind] += wire_bytes(kind, whole, size)
            return own(output, part, *args, **options)

        return call

    for kind in KINDS:
        setattr(collectives, kind, wrapped(kind, getattr(collectives, kind)))
    return counted


def measure(job: Job, num_ranks: int, zero: int, precision: str) -> list[dict[str, Any]]:
    """A row per run; all follow the exact run's plan."""
    example = job.example()
    learner = Optimizer()
    plan, exact, rows = None, None, []
    for name, compression in RUNS.items():
        program = autopar.compile(
            example.model,
            f"{num_ranks} cpu",
            example_inputs=example.inputs,
            constraints={"dp": num_ranks, "zero": zero},
            optimizer=learner,
            precision=precision,
            compression=compression,
            plan=plan,
        )
        plan = program.plan
        courses = run_ranks(train, (program, job), num_ranks, timeout_seconds=3600)
        exact = exact or courses[0]
        rows.append(_row(job, name, zero, precision, program, courses, exact))
        print(_words(rows[-1]), flush=True)
    return rows


class Optimizer:
    """AdamW; a class, so that spawned ranks can take it."""

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _row(
    job: Job, name: str, zero: int, precision: str, program: Any, courses: Sequence[Course], exact: Course
) -> dict[str, Any]:
    first = courses[0]
    assert first.gradient is not None and exact.gradient is not None
    expected = exact.gradient.astype(np.float64)
    error = np.linalg.norm(first.gradient - expected) / np.linalg.norm(expected)
    own, other = _running_means(first.losses), _running_means(exact.losses)
    cpu_seconds = [sum(each) for each in zip(*(course.cpu_seconds for course in courses), strict=True)]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": f"{platform.machine()} {os.cpu_count()} cores",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in program.model.parameters()),
        "ranks": len(courses),
        "zero": zero,
        "precision": precision,
        "steps": job.steps,
        "compression": name,
        **{f"{kind}_bytes": round(first.num_bytes[kind]) for kind in KINDS},
        "bytes": round(sum(first.num_bytes.values())),
        "bytes_ratio": round(sum(first.num_bytes.values()) / sum(exact.num_bytes.values()), 4),
        "gradient_error": f"{float(error):.2e}",
        "final_loss": round(own[-1], 5),
        "final_gap": f"{abs(own[-1] - other[-1]):.1e}",
        "largest_gap": f"{max(abs(a - b) for a, b in zip(own, other, strict=True)):.1e}",
        "cpu_seconds": round(statistics.median(cpu_seconds), 4),
    }


def _running_means(losses: Sequence[float]) -> list[float]:
    width = min(WINDOW, len(losses))
    return [statistics.fmean(losses[end - width : end]) for end in range(width, len(losses) + 1)]


def _words(row: Mapping[str, Any]) -> str:
    sent = ", ".join(f"{kind} {row[f'{kind}_bytes'] / 1e6:.3f} MB" for kind in KINDS if row[f"{kind}_bytes"])
    return (
        f"{row['compression']:8} {row['bytes'] / 1e6:8.3f} MB a step ({row['bytes_ratio']:.3f} of exact: {sent}), "
        f"first gradient off by {row['gradient_error']}, loss {row['final_loss']:.4f} (gap {row['final_gap']}, "
        f"largest {row['largest_gap']}), {row['cpu_seconds']:.3f} CPU-s a step"
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print and append the rows; returns them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--zero", type=int, nargs="+", default=[3], choices=[1, 2, 3])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=Job().steps)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model and four steps")
    options = parser.parse_args(arguments)
    job = QUICK if options.quick else Job(steps=options.steps)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for zero in options.zero:
        print(f"ZeRO-{zero} on {options.ranks} ranks, {options.precision}, {job.steps} steps")
        rows += measure(job, options.ranks, zero, options.precision)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    is_new = not options.output.exists()
    with options.output.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
    return rows


if __name__ == "__main__":
    main()
