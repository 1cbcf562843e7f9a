"""Show training as it runs: a progress bar on a terminal, a line now and then elsewhere; and sum up a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autopar.report.tables import VisibleConsole, short_table
from autopar.training.result import TrainResult
from autopar.units import bytes_text, count_text, seconds_text


class TrainingProgress:
    """`with TrainingProgress(...) as progress: progress.advance(step, loss, seconds)` once per step.

    label: the program that trains. num_items: what a step consumes, counted in `unit`. predicted_seconds: of one step,
    0 without a prediction. log_every: steps between lines where the output is no terminal; 0 shows nothing at all.
    """

    def __init__(
        self, label: str, steps: int, first: int, num_items: int, unit: str, predicted_seconds: float, log_every: int
    ) -> None:
        self.label, self.steps, self.num_items, self.unit = label, steps, num_items, unit
        self.predicted_seconds, self.log_every = predicted_seconds, log_every
        self.console = VisibleConsole(quiet=not log_every, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not self.is_bar)
        self.task = self.bar.add_task(label, total=steps, completed=first, figures="")

    @property
    def is_bar(self) -> bool:
        return self.console.is_terminal and bool(self.log_every)

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def advance(self, step: int, loss: float, seconds: float, num_skipped: int = 0) -> None:
        """Show that `step` steps are done, num_skipped of them without an update; the last had `loss` and `seconds`."""
        predicted = f" (predicted {seconds_text(self.predicted_seconds)})" if self.predicted_seconds else ""
        speed = f"{count_text(self.num_items / seconds)} {self.unit}/s"
        figures = f"loss {loss:.4f}  {speed}  {seconds_text(seconds)}/step{predicted}"
        figures += f"  {num_skipped} skipped (not finite)" if num_skipped else ""
        if self.is_bar:
            self.bar.update(self.task, completed=step, figures=figures)
        elif self.log_every and (step % self.log_every == 0 or step == self.steps):
            self.console.print(f"{self.label}  step {step}/{self.steps}  {figures}", soft_wrap=True)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of an evaluation after `step` steps."""
        if self.log_every:
            figures = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self.console.print(f"{self.label}  step {step}/{self.steps}  evaluation: {figures}", soft_wrap=True)


def train_summary(result: TrainResult) -> RenderableType:
    """Return a table of a run's loss, speed and memory, with the predicted figures."""
    table = short_table("Training", "", "measured", "predicted")
    plan = result.program.plan if result.program else None
    steps = result.first_step + len(result.losses)
    table.add_row("steps", f"{result.first_step} to {steps}" if result.first_step else f"{steps}", "")
    if result.losses:
        table.add_row("loss", f"{result.losses[0]:.4f} -> {result.losses[-1]:.4f}", "")
        predicted = seconds_text(plan.prediction.step_seconds) if plan else ""
        table.add_row("one step (median)", seconds_text(result.step_seconds), predicted)
    if result.evaluations:
        first, last = (result.evaluations[at]["loss"] for at in (0, -1))
        table.add_row("loss in evaluation", f"{first:.4f} -> {last:.4f}", "")
    if result.stopped:
        table.add_row("stopped early", result.stopped, "")
    if result.peak_bytes:
        peak = bytes_text(plan.prediction.peak_bytes) if plan else ""
        table.add_row("peak memory of a rank", bytes_text(max(result.peak_bytes)), peak)
    if result.checkpoint:
        table.add_row("checkpoint", str(result.checkpoint), "")
    return table
