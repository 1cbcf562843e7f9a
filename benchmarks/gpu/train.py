"""Does a generated program train faster on one GPU than what an expert gets from public libraries?

    python -m benchmarks.gpu.train            # from the repository's root, on a machine with one GPU; seven minutes
    python -m benchmarks.gpu.train --smoke    # anywhere: tiny models on the CPU, untimed: are the losses equal?

Whole training steps (forward, backward, AdamW) of Llama-style and GPT-2-style models of about 1B parameters, in bf16
with fp32 masters and moments, which all sides have alike:

    generated, generated inductor      the program that autopar compiles for this GPU, under both backends
    hf, hf compile                     Hugging Face's module in bf16, eager and under torch.compile
    hf liger, hf liger compile         the same with liger-kernel's modules, where that package is installed

Sides take the same random weights and batch, one after the other, as they do not fit together, those that compile last;
where the losses of a side's first steps are not those of the case's first side, its row has an error and no figures.
Tokens per second are of the median step, timed by events on the device. MFU counts the multiply-adds of all matrices
and of attention (causal: half), forward and twice backward, and no recomputation, against the device's nominal peak.
Peak memory is that of the timed steps. Predicted are the plan's seconds and bytes for the generated program.

Rows are appended to benchmarks/results/train.csv as they are measured. A side that fails (out of memory, say) is a row
with its error and ends nothing else (isolated.py), but the exit code is 1; so is one that --seconds leave no time for.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run by its path, a script has its own folder first, and there `profile` would hide a standard module.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.costs.updates import DefaultAdamW
from benchmarks.gpu.isolated import Outcome, outcomes
from benchmarks.hugging_face import LEARNING_RATE, Masters
from benchmarks.table import append

RESULTS = Path(__file__).resolve().parents[1] / "results" / "train.csv"
ITEM_SECONDS = 210.0
"""Of one side, the start of its process and all compilation included: twice what is expected."""
FIELDS = (
    "date",
    "device",
    "torch",
    "transformers",
    "case",
    "batch",
    "side",
    "steps",
    "median_seconds",
    "interquartile_seconds",
    "tokens_per_second",
    "mfu",
    "peak_gib",
    "predicted_seconds",
    "predicted_gib",
    "ready_seconds",
    "loss_error",
    "error",
)
LOSS_TOLERANCE = 2e-2
"""Relative, of the losses of the first steps: what bf16 leaves of an equal computation."""
CHECKED_STEPS, WARM_STEPS = 3, 2
Batch = Mapping[str, Tensor]
Step = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its batch."""

    name: str
    kind: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    vocabulary: int
    sequence: int
    batch_size: int

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.sequence

    def model(self) -> nn.Module:
        """With random fp32 weights, on the current device."""
        common = {"use_cache": False, "attn_implementation": "sdpa", "vocab_size": self.vocabulary}
        if self.kind == "llama":
            config: Any = transformers.LlamaConfig(
                hidden_size=self.hidden,
                intermediate_size=self.intermediate,
                num_hidden_layers=self.num_layers,
                num_attention_heads=self.num_heads,
                num_key_value_heads=self.num_key_value_heads,
                max_position_embeddings=self.sequence,
                tie_word_embeddings=False,
                **common,
            )
            return transformers.LlamaForCausalLM(config)
        config = transformers.GPT2Config(
            n_embd=self.hidden,
            n_inner=self.intermediate,
            n_layer=self.num_layers,
            n_head=self.num_heads,
            n_positions=self.sequence,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            **common,
        )
        return transformers.GPT2LMHeadModel(config)

    def batch(self, device: torch.device) -> dict[str, Tensor]:
        """Random tokens, of which every one but the first of a row is a target."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, self.vocabulary, (self.batch_size, self.sequence), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids.clone()}

    def flops(self, model: nn.Module) -> float:
        """Of one step: 6 per token and element of every matrix that multiplies, and attention under a causal mask."""
        looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        head: Any = model.get_output_embeddings()
        multiplied = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in looked_up)
        multiplied += head.weight.numel() if id(head.weight) in looked_up else 0
        attention = 0.5 * 12 * self.num_layers * self.sequence * self.hidden
        return float(self.num_tokens * (6 * multiplied + attention))


CASES = (
    Case("llama 1.5B, 2k", "llama", 2048, 8192, 16, 32, 8, 128256, 2048, 4),
    Case("llama 1.5B, 8k", "llama", 2048, 8192, 16, 32, 8, 128256, 8192, 1),
    Case("gpt2 0.9B, 1k", "gpt2", 2048, 8192, 16, 32, 32, 50304, 1024, 8),
)
"""Eager Hugging Face modules keep twice as much as other sides, and have to fit 80 GB: 52, 53 and 34 GiB."""
SMOKE = (
    Case("llama, tiny", "llama", 64, 128, 2, 4, 2, 256, 32, 4),
    Case("gpt2, tiny", "gpt2", 64, 128, 2, 4, 4, 256, 32, 4),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train. predicted: seconds and bytes that its plan promised, if there is one."""

    step: Step
    predicted: tuple[float, float] | None = None


@functools.lru_cache(maxsize=1)
def initial(case: Case, device: torch.device) -> nn.Module:
    """The case's model on the CPU, drawn on the device, which takes a second instead of twenty. Not to be changed."""
    torch.manual_seed(0)
    with device:
        model = case.model()
    return model.to("cpu")


def hugging_face(case: Case, device: torch.device, compiled: bool, liger: bool) -> Side:
    """The module in bf16 with fp32 masters."""
    model: Any = copy.deepcopy(initial(case, device)).to(device)
    owner, batch = Masters(model), case.batch(device)
    if liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    run = torch.compile(model, dynamic=False) if compiled else model

    def step() -> Tensor:
        loss: Tensor = run(**batch).loss
        torch.autograd.backward(loss)
        owner.update()
        return loss.detach()

    return Side(step)


def generated(case: Case, device: torch.device, backend: str) -> Side:
    """The program of a plan for this device."""
    compiled = autopar.compile(
        initial(case, device),
        cluster_of(device),
        example_inputs=case.batch(torch.device("cpu")),
        optimizer=DefaultAdamW(LEARNING_RATE),
        precision="bf16",
        kernels="on" if device.type == "cuda" else "auto",
        backend=backend,
    )
    program = compiled.build()
    local = compiled.local_batch(case.batch(device))
    prediction = compiled.plan.prediction
    return Side(lambda: program(local), (prediction.step_seconds, float(prediction.peak_bytes)))


def cluster_of(device: torch.device) -> Any:
    """One GPU of this machine, or a CPU."""
    return autopar.ClusterSpec.detect(1) if device.type == "cuda" else autopar.ClusterSpec.parse("1 cpu")


SIDES: Mapping[str, Callable[[Case, torch.device], Side]] = {
    "hf": functools.partial(hugging_face, compiled=False, liger=False),
    "generated": functools.partial(generated, backend="eager"),
    "generated inductor": functools.partial(generated, backend="inductor"),
    "hf compile": functools.partial(hugging_face, compiled=True, liger=False),
    # Last: Liger changes functions of transformers' own modules, for all models of its process.
    "hf liger": functools.partial(hugging_face, compiled=False, liger=True),
    "hf liger compile": functools.partial(hugging_face, compiled=True, liger=True),
}


def sides(device: torch.device) -> list[str]:
    """All that can run here."""
    has_liger = device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    return [name for name in SIDES if has_liger or "liger" not in name]


@dataclass(frozen=True, slots=True)
class Run:
    """A side of a case."""

    case: Case
    side: str
    device: torch.device
    num_steps: int


def timed(step: Step, device: torch.device, num_steps: int) -> list[float]:
    """Seconds of each step. Of a GPU also the peak of memory begins with the first of them."""
    for _ in range(WARM_STEPS):
        step()
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(num_steps):
            step()
            times.append(time.perf_counter())
        return [after - before for before, after in zip(times, times[1:], strict=False)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in zip(events, events[1:], strict=False)]


def measure(run: Run) -> tuple[list[float], dict[str, str]]:
    """(losses of the first steps, what the timed ones took), in a process that may have measured other sides before."""
    case, device = run.case, run.device
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.device("meta"):
        flops = case.flops(case.model())
    started = time.perf_counter()
    side = SIDES[run.side](case, device)
    losses = [side.step().item() for _ in range(CHECKED_STEPS)]
    ready = time.perf_counter() - started
    seconds = timed(side.step, device, run.num_steps)
    median, quartiles = statistics.median(seconds), statistics.quantiles(seconds, n=4)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return losses, {
        "median_seconds": f"{median:.5g}",
        "interquartile_seconds": f"{quartiles[2] - quartiles[0]:.2g}",
        "tokens_per_second": f"{case.num_tokens / median:.5g}",
        "mfu": f"{flops / median / cluster_of(device).device.peak('bf16'):.4f}",
        "peak_gib": f"{peak / 2**30:.3f}",
        "predicted_seconds": f"{side.predicted[0]:.5g}" if side.predicted else "",
        "predicted_gib": f"{side.predicted[1] / 2**30:.3f}" if side.predicted else "",
        "ready_seconds": f"{ready:.1f}",
    }


def rows_of(found: Iterable[Outcome], output: Path | None) -> list[dict[str, str]]:
    """A row per outcome, printed, and appended to `output` at once. Losses are compared with the case's first ones."""
    wanted: dict[str, list[float]] = {}
    rows = []
    for outcome in found:
        run: Run = outcome.item
        losses, figures = outcome.value or ([], {})
        error, reason = float("nan"), outcome.reason
        if losses:
            first = wanted.setdefault(run.case.name, losses)
            error = max(abs(a / b - 1) for a, b in zip(losses, first, strict=True))
            if not error <= LOSS_TOLERANCE:
                figures, reason = {}, f"losses {losses}, but the first side's are {first}"
        if outcome.error:
            print(outcome.error, flush=True)
        known = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
            "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "case": run.case.name,
            "batch": f"{run.case.batch_size}x{run.case.sequence}",
            "side": run.side,
            "steps": str(run.num_steps),
            "loss_error": f"{error:.1e}" if losses else "",
            "error": reason,
        }
        rows.append(dict.fromkeys(FIELDS, "") | known | figures)
        shown = ("case", "side", "tokens_per_second", "mfu", "peak_gib", "ready_seconds", "error")
        print("  ".join(rows[-1][key] for key in shown), flush=True)
        if output is not None:
            append(rows[-1:], output)
    return rows


def main(arguments: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Run all cases, print and append; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=460.0, help="after which nothing goes on")
    parser.add_argument("--case", help="only cases whose name contains this text")
    parser.add_argument("--side", help="only sides whose name contains this text")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --smoke runs tiny models on the CPU")
    device = torch.device("cpu" if options.smoke else "cuda")
    cases = [case for case in (SMOKE if options.smoke else CASES) if not options.case or options.case in case.name]
    names = [name for name in sides(device) if not options.side or options.side in name]
    runs = [Run(case, name, device, 2 if options.smoke else options.steps) for name in names for case in cases]
    if options.smoke:
        # In this process, where what fails is seen at once.
        rows = rows_of((Outcome(run, measure(run)) for run in runs), None)
    else:
        rows = rows_of(outcomes(measure, runs, ITEM_SECONDS, time.monotonic() + options.seconds), options.output)
    failed = [f"{row['case']}, {row['side']}: {row['error']}" for row in rows if row["error"]]
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))
    return rows


if __name__ == "__main__":
    main()
