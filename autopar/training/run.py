"""One run: steps, evaluations, checkpoints and logs in their order. It is the same on every rank."""

from __future__ import annotations

import contextlib
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn

from autopar.compiled import CompiledProgram
from autopar.costs.updates import OptimizerFactory
from autopar.errors import ConstraintError, TrainingError
from autopar.files.outputs import write_output
from autopar.running.supervise import is_autopar_handler
from autopar.training import checkpoints
from autopar.training.callbacks import Callback, Callbacks, TrainState, device
from autopar.training.config import Batch, Batches, TrainerConfig
from autopar.training.feeding import evaluation_batches, steps_from
from autopar.training.learners import PlainLearner, RankLearner
from autopar.training.loaders import num_rows
from autopar.training.measuring import WARM_STEPS, Memory, profiled
from autopar.training.metrics import LOSS, Means, Metric, metric_values
from autopar.training.optimizers import Schedule
from autopar.training.progress import TrainingProgress
from autopar.training.records import Log, Record, StepFigures, items_of, logs
from autopar.training.result import BY_SIGTERM, TrainResult
from autopar.training.run_state import Best, Stateful, restore_state, state_text
from codegen.runtime.processes import Ending
from cost_models.mixed_cluster import AnyCluster


@dataclass(frozen=True, slots=True)
class Setup:
    """The model, its data, and how to train it.

    schedule: None for a constant rate. eval_batches: None without evaluations. metrics: of the evaluations. source:
    further fields of a configuration file ("model", "data", "sequence_length"), for the dump.
    """

    model: nn.Module
    config: TrainerConfig
    batches: Batches
    loss_fn: Callable[..., torch.Tensor] | None
    optimizer: OptimizerFactory
    schedule: Schedule | None = None
    eval_batches: Batches | None = None
    callbacks: tuple[Callback, ...] = ()
    metrics: tuple[Metric, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)

    def dump(self, cluster: AnyCluster | None = None) -> dict[str, Any]:
        """Return the configuration and its source as a file has them. cluster: the one that "detect" returned."""
        config = self.config if cluster is None else replace(self.config, cluster=cluster)
        return {**self.source, **config.dump()}


CONFIG_FILE = "config.yaml"
OWED = "owed"
"""The note of a checkpoint that a run wrote on SIGTERM before a due evaluation."""


class Run:
    """A run of one learner. program: None for a plain run."""

    def __init__(
        self,
        learner: RankLearner | PlainLearner,
        setup: Setup,
        memory: Memory,
        program: CompiledProgram | None,
    ) -> None:
        self.learner, self.setup, self.config = learner, setup, setup.config
        self.memory, self.program = memory, program
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.schedule: Any = None if setup.schedule is None else setup.schedule(learner.optimizer)
        section = self.config.evaluation
        self.best = Best(section.metric, section.greater_is_better, section.min_delta, section.patience)
        self.callbacks = Callbacks(setup.callbacks, self.rank == 0)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.evaluations: list[Mapping[str, float]] = []
        self.checkpoint: Path | None = None
        self.stopped = ""
        self.is_ending = False
        self._ending: Ending | None = None
        self._owes_evaluation = False
        self._logs: list[Log] = []
        self._progress: TrainingProgress | None = None
        self._figures = StepFigures(program)

    def result(self) -> TrainResult:
        """Train, and return the result."""
        config, learner, is_first = self.config, self.learner, self.rank == 0
        with contextlib.ExitStack() as stack:
            if config.checkpoint_directory is not None:
                self._ending = Ending(device(), is_alone=is_autopar_handler(signal.getsignal(signal.SIGTERM)))
                stack.callback(self._ending.close)
            if is_first:
                stack.enter_context(checkpoints.locked(config.checkpoint_directory))
            self.checkpoint = checkpoints.resume(config.checkpoint_directory, self._load, is_first)
            self.first = learner.num_steps
            if is_first:
                self._logs = stack.enter_context(logs(config, self.first))
                self._write_config()
            source = steps_from(self.setup.batches, learner.num_samples, config.gradient_accumulation_steps)
            profiler = stack.enter_context(profiled(config.profiler, self.rank))
            self._tell("start", {})
            self._try_metrics()
            is_over = self._is_told_to_end()
            if self._owes_evaluation and not is_over:  # the run ended before it, and starts again
                is_over = self._after(self.first) and self.first < config.steps
            is_over = is_over or self._is_without_hope()  # the run had stopped, and starts again
            for done in () if is_over else range(self.first + 1, config.steps + 1):
                batch = next(source)
                if done == self.first + 1:
                    self._show_progress(batch, stack)
                self._step(batch, done)
                profiler.step()
                if self._after(done):
                    break
            self._tell("end", {})
        steady = self.seconds[WARM_STEPS:] or self.seconds
        return TrainResult(
            losses=tuple(self.losses),
            first_step=self.first,
            step_seconds=statistics.median(steady) if steady else 0.0,
            peak_bytes=() if self.memory.peak_bytes is None else (self.memory.peak_bytes,),
            num_samples=learner.num_samples,
            checkpoint=self.checkpoint,
            num_skipped=learner.num_skipped,
            evaluations=tuple(self.evaluations),
            stopped=self.stopped,
        )

    # Steps ------------------------------------------------------------------------------------------------------------

    def _step(self, batch: Batch, done: int) -> None:
        learner, skipped = self.learner, self.learner.num_skipped
        rates, scale = [float(group["lr"]) for group in learner.optimizer.param_groups], learner.loss_scale
        started = time.perf_counter()
        self._share_changes()
        with _stopping(self.checkpoint):
            self.losses.append(learner(batch))
        if done == self.first + 1 and self.config.checkpoint_directory:
            learner.check()
            self._notes()
        if self.schedule is not None and learner.num_skipped == skipped and not self._waits_for_metric:
            self.schedule.step()
        self.seconds.append(time.perf_counter() - started)
        self.memory.after_step(done - self.first)
        if self._progress is not None:
            self._progress.advance(done, self.losses[-1], self.seconds[-1], learner.num_skipped)
        figures = {"grad_norm": learner.grad_norm, "loss_scale": scale, "peak_bytes": self.memory.peak_bytes}
        record = {
            **{"step": done, "loss": self.losses[-1], "learning_rate": rates[0]},
            **{name: value for name, value in figures.items() if value is not None},
            **self._figures.of(batch, self.seconds[-1]),
            "skipped": learner.num_skipped,
        }
        self._write(record)
        self._tell("step", record, rates)

    def _share_changes(self) -> None:
        """Repeat on all ranks the changes that callbacks made to rank 0's model."""
        if self.setup.callbacks:
            self.learner.share_changes()

    def _after(self, done: int) -> bool:
        """Do what is due after a step. Return True after the last step, also where the run ends early."""
        config = self.config
        is_last = done == config.steps or self._is_told_to_stop()
        every = config.evaluation.every
        self._owes_evaluation = self.setup.eval_batches is not None and (is_last or bool(every and done % every == 0))
        if not self._is_told_to_end() and self._owes_evaluation and self._evaluate(done):
            self._owes_evaluation = False
            is_last = is_last or self._is_told_to_stop() or self._is_without_hope()
        every = config.checkpoint_every
        if config.checkpoint_directory and (is_last or self.is_ending or (every and done % every == 0)):
            self._save(done)
            self._is_told_to_end()  # during the write
        if self.is_ending and self.rank == 0:
            print(f"SIGTERM: stopped, and {self.checkpoint} is of step {done}", file=sys.stderr)
        return is_last or self.is_ending

    def _is_told_to_end(self) -> bool:
        """Return whether a rank got SIGTERM and the run can write a checkpoint. Collective."""
        if self._ending is not None and not self.is_ending and self._ending.is_told():
            self.is_ending, self.stopped = True, BY_SIGTERM
        return self.is_ending

    def _is_told_to_stop(self) -> bool:
        """Return whether a callback asked for an end. Collective."""
        if self.callbacks.agree():
            self.stopped = f"the callback {self.callbacks.wants_stop} asked for it"
        return bool(self.stopped)

    def _is_without_hope(self) -> bool:
        """Return whether too many evaluations brought no improvement. Their values are equal on all ranks."""
        if self.best.is_over:
            best = f"{self.best.metric} than {self.best.value:.6g}"
            self.stopped = f"{self.best.num_without} evaluations without a better {best}"
        return self.best.is_over

    # Evaluation -------------------------------------------------------------------------------------------------------

    def _evaluate(self, done: int) -> bool:
        """Evaluate: the mean loss and metrics over all batches, weighted by rows. Return False where the run is told to
        end meanwhile; this evaluation then counts as not done."""
        assert self.setup.eval_batches is not None
        self._share_changes()
        means, started = Means(), time.perf_counter()
        for batch in evaluation_batches(self.setup.eval_batches, self.config.evaluation.num_batches):
            means.add(self._evaluated(batch), num_rows(batch))
            if self._is_told_to_end():
                return False
        values = means.values
        self.evaluations.append({"step": done, **values})
        self.best.note(values)
        if self._waits_for_metric:
            self.schedule.step(values[self.best.metric])
        record = {"step": done, **{f"eval_{name}": value for name, value in values.items()}}
        record["eval_seconds"] = time.perf_counter() - started
        if self._progress is not None:
            self._progress.evaluated(done, values)
        self._write(record)
        self._tell("evaluation", record)
        return True

    def _try_metrics(self) -> None:
        """Evaluate one batch before the first step, so that faulty metric functions raise now."""
        if not self.setup.metrics or self.setup.eval_batches is None:
            return
        self._share_changes()
        values = self._evaluated(next(evaluation_batches(self.setup.eval_batches, 1)))
        if self.best.metric not in values:
            raise ConstraintError(
                "evaluation.metric is none of the metrics", values=self.best.metric, alternatives=", ".join(values)
            )

    def _evaluated(self, batch: Batch) -> dict[str, float]:
        """Return the loss and the metrics of one batch."""
        if not self.setup.metrics:
            return {LOSS: self.learner.evaluate(batch)}
        loss, logits = self.learner.evaluate_with_logits(batch)
        return {LOSS: loss, **metric_values(self.setup.metrics, logits, batch)}

    @property
    def _waits_for_metric(self) -> bool:
        """Whether evaluations move the schedule, rather than steps."""
        return isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def _save(self, done: int) -> None:
        notes, directory = self._notes(), self.config.checkpoint_directory
        assert directory is not None
        with _stopping(self.checkpoint):
            self.checkpoint = checkpoints.write(
                directory,
                done,
                lambda path: self.learner.save(path, notes),
                self.rank == 0,
                _barrier,
                self.config.keep_checkpoints,
            )
        self._tell("checkpoint", {"step": done, "checkpoint": str(self.checkpoint)})

    def _notes(self) -> dict[str, str]:
        """Return a checkpoint's notes. Raises CheckpointError for state that cannot be saved."""
        notes = {"config": self._configuration(), "evaluation": state_text("evaluation", self.best)}
        if self._owes_evaluation:
            notes[OWED] = "evaluation"
        if self.schedule is not None:
            notes["schedule"] = state_text("schedule", self.schedule)
        if isinstance(self.setup.batches, Stateful):
            notes["batches"] = state_text("batches", self.setup.batches)
        return notes

    def _load(self, path: Path) -> None:
        notes = self.learner.load(path)
        self._owes_evaluation = OWED in notes
        places: dict[str, Stateful | None] = {"evaluation": self.best, "schedule": self.schedule}
        if isinstance(self.setup.batches, Stateful):
            places["batches"] = self.setup.batches
        for name, value in places.items():
            if value is not None and name in notes:
                restore_state(value, notes[name])

    def _write_config(self) -> None:
        if self.config.checkpoint_directory is not None:
            write_output(Path(self.config.checkpoint_directory) / CONFIG_FILE, self._configuration())

    def _configuration(self) -> str:
        """Return the YAML file that `autopar train` and `TrainerConfig.from_file` read."""
        fields = self.setup.dump(None if self.program is None else self.program.cluster)
        return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)

    # Progress, logs and callbacks ------------------------------------------------------------------------------------

    def _show_progress(self, batch: Batch, stack: contextlib.ExitStack) -> None:
        """Start the progress bar on rank 0. The first batch gives the number of items per step."""
        items, unit = items_of(batch)
        if self.rank == 0:
            label = self.program.plan.mesh_text if self.program else "one process"
            predicted = self.program.plan.prediction.step_seconds if self.program else 0.0
            self._progress = stack.enter_context(
                TrainingProgress(
                    label=label,
                    steps=self.config.steps,
                    first=self.first,
                    num_items=items,
                    unit=unit,
                    predicted_seconds=predicted,
                    log_every=self.config.log_every,
                )
            )

    def _write(self, record: Record) -> None:
        for log in self._logs:
            log.write(record)

    def _tell(self, event: str, record: Record, rates: list[float] | None = None) -> None:
        if not self.setup.callbacks:
            return
        state = TrainState(
            step=self.learner.num_steps,
            steps=self.config.steps,
            first_step=self.first,
            record=record,
            learning_rates=rates or (),
        )
        self.callbacks.tell(event, state)


@contextlib.contextmanager
def _stopping(checkpoint: Path | None) -> Iterator[None]:
    """Raise numbers that are no longer finite as TrainingError, with the checkpoint to resume from."""
    try:
        yield
    except FloatingPointError as error:
        kept = f"the last checkpoint, {checkpoint}, is from before" if checkpoint else "there is no checkpoint"
        raise TrainingError(
            "training stopped: its numbers are no longer finite",
            values=f"{error}; {kept}",
            alternatives=["a lower learning_rate, max_grad_norm=1.0, other data", "non_finite='skip' to pass over it"],
        ) from None


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
