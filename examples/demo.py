"""`make demo`: train two small language models on Python code, on four local processes, under autopar's plans.

Measure the machine. Then, for each model: plan, print the report, train on four processes and on one, and show the
losses side by side. The demo fails if they differ by more than round-off. The generated programs stay in
./autopar_out.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# A CPU rank computes on one thread; libraries that read this do so when they are first imported.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.cli.output import show
from autopar.files.outputs import write_output
from autopar.report import render_report, report_panels
from autopar.report.terminal import WIDTH
from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig
from autopar.training.result import TrainResult
from autopar.units import count_text, seconds_text
from cost_models.mixed_cluster import AnyCluster
from examples.models import gpt2, llama
from examples.text import VOCAB_SIZE, Corpus, standard_library

SHOWN_STEPS = 8
MIB = 2**20
ROUND_OFF = 1e-5
"""Relative float32 error of a loss or a gradient under another order of summation, as `autopar.verify` allows."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the models and their batches. batch_size: rows of a step over all processes."""

    width: int
    layers: int
    num_heads: int
    batch_size: int
    seq_len: int


def make_llama(sizes: Sizes) -> nn.Module:
    """Rotary positions, RMSNorm, SwiGLU."""
    return llama(**_common(sizes), ffn_width=sizes.width * 8 // 3 // 32 * 32).model


def make_gpt2(sizes: Sizes) -> nn.Module:
    """Learned positions, LayerNorm, fused QKV, GELU, tied embeddings, dropout."""
    return gpt2(**_common(sizes), dropout=0.1).model


def _common(sizes: Sizes) -> dict[str, int]:
    return {
        "vocab_size": VOCAB_SIZE,
        "width": sizes.width,
        "layers": sizes.layers,
        "num_heads": sizes.num_heads,
        "seq_len": sizes.seq_len,
    }


MODELS: dict[str, tuple[str, Callable[[Sizes], nn.Module]]] = {
    "llama": ("Llama-style model", make_llama),
    "gpt2": ("GPT-2", make_gpt2),
}


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of the corpus, starting at a sample."""

    corpus: Corpus
    batch_size: int
    seq_len: int

    def __call__(self, start: int) -> Iterator[dict[str, Tensor]]:
        return self.corpus.batches(self.batch_size, self.seq_len, start=start)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and run. arguments: by default those of the command line."""
    options = _options(arguments)
    console = Console(highlight=False)
    console = Console(highlight=False, width=min(console.width, WIDTH) if console.is_terminal else WIDTH)
    started = time.perf_counter()
    console.print(Rule("[bold]autopar demo"))
    cluster = autopar.ClusterSpec.parse(options.cluster) if options.cluster else _measured(console, options.processes)
    sizes = Sizes(options.width, options.layers, options.heads, options.batch, options.seq)
    corpus = standard_library()
    console.print(
        f"text: {count_text(len(corpus.tokens))} bytes of this Python's standard library, as {VOCAB_SIZE} byte values"
    )
    config = TrainerConfig(
        cluster=cluster,
        steps=options.steps,
        learning_rate=options.lr,
        max_grad_norm=1.0,
        measure_memory=True,
        log_every=max(options.steps // 5, 1),
    )
    for name in options.models:
        _show_model(console, name, sizes, corpus, config, Path(options.out))
    console.print(Rule())
    console.print(f"the demo took {time.perf_counter() - started:.0f} s")


def _measured(console: Console, processes: int) -> AnyCluster:
    started = time.perf_counter()
    if 0 < (num_gpus := torch.cuda.device_count()) < processes:
        console.print(f"GPUs here: {num_gpus}, so the demo's {processes} processes share the CPU, of nominal speed")
        return autopar.ClusterSpec.parse(f"{processes} cpu")
    console.print("measuring this machine's CPU and the messages between processes (kept for later runs) ...")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cluster = autopar.ClusterSpec.detect(processes)
    for warning in caught:
        console.print(f"[yellow]note: {warning.message}")
    console.print(f"cluster: {cluster}, measured in {time.perf_counter() - started:.1f} s")
    return cluster


def _show_model(console: Console, name: str, sizes: Sizes, corpus: Corpus, config: TrainerConfig, out: Path) -> None:
    title, make = MODELS[name]
    model = make(sizes)
    console.print(Rule(f"[bold]{title}, {count_text(sum(p.numel() for p in model.parameters()))} parameters"))
    batches = Batches(corpus, sizes.batch_size, sizes.seq_len)
    untrained = copy.deepcopy(model)  # fit leaves the model trained
    trainer = Trainer(model, config, batches)
    started = time.perf_counter()
    with console.status("tracing and planning ..."):
        program = trainer.compile()
    console.print(f"planned and generated in {time.perf_counter() - started:.1f} s\n")
    show(*report_panels(program))
    folder = program.save(out / name)
    write_output(out / f"{name}.txt", render_report(program))
    ranks = program.plan.num_ranks
    console.print(f"\ntraining on {ranks} processes as {program.plan.mesh_text}")
    together = trainer.fit()
    console.print("training the same model on this one process")
    alone = Trainer(untrained, replace(config, auto_parallel=False), batches).fit()
    differences = [abs(a - b) / abs(a) for a, b in zip(alone.losses, together.losses, strict=True)]
    bound = round_off_bound(model, config)
    show(_losses(alone, together, differences, bound))
    if not all(difference <= bound for difference in differences):
        sys.exit(f"error: the losses of {title} differ by {max(differences):.1e}, round-off explains {bound:.1e}")
    show(_costs(alone, together, sizes))
    console.print(f"the generated program is in {folder}; it needs torch only:")
    console.print(f"  torchrun --nproc-per-node {ranks} {folder}/main.py --steps 10 --data README.md", soft_wrap=True)


def round_off_bound(model: nn.Module, config: TrainerConfig) -> float:
    """Return the largest relative difference of losses under another order of summation.

    A step of AdamW moves each of n parameters by about the learning rate, however small its gradient. So gradients that
    are off by a share e move the loss by up to rate * sqrt(n) * e times their length, which is taken to be no more than
    the loss; and what the steps do adds up.
    """
    count = sum(p.numel() for p in model.parameters())
    return ROUND_OFF * (1 + config.steps * config.learning_rate * math.sqrt(count))


def _losses(alone: TrainResult, together: TrainResult, differences: Sequence[float], bound: float) -> Table:
    """Print some losses side by side, and the largest difference of all with its bound."""
    table = _table("Loss", ("step", "one process", "all processes", "relative difference"))
    count = len(differences)
    shown = sorted({round(i * (count - 1) / (SHOWN_STEPS - 1)) for i in range(SHOWN_STEPS)}) if count else []
    for index in shown:
        figures = f"{alone.losses[index]:.6f}", f"{together.losses[index]:.6f}", f"{differences[index]:.1e}"
        table.add_row(str(index + 1), *figures)
    table.add_section()
    table.add_row(f"largest of {count}", "", "", f"{max(differences, default=0.0):.1e}", style="bold")
    table.add_row("round-off explains", "", "", f"{bound:.1e}")
    return table


def _costs(alone: TrainResult, together: TrainResult, sizes: Sizes) -> Table:
    """Print measured and predicted time and memory."""
    assert together.program is not None
    prediction = together.program.plan.prediction
    tokens = sizes.batch_size * sizes.seq_len
    threads = torch.get_num_threads()
    table = _table(
        "Time and memory",
        ("", f"one process, {threads} thread{'s' if threads > 1 else ''}", "all processes, 1 thread each", "predicted"),
    )
    times = alone.step_seconds, together.step_seconds, prediction.step_seconds
    table.add_row("one step (median)", *(seconds_text(t) for t in times))
    table.add_row("tokens/s", *(count_text(tokens / t) for t in times))
    peaks = max(alone.peak_bytes), max(together.peak_bytes), prediction.peak_bytes
    table.add_row("peak memory of a process*", *(f"{peak / MIB:.1f} MiB" for peak in peaks))
    table.caption = "* of tensors alive in the second step, counted operator by operator (not resident set size)"
    table.caption_justify = "left"
    return table


def _table(title: str, headers: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    return table


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--cluster", help="plan with these figures instead of measuring, such as '4 cpu'")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="sequences of one step, over all processes")
    parser.add_argument("--seq", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--out", default="autopar_out", help="where the generated programs go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
