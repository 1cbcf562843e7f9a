"""Is the memory that plans for several GPUs promise what one of their ranks takes on a real GPU?

    python -m benchmarks.gpu.ranks            # from the repository's root, on a machine with one GPU; two minutes
    python -m benchmarks.gpu.ranks --smoke    # anywhere: tiny models on a CPU, whose memory is not measured

One GPU runs one rank of a plan at a time, in a group of torch's "fake" backend: its collectives return at once and move
nothing, so losses mean nothing, but every tensor has the size that it has beside the other ranks. What NCCL and CUDA
take for themselves is not in the figures, so `ratio` is of the prediction without its workspace. A row has the plan's
prediction for this rank beside the most that was allocated, and reserved by the allocator, in a step after three
others. Rows are appended to benchmarks/results/gpu_memory.csv.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Run by its path, a script has its own folder first, and there `profile` would hide a standard module.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist

import autopar
from autopar.ir.stage_mesh import first_ranks
from benchmarks.gpu.isolated import Outcome, outcomes
from benchmarks.gpu.train import CASES, SMOKE, Case, initial
from benchmarks.table import append

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu_memory.csv"
LLAMA = replace(CASES[0], name="llama 0.6B, 2k", num_layers=8, vocabulary=32768)
GPT2 = replace(CASES[2], name="gpt2 0.5B, 1k", num_layers=8)
PROCESSES = 4
ITEM_SECONDS = 150.0
WARM_STEPS = 3
FIELDS = (
    "date",
    "device",
    "torch",
    "case",
    "plan",
    "rank",
    "batch",
    "predicted_gib",
    "allocated_gib",
    "reserved_gib",
    "ratio",
    "parts",
    "error",
)


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a pinned plan. rows: of the global batch."""

    case: Case
    constraints: Mapping[str, Any]
    num_ranks: int
    rank: int
    rows: int
    device: str = "cuda"

    @property
    def text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.constraints.items())


def ranks(llama: Case, gpt: Case) -> list[Rank]:
    """All that are measured."""
    found = [Rank(llama, {"dp": 8, "zero": zero}, 8, 0, 16) for zero in (0, 1, 2, 3)]
    found += [Rank(llama, {"dp": 8, "zero": 2, "recompute": mode}, 8, 0, 32) for mode in ("selective", "full")]
    found += [
        Rank(llama, {"tp": 4, "dp": 2, "zero": 1}, 8, 0, 16),
        Rank(llama, {"tp": 8}, 8, 3, 8),
        Rank(llama, {"cp": 4, "dp": 2, "zero": 1}, 8, 1, 8),
        Rank(gpt, {"dp": 4, "zero": 1, "micro_batches": 2}, 4, 0, 32),
    ]
    for rank in (0, 6):
        pinned = {"pp": 4, "dp": 2, "zero": 1, "micro_batches": 8}
        found.append(Rank(llama, {**pinned, "schedule": "1f1b"}, 8, rank, 32))
        found.append(Rank(llama, {**pinned, "schedule": "zero-bubble"}, 8, rank, 32))
    found.append(Rank(gpt, {"pp": 2, "tp": 2, "schedule": "interleaved", "micro_batches": 4}, 4, 3, 16))
    return found


def measure(rank: Rank) -> dict[str, str]:
    """Plan, build and run one rank in this process, which must be in no group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    gc.collect()
    torch.cuda.empty_cache()
    device = torch.device(rank.device)
    case = replace(rank.case, batch_size=rank.rows)
    batch = case.batch(torch.device("cpu"))
    on_gpu = device.type == "cuda"
    compiled = autopar.compile(
        initial(replace(case, batch_size=1), device),
        f"{rank.num_ranks} {'h100-sxm' if on_gpu else 'cpu'}",
        example_inputs=batch,
        precision="bf16",
        constraints=rank.constraints,
        kernels="on" if on_gpu else "auto",
    )
    dist.init_process_group("fake", rank=rank.rank, world_size=rank.num_ranks, store=FakeStore())
    try:
        step = compiled.build(device=device, first_step_check=False)
        local = {name: value.to(device) for name, value in compiled.local_batch(batch, rank.rank).items()}
        for _ in range(WARM_STEPS):
            step(local)
        allocated = reserved = 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step(local)
            torch.cuda.synchronize()
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    finally:
        dist.destroy_process_group()
    prediction = compiled.plan.prediction
    firsts = first_ranks(compiled.plan.stage_meshes)
    position = sum(first <= rank.rank for first in firsts) - 1
    parts = prediction.pipeline_ranks[position] if prediction.pipeline_ranks else prediction.num_bytes
    predicted = sum(parts.values())
    return {
        "predicted_gib": f"{predicted / 2**30:.3f}",
        "allocated_gib": f"{allocated / 2**30:.3f}",
        "reserved_gib": f"{reserved / 2**30:.3f}",
        "ratio": f"{(predicted - parts.get('workspace', 0.0)) / allocated:.3f}" if allocated else "",
        "parts": "; ".join(f"{kind} {size / 2**30:.3f}" for kind, size in parts.items()),
    }


def rows_of(found: Iterable[Outcome], output: Path | None) -> list[dict[str, str]]:
    """A row per outcome, printed, and appended to `output` at once."""
    rows = []
    for outcome in found:
        rank: Rank = outcome.item
        if outcome.error:
            print(outcome.error, flush=True)
        known = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
            "device": torch.cuda.get_device_name() if rank.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "case": rank.case.name,
            "plan": rank.text,
            "rank": f"{rank.rank} of {rank.num_ranks}",
            "batch": f"{rank.rows}x{rank.case.sequence}",
            "error": outcome.reason,
        }
        rows.append(dict.fromkeys(FIELDS, "") | known | (outcome.value or {}))
        print("  ".join(rows[-1][key] for key in FIELDS[3:]), flush=True)
        if output is not None:
            append(rows[-1:], output)
    return rows


def main(arguments: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Run all, print and append; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which nothing goes on")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.smoke:
        items = [replace(rank, device="cpu") for rank in ranks(*SMOKE)]
        return rows_of((Outcome(rank, measure(rank)) for rank in items), None)
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here; --smoke runs tiny models on the CPU")
    items = ranks(LLAMA, GPT2)
    deadline = time.monotonic() + options.seconds
    with ThreadPoolExecutor(PROCESSES) as pool:
        groups = [items[first::PROCESSES] for first in range(PROCESSES)]
        found = pool.map(lambda group: list(outcomes(measure, group, ITEM_SECONDS, deadline)), groups)
        rows = rows_of((each for group in found for each in group), options.output)
    failed = [f"{row['case']}, {row['plan']}, {row['rank']}: {row['error']}" for row in rows if row["error"]]
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))
    return rows


if __name__ == "__main__":
    main()
