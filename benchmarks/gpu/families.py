"""Measure training steps of ten model families on one GPU: Hugging Face, torch.compile, Liger, and the emitted program.

    python -m benchmarks.gpu.families                              all, in five minutes
    python -m benchmarks.gpu.families --family bert t5 --side hf emitted --steps 30
    python -m benchmarks.gpu.families --device cpu --tiny --seconds 0    anywhere: do all sides run, with equal losses?

Families and sizes are those of `benchmarks/families.py`, in bf16 with fp32 masters and AdamW. Sides:

    hf                    Hugging Face's module in bf16, eager, with masters and torch's fused AdamW
    compile               the same under torch.compile(dynamic=False)
    compile graphs        the same with mode="reduce-overhead"
    liger                 the same eager, with Liger's kernels, where liger-kernel is installed and has the family
    emitted               the program of the fastest plan, not captured
    captured              the same program, its step captured as CUDA graphs
    captured inductor     the same with backend="inductor"

A case is a family and a side. Each case has a process of its own, forked after all imports. Cases prepare in parallel
(plan, compile, capture, six first steps), as many as fit the device's memory. One case at a time is measured; the
others are stopped meanwhile (SIGSTOP), so they use neither the host nor the device.

A row has the median and interquartile range of a step (events on the device), the seconds in which the host issues it,
the kernels' seconds and launches (one profiled step), the idle rest, peak bytes of the timed steps, seconds to prepare
and to capture, the plan's prediction, and the first losses. Losses that differ from the family's first row by more than
LOSS_TOLERANCE make the row an error, as do losses of "captured" that differ from those of "emitted".

Rows are appended to benchmarks/results/families.csv as they are measured; every kernel of a row is in families.jsonl
beside it. A case that fails is a row with its error; the exit code is then 1. --seconds ends the run: what has not
begun by then is not recorded, and a second run with --missing measures only that.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# Run by its path, a script has its own folder first, and there `profile` would hide a standard module.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])
# A process that is stopped must have no workers that go on.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.costs.updates import DefaultAdamW
from benchmarks.families import FAMILIES, Size
from benchmarks.hugging_face import LEARNING_RATE, HuggingFace
from benchmarks.table import append
from codegen.capture import why_uncaptured
from codegen.runtime.captured import VARIABLE as CAPTURE
from examples.models import Example

RESULTS = Path(__file__).resolve().parents[1] / "results" / "families.csv"
ORDER = ("bert", "qwen3-moe", "gemma3", "t5", "resnet50", "vit", "llama", "deepseek", "mamba2", "dit")
GIB = {"bert": 10, "vit": 12, "gemma3": 34, "t5": 20, "qwen3-moe": 25, "llama": 55, "resnet50": 12}
"""Memory that a case may take: the most of the measured rows, and a tenth. Others may take OTHER_GIB."""
OTHER_GIB = 30
CASE_SECONDS = 150.0
"""Of preparing and of measuring one case each: twice what is expected."""
FIRST_STEPS, STEPS = 6, 12
"""The first steps are not timed: programs issue three, capture the fourth, and replay from then on."""
LOSS_TOLERANCE = 2e-2
"""Relative: what bf16 leaves of an equal computation."""
CAPTURE_TOLERANCE = 1e-3
"""Relative, between the same program captured and not: sums by atomic additions scatter by less."""
FIELDS = (
    *("date", "commit", "device", "torch", "transformers", "family", "side", "size", "steps"),
    *("median_seconds", "interquartile_seconds", "host_seconds", "kernel_seconds", "idle_seconds", "launches"),
    *("peak_allocated_gib", "peak_reserved_gib", "ready_seconds", "capture_seconds"),
    *("predicted_seconds", "predicted_gib", "first_losses", "loss_error", "error"),
)
Step = Callable[[], Tensor]


class Unavailable(Exception):
    """A side that this machine or version does not have; its rows are left out."""


@dataclass(frozen=True, slots=True)
class Side:
    """A step that trains. predicted: seconds and bytes of the plan. captures: whether one of its first steps records
    graphs. is_replayed: whether there are graphs afterwards."""

    step: Step
    predicted: tuple[float, float] | None = None
    captures: bool = False
    is_replayed: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class Case:
    """A family and a side."""

    family: str
    side: str
    size: Size
    device: str
    num_steps: int

    @property
    def gib(self) -> float:
        """Return the memory that the case may take."""
        return GIB.get(self.family, OTHER_GIB) if self.size == "full" else 1.0


def drawn(case: Case) -> Example:
    """Return the model and its batch, drawn on the device."""
    with torch.device(case.device):
        return FAMILIES[case.family].build(case.size)


def hugging_face(case: Case, mode: str | None = None, is_compiled: bool = False, is_liger: bool = False) -> Side:
    """Return the module's training. mode: of torch.compile."""
    example = drawn(case)
    if is_liger:
        apply_liger(example.model)

    def wrap(model: nn.Module) -> Any:
        return torch.compile(model, dynamic=False, mode=mode) if is_compiled else model

    training = HuggingFace.of(example, wrap)
    if mode is None:
        return Side(training.step)

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return training.step().clone()  # the next step overwrites it

    return Side(step, captures=True)


def apply_liger(model: Any) -> None:
    """Replace modules by Liger's. Raises Unavailable where there are none."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unavailable("liger-kernel is not installed")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if getattr(getattr(model, "config", None), "model_type", None) not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise Unavailable("liger-kernel does not have this family")
    _apply_liger_kernel_to_instance(model=model)


def emitted(case: Case, is_captured: bool, backend: str = "eager") -> Side:
    """Return the step of the fastest plan's program. Raises Unavailable where steps cannot be captured."""
    if is_captured and case.device != "cuda":
        raise Unavailable("steps are captured on GPUs only")
    os.environ[CAPTURE] = "on" if is_captured else "off"
    example = drawn(case)
    inputs = {name: value.cpu() for name, value in example.inputs.items()}
    compiled = autopar.compile(
        example.model.to("cpu"),
        autopar.ClusterSpec.detect(1) if case.device == "cuda" else "1 cpu",
        example_inputs=inputs,
        loss_fn=example.loss_fn,
        optimizer=DefaultAdamW(LEARNING_RATE),
        precision="bf16",
        kernels="on" if case.device == "cuda" else "auto",
        backend=backend,
    )
    if is_captured and (reason := why_uncaptured(compiled.program)):
        raise Unavailable(reason)
    program = compiled.build(first_step_check=False)
    local = compiled.local_batch(example.inputs)
    prediction = compiled.plan.prediction
    return Side(
        step=lambda: program(local),
        predicted=(prediction.step_seconds, float(prediction.peak_bytes)),
        captures=is_captured,
        is_replayed=lambda: not is_captured or program._captured.num_graphs > 0,
    )


SIDES: Mapping[str, Callable[[Case], Side]] = {
    "hf": hugging_face,
    "emitted": lambda case: emitted(case, is_captured=False),
    "captured": lambda case: emitted(case, is_captured=True),
    "compile": lambda case: hugging_face(case, is_compiled=True),
    "captured inductor": lambda case: emitted(case, is_captured=True, backend="inductor"),
    "compile graphs": lambda case: hugging_face(case, is_compiled=True, mode="reduce-overhead"),
    "liger": lambda case: hugging_face(case, is_liger=True),
}
"""In the order of measuring: what is measured first is there if the time ends."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of timed steps: on the device between events, and on the host until a step was issued."""

    device: list[float]
    host: list[float]


def timed(step: Step, num_steps: int, device: str) -> Timing:
    """Time steps. Without a GPU both are the host's seconds."""
    host = []
    is_cuda = device == "cuda"
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)] if is_cuda else []
    if is_cuda:
        torch.cuda.synchronize()
        events[0].record()
    for index in range(num_steps):
        started = time.perf_counter()
        step()
        host.append(time.perf_counter() - started)
        if is_cuda:
            events[index + 1].record()
    if not is_cuda:
        return Timing(list(host), host)
    torch.cuda.synchronize()
    pairs = zip(events, events[1:], strict=False)
    return Timing([before.elapsed_time(after) / 1e3 for before, after in pairs], host)


def kernels_of(step: Step, device: str) -> list[dict[str, Any]]:
    """Return name, seconds and launches of each kernel of one step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    field = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = [
        {"name": average.key[:120], "seconds": getattr(average, field) / 1e6, "launches": average.count}
        for average in profiled.key_averages()
    ]
    return sorted((row for row in rows if row["seconds"] > 0), key=lambda row: -row["seconds"])


def work(case: Case, connection: Any) -> None:
    """Prepare a case, say so, wait for the device, measure, and send the figures; or send the error."""
    try:
        # A group of its own, so that it can be stopped with what it started.
        os.setpgid(0, 0)
        transformers.logging.set_verbosity_error()
        side, figures = prepared(case)
        connection.send(("ready", None))
        connection.recv()
        connection.send(("done", figures | measured(case, side)))
    except Unavailable as error:
        connection.send(("unavailable", str(error)))
    except BaseException as error:
        if isinstance(error, torch.OutOfMemoryError) and case.device == "cuda":
            torch.cuda.empty_cache()
        connection.send(("failed", f"{traceback.format_exc()}"))


def prepared(case: Case) -> tuple[Side, dict[str, Any]]:
    """Return a side after its first steps, and their losses."""
    started = time.perf_counter()
    side = SIDES[case.side](case)
    losses, ends = [], [time.perf_counter()]
    for _ in range(FIRST_STEPS):
        losses.append(float(side.step()))
        ends.append(time.perf_counter())
    ready = time.perf_counter() - started
    if not side.is_replayed():
        raise RuntimeError("no graph was captured; the warning says why")
    # The first step compiles; one of the others records, and the last one replays.
    seconds = [after - before for before, after in zip(ends[1:], ends[2:], strict=False)]
    captured = sum(seconds) - len(seconds) * min(seconds)
    return side, {
        "losses": losses,
        "ready_seconds": f"{ready:.1f}",
        "capture_seconds": f"{captured:.2f}" if side.captures else "",
        "predicted_seconds": f"{side.predicted[0]:.5g}" if side.predicted else "",
        "predicted_gib": f"{side.predicted[1] / 2**30:.3f}" if side.predicted else "",
    }


def measured(case: Case, side: Side) -> dict[str, Any]:
    """Time and profile a prepared side."""
    side.step()
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timing = timed(side.step, case.num_steps, case.device)
    peaks = (0, 0)
    if case.device == "cuda":
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    median, quartiles = statistics.median(timing.device), statistics.quantiles(timing.device, n=4)
    kernels = kernels_of(side.step, case.device)
    busy = sum(kernel["seconds"] for kernel in kernels)
    return {
        "median_seconds": f"{median:.5g}",
        "interquartile_seconds": f"{quartiles[2] - quartiles[0]:.2g}",
        "host_seconds": f"{statistics.median(timing.host):.5g}",
        "kernel_seconds": f"{busy:.5g}",
        "idle_seconds": f"{max(median - busy, 0.0):.5g}",
        "launches": str(sum(kernel["launches"] for kernel in kernels)),
        "peak_allocated_gib": f"{peaks[0] / 2**30:.3f}",
        "peak_reserved_gib": f"{peaks[1] / 2**30:.3f}",
        "kernels": kernels,
    }


@dataclass(slots=True)
class Running:
    """A case in its process. deadline: of time.monotonic()."""

    case: Case
    process: Any
    connection: Any
    deadline: float
    is_ready: bool = False

    def signal(self, number: int) -> None:
        """Send a signal to the process and to all that it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            # It has no group yet, or is gone.
            if self.process.is_alive():
                os.kill(self.process.pid, number)

    def end(self) -> None:
        """End it."""
        self.signal(signal.SIGKILL)
        self.process.join()
        self.connection.close()


Message = tuple[Case, str, Any]
"""A case, "done", "unavailable" or "failed", and the figures or the reason."""


def outcomes(cases: Sequence[Case], num_workers: int, gib: float, deadline: float) -> Iterator[Message]:
    """Run cases, and yield what becomes of each. gib: of the device. deadline: of time.monotonic(), after which nothing
    begins or goes on."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(cases), list[Running]()
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < num_workers:
                used = sum(case.case.gib for case in running)
                fitting = next((case for case in waiting if not running or used + case.gib <= gib), None)
                if fitting is None:
                    break
                waiting.remove(fitting)
                running.append(_started(context, fitting))
            yield from _next_messages(running, deadline)
    finally:
        for case in running:
            case.end()


def _started(context: Any, case: Case) -> Running:
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(case, theirs))
    process.start()
    theirs.close()
    return Running(case, process, ours, time.monotonic() + CASE_SECONDS)


def _next_messages(running: list[Running], deadline: float) -> Iterator[Message]:
    """Wait for messages. A case that is ready is measured at once, alone."""
    limit = min(deadline, *(case.deadline for case in running))
    ready = wait([case.connection for case in running], timeout=max(limit - time.monotonic(), 0.0))
    for case in [case for case in running if case.connection in ready or time.monotonic() >= case.deadline]:
        kind, value = _received(case, 0.0)
        if kind == "ready":
            others = [other for other in running if other is not case]
            for other in others:
                other.signal(signal.SIGSTOP)
            begun = time.monotonic()
            case.connection.send("go")
            kind, value = _received(case, min(CASE_SECONDS, deadline - time.monotonic()))
            for other in others:
                other.deadline += time.monotonic() - begun
                other.signal(signal.SIGCONT)
        running.remove(case)
        case.end()
        yield case.case, kind, value


def _received(case: Running, seconds: float) -> tuple[str, Any]:
    if not case.connection.poll(max(seconds, 0.0)):
        return "failed", f"stopped after {CASE_SECONDS:.0f} s"
    try:
        message: tuple[str, Any] = case.connection.recv()
    except (EOFError, ConnectionResetError):
        case.process.join(5)
        return "failed", f"its process died with exit code {case.process.exitcode}"
    return message


class Table:
    """Rows as they come, checked against the first losses of their families."""

    def __init__(self, output: Path | None) -> None:
        self.output = output
        self.rows: list[dict[str, str]] = []
        self.losses: dict[str, list[float]] = {}
        self.emitted: dict[str, list[float]] = {}
        self.common = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
            "commit": commit(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def add(self, case: Case, kind: str, value: Any, device: str) -> None:
        """Add the row of a case, print and append it."""
        if kind == "unavailable":
            print(f"{case.family:<10} {case.side:<18} left out: {value}", flush=True)
            return
        figures: dict[str, Any] = value if kind == "done" else {}
        losses, error = figures.pop("losses", []), "" if kind == "done" else last_line(value)
        kernels = figures.pop("kernels", [])
        if kind == "failed":
            print(value, flush=True)
        if losses:
            figures["first_losses"] = " ".join(f"{loss:.6g}" for loss in losses)
            difference, error = self._compare(case, losses)
            figures["loss_error"] = f"{difference:.1e}"
        row = dict.fromkeys(FIELDS, "") | self.common | {"device": device, "error": error}
        row |= {"family": case.family, "side": case.side, "size": case.size, "steps": str(case.num_steps)} | figures
        self.rows.append(row)
        shown = ("median_seconds", "interquartile_seconds", "host_seconds", "kernel_seconds", "launches", "error")
        print(f"{case.family:<10} {case.side:<18}", *(f"{row[name]:>10}" for name in shown), flush=True)
        if self.output is not None:
            append([row], self.output)
            with self.output.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | {"kernels": kernels}) + "\n")

    def _compare(self, case: Case, losses: list[float]) -> tuple[float, str]:
        """Return the largest relative difference from the family's first row, and the error that it makes."""
        first = self.losses.setdefault(case.family, losses)
        differences = [abs(a / b - 1) for a, b in zip(losses, first, strict=True)]
        difference = max(differences, key=lambda value: (value != value, value))
        if not difference <= LOSS_TOLERANCE:
            return difference, f"losses {losses}, but those of the family's first row are {first}"
        if case.side == "emitted":
            self.emitted[case.family] = losses
        exact = self.emitted.get(case.family, losses)
        apart = max(abs(a / b - 1) for a, b in zip(losses, exact, strict=True))
        if case.side == "captured" and not apart <= CAPTURE_TOLERANCE:
            return difference, f"losses {losses}, but those of the same program uncaptured are {exact}"
        return difference, ""


def last_line(text: str) -> str:
    """Return the last line of an error, cut to fit a table."""
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else ""


def commit() -> str:
    """Return the commit of this checkout; "" without git."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def measured_before(path: Path, device: str) -> set[tuple[str, str]]:
    """Return families and sides with figures of this device and commit in a table."""
    if not path.exists():
        return set()
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["median_seconds"] and not row["error"]]
    now = commit()
    return {(row["family"], row["side"]) for row in rows if row["device"] == device and row["commit"] == now}


def device_of(name: str) -> tuple[str, float]:
    """Return the device's name and its memory in GiB, asked in a process of its own: no context is open in this one."""
    if name == "cpu":
        return "cpu", 8.0
    query = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.total_memory, sep='|')"
    answer = subprocess.run([sys.executable, "-c", query], capture_output=True, text=True, check=True).stdout
    text, num_bytes = answer.strip().split("|")
    return text, int(num_bytes) / 2**30


def main(arguments: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Measure, print and append. Return the rows; exit with 1 if one has an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--side", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two layers of small width")
    parser.add_argument("--seconds", type=float, default=285.0, help="after which nothing goes on; 0 for no limit")
    parser.add_argument("--workers", type=int, default=0, help="cases at a time; 0: half of the cores, six at most")
    parser.add_argument("--missing", action="store_true", help="only what this commit has not measured on this device")
    parser.add_argument("--output", type=Path, help=f"table to append to; {RESULTS.name}, and none with --tiny")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds if options.seconds else float("inf")
    try:
        device, gib = device_of(options.device)
    except subprocess.CalledProcessError:
        parser.error("no CUDA device; --device cpu --tiny runs without one")
    output = options.output or (None if options.tiny else RESULTS)
    done = measured_before(output, device) if options.missing and output else set()
    size: Size = "tiny" if options.tiny else "full"
    cases = [
        Case(family, side, size, options.device, options.steps)
        for side in SIDES
        for family in ORDER
        if side in options.side and family in options.family and (family, side) not in done
    ]
    table = Table(output)
    workers = options.workers or max(1, min(6, len(os.sched_getaffinity(0)) // 2))
    for case, kind, value in outcomes(cases, workers, 0.9 * gib, deadline):
        table.add(case, kind, value, device)
        cases.remove(case)
    if cases:
        print(f"the time is over; {len(cases)} cases are left: go on with --missing", flush=True)
    if any(row["error"] for row in table.rows):
        raise SystemExit(1)
    return table.rows


if __name__ == "__main__":
    main()
