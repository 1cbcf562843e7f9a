"""CPU seconds and memory of planning big models, trace included, each in a fresh process.

    python -m benchmarks.planning [--case llama-3-8b | gpt-3-175b | llama-3-405b | all] [--growth] [--csv]

Models are built on meta from their public configurations. Reported are the CPU seconds (user and system, all threads)
of importing, building, tracing, searching and lowering, the whole, the peak resident memory and the plan that was
found.
`--growth` plans one width of model with 12 to 126 layers on a fixed cluster, and one model on 8 to 16,384 GPUs.
`--csv` appends the rows to benchmarks/results/planning.csv.

For comparison, measured on this kind of machine: a plain torch.export of the three costs 20 (GPT-3), 45 (405B) and 13
(8B) CPU-seconds, and a public peer's ILP takes 429 CPU-seconds and 4.2 GiB for Llama-3-8B on 64 GPUs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "planning.csv"
PARTS = ("import", "build", "trace", "search", "lower")


@dataclass(frozen=True, slots=True)
class Case:
    """One planning problem. kv_heads 0: a GPT-2 architecture with learned positions, else a Llama."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    cluster: str
    batch: int
    seq: int
    limit_seconds: float = 0.0


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        # Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3.
        Case("llama-3-8b", 32, 4096, 14336, 32, 8, 128256, "8x8 h100-sxm", 128, 4096, 5.0),
        Case("llama-3-405b", 126, 16384, 53248, 128, 8, 128256, "2048x8 h100-sxm", 2048, 8192, 20.0),
        # Brown et al., "Language Models are Few-Shot Learners", 2020, table 2.1; Megatron-LM's vocabulary and batch.
        Case("gpt-3-175b", 96, 12288, 49152, 96, 0, 51200, "128x8 a100-80g", 1536, 2048, 10.0),
    )
}
LAYERS = (12, 24, 48, 96, 126)
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def growth_cases() -> list[Case]:
    """A 70B model's width with other depths on 1,024 GPUs; the 8B model on 8 to 16,384 GPUs."""
    wide = Case("llama-3-70b width", 80, 8192, 28672, 64, 8, 128256, "128x8 h100-sxm", 1024, 8192)
    deep = [replace(wide, layers=layers) for layers in LAYERS]
    small = replace(CASES["llama-3-8b"], batch=2048, limit_seconds=0.0)
    return deep + [replace(small, cluster=f"{nodes}x8 h100-sxm") for nodes in NODES]


# --- one case, in its own process -------------------------------------------------------------------------------------


def build(case: Case) -> tuple[Any, dict[str, Any]]:
    """(model on meta, batch on meta)."""
    import torch
    import transformers

    with torch.device("meta"):
        if case.kv_heads:
            config = transformers.LlamaConfig(
                vocab_size=case.vocabulary,
                hidden_size=case.hidden,
                intermediate_size=case.ffn,
                num_hidden_layers=case.layers,
                num_attention_heads=case.heads,
                num_key_value_heads=case.kv_heads,
                max_position_embeddings=case.seq,
            )
            model: Any = transformers.LlamaForCausalLM(config)
        else:
            config = transformers.GPT2Config(
                vocab_size=case.vocabulary,
                n_positions=case.seq,
                n_embd=case.hidden,
                n_layer=case.layers,
                n_head=case.heads,
                n_inner=case.ffn,
            )
            model = transformers.GPT2LMHeadModel(config)
            model.loss_type = "ForCausalLM"
        ids = torch.zeros(case.batch, case.seq, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids.clone()}


def measure(case: Case) -> dict[str, Any]:
    """Plan a case in this process; seconds by part, memory and the plan in words."""
    started = time.process_time()
    import torch
    import transformers

    import autopar

    _ = transformers.LlamaForCausalLM if case.kv_heads else transformers.GPT2LMHeadModel  # imports its modules

    imported = time.process_time()
    model, batch = build(case)
    built = time.process_time()
    spent = {"trace": 0.0, "search": 0.0, "lower": 0.0}
    for home, name, part in (
        ("planning.traced_model", "find_cuts", "trace"),
        ("planning.traced_model", "trace", "trace"),
        ("planning.planner", "search_plans", "search"),
        ("compile", "program_of", "lower"),
        ("compile", "files_of", "lower"),
    ):
        module = importlib.import_module(f"autopar.{home}")
        setattr(module, name, _counted(getattr(module, name), part, spent))
    program = autopar.compile(model, case.cluster, example_inputs=batch, precision="bf16")
    planned = time.process_time()
    spent["search"] += planned - built - sum(spent.values())  # constraints, requests: what no pass accounts for
    plan = program.plan
    return {
        "import": imported - started,
        "build": built - imported,
        **spent,
        "whole": time.process_time(),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "plan": _words(plan),
        "step_seconds": plan.prediction.step_seconds,
        "plan_gib": plan.prediction.peak_bytes / 2**30,
        "torch": torch.__version__,
    }


def _counted(function: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    """`function`, adding its CPU seconds to `part`, less what parts inside it already took."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        before, inside = time.process_time(), sum(spent.values())
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += time.process_time() - before - (sum(spent.values()) - inside)

    return timed


def _words(plan: Any) -> str:
    """`pp8 x dp16 x tp8, 96 micro-batches, 1f1b, zero 1, full recompute of 3 layers, optimizer offload`."""
    zero = max(s.zero for scope in plan.scopes.values() for s in scope.parameters.values())
    layers: dict[str, int] = {}
    for stage in plan.pipeline.stages:
        for runs in stage.recompute.values():
            for mode, number in runs:
                layers[mode] = layers.get(mode, 0) + number
    parts = [plan.mesh_text, f"{plan.num_micro_batches} micro-batches"]
    if plan.pipeline.schedule:
        chunks = plan.pipeline.num_chunks
        parts.append(plan.pipeline.schedule + (f" of {chunks} stages each" if chunks > 1 else ""))
    parts.append(f"zero {zero}")
    parts += [f"{number} layers {mode} recompute" for mode, number in layers.items() if mode != "none" and number]
    parts += [f"{plan.pipeline.offload} offload"] if plan.pipeline.offload else []
    return ", ".join(parts)


# --- the table --------------------------------------------------------------------------------------------------------


def in_fresh_process(case: Case) -> dict[str, Any]:
    """`measure` of a new interpreter. Raises CalledProcessError with what it printed on stderr above it."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planning", "--one", json.dumps(asdict(case))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def show(case: Case, found: Mapping[str, Any]) -> None:
    """One row, and the plan below it."""
    parts = " ".join(f"{part} {found[part]:5.2f}" for part in PARTS)
    beyond = found["whole"] - found["import"]
    target = ""
    if case.limit_seconds:
        target = f" (target {case.limit_seconds:.0f}: {'met' if found['whole'] < case.limit_seconds else 'missed'})"
    print(
        f"{case.name} {case.layers} layers, {case.cluster}: {parts} | whole {found['whole']:.2f} CPU-s{target}, "
        f"{beyond:.2f} beyond imports, {found['peak_gib']:.2f} GiB\n"
        f"    {found['plan']}: step {found['step_seconds']:.4g} s, {found['plan_gib']:.1f} GiB",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="all", choices=("all", *CASES))
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Case(**json.loads(options.one)))))
        return 0
    rows: list[tuple[Case, dict[str, Any]]] = []
    chosen = growth_cases() if options.growth else [c for c in CASES.values() if options.case in ("all", c.name)]
    for case in chosen:
        rows.append((case, in_fresh_process(case)))
        show(*rows[-1])
    if options.growth:
        _show_growth(rows)
    if options.csv:
        _write(rows)
    return 0 if all(not case.limit_seconds or row["whole"] < case.limit_seconds for case, row in rows) else 1


def _show_growth(rows: list[tuple[Case, dict[str, Any]]]) -> None:
    """How many times as long the largest of each series takes as the smallest, imports left out."""
    seconds = [row["whole"] - row["import"] for _, row in rows]
    depths, nodes = seconds[: len(LAYERS)], seconds[len(LAYERS) :]
    print(
        f"\n{LAYERS[-1] / LAYERS[0]:.1f} times the layers take {depths[-1] / depths[0]:.2f} times the CPU seconds "
        f"(the dearest depth {max(depths) / min(depths):.2f} times the cheapest)\n"
        f"{NODES[-1] / NODES[0]:.0f} times the GPUs take {nodes[-1] / nodes[0]:.2f} times the CPU seconds "
        f"(the dearest size {max(nodes) / min(nodes):.2f} times the cheapest)"
    )


def _write(rows: list[tuple[Case, dict[str, Any]]]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    head = ["date", "cores", "torch", "model", "layers", "cluster", "batch", "seq", *PARTS, "whole_cpu_seconds"]
    head += ["peak_gib", "plan", "predicted_step_seconds"]
    text = ",".join(head)
    is_new = not RESULTS.exists() or RESULTS.read_text().splitlines()[0] != text
    with RESULTS.open("w" if is_new else "a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(head)
        for case, row in rows:
            model = [case.name, case.layers, case.cluster, case.batch, case.seq]
            seconds = [f"{row[part]:.2f}" for part in (*PARTS, "whole", "peak_gib")]
            date = datetime.date.today().isoformat()
            writer.writerow(
                [date, os.cpu_count(), row["torch"], *model, *seconds, row["plan"], f"{row['step_seconds']:.4g}"]
            )


if __name__ == "__main__":
    sys.exit(main())
