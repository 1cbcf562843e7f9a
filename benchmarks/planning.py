"""CPU seconds and memory of planning a big model, trace included, in a fresh process.

    python -m benchmarks.planning [--model llama-3-8b] [--cluster "8x8 h100-sxm"] [--csv]

The model is built on meta from its public configuration. Reported are the CPU seconds (user and system, all threads) of
importing, building, tracing, searching and lowering, the whole, and the peak resident memory. A public peer's ILP takes
429 CPU-seconds and 4.2 GiB for Llama-3-8B on 64 GPUs on this kind of machine.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "planning.csv"
LLAMA: Mapping[str, Mapping[str, int]] = {
    # Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3).
    "llama-3-8b": {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 128256},
    "llama-3-70b": {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8, "vocabulary": 128256},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=LLAMA)
    parser.add_argument("--cluster", default="8x8 h100-sxm")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    marks = [("start", time.process_time())]

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar
    from autopar import trace

    marks.append(("import", time.process_time()))
    figures = LLAMA[options.model]
    config = LlamaConfig(
        vocab_size=figures["vocabulary"],
        hidden_size=figures["hidden"],
        intermediate_size=figures["ffn"],
        num_hidden_layers=figures["layers"],
        num_attention_heads=figures["heads"],
        num_key_value_heads=figures["kv_heads"],
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(options.batch, options.seq, dtype=torch.int64)
    marks.append(("build on meta", time.process_time()))
    spent = {"trace": 0.0}
    _count(trace, "_export", spent)
    compiled = autopar.compile(
        model, options.cluster, example_inputs={"input_ids": ids, "labels": ids.clone()}, precision="bf16"
    )
    marks.append(("plan", time.process_time()))
    seconds = {name: now - before for (_, before), (name, now) in zip(marks, marks[1:], strict=False)}
    seconds["plan: export"] = spent["trace"]
    seconds["plan: search and the rest"] = seconds.pop("plan") - spent["trace"]
    whole = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(compiled)
    print(f"meshes considered: {len(compiled.result.candidates) + len(compiled.result.skipped)}")
    for name, value in seconds.items():
        print(f"{name:<28}{value:8.2f} CPU-s")
    print(f"{'whole process':<28}{whole:8.2f} CPU-s, peak memory {peak:.2f} GiB")
    if options.csv:
        _write(options, seconds, whole, peak, compiled.plan.layout, torch.__version__)
    return 0


def _count(module: Any, name: str, spent: dict[str, float]) -> None:
    """Add the CPU seconds of every call of module.name to spent["trace"]."""
    original = getattr(module, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        before = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            spent["trace"] += time.process_time() - before

    setattr(module, name, timed)


def _write(
    options: argparse.Namespace, seconds: Mapping[str, float], whole: float, peak: float, mesh: str, version: str
) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            head = ["date", "cores", "torch", "model", "cluster", "mesh"]
            writer.writerow([*head, *seconds, "whole_cpu_seconds", "peak_gib"])
        head = [datetime.date.today().isoformat(), os.cpu_count(), version, options.model, options.cluster, mesh]
        writer.writerow([*head, *(f"{v:.2f}" for v in seconds.values()), f"{whole:.2f}", f"{peak:.2f}"])


if __name__ == "__main__":
    sys.exit(main())
