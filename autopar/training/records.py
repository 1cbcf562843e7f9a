"""Log records of steps and evaluations, and the logs that they are written to.

A record of a step has "step", "loss", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second" (or
"samples_per_second"), "mfu", "peak_bytes", "loss_scale" (in fp16) and "skipped" (steps without an update so far). With
a plan it has "predicted_step_seconds" and "predicted_peak_bytes", too. A record of an evaluation has "step",
"eval_loss" and the metrics. Unknown figures are left out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from autopar.compiled import CompiledProgram
from autopar.costs.flops import model_flops_utilisation
from autopar.errors import ConstraintError, OutputError
from autopar.files.outputs import replace_file, require_folder
from autopar.files.text_files import parse_json
from autopar.report.figures import figures_of
from autopar.training.config import Batch, TrainerConfig
from autopar.training.loaders import leaves_of_batch, num_rows

Record = Mapping[str, Any]
METRICS_FILE = "metrics.jsonl"


class StepFigures:
    """Figures of a step from its seconds: its speed and, with a plan, its share of the devices' peak and the
    prediction."""

    def __init__(self, program: CompiledProgram | None) -> None:
        self._program = program
        self._figures = None if program is None else figures_of(program)

    def of(self, batch: Batch, seconds: float) -> dict[str, Any]:
        """Return the figures of one step. For a batch of another shape, flops are proportional to its items."""
        items, unit = items_of(batch)
        speed: dict[str, Any] = {"step_seconds": seconds, f"{unit}_per_second": items / seconds}
        if self._program is None or self._figures is None:
            return speed
        plan, planned = self._program.plan, self._figures.tokens if unit == "tokens" else self._figures.rows
        flops = self._figures.flops * items / planned if planned else self._figures.flops
        return speed | {
            "mfu": model_flops_utilisation(flops, seconds, self._program.cluster, plan.precision),
            "predicted_step_seconds": plan.prediction.step_seconds,
            "predicted_peak_bytes": plan.prediction.peak_bytes,
        }


def items_of(batch: Batch) -> tuple[int, str]:
    """Count what a step consumes: tokens, or samples where no input looks like token numbers."""
    tokens = max((value.numel() for value in leaves_of_batch(batch) if is_token_tensor(value)), default=0)
    return (tokens, "tokens") if tokens else (num_rows(batch), "samples")


def is_token_tensor(value: Any) -> bool:
    """Return whether an input looks like token numbers: integers in two dimensions."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


class Log(Protocol):
    """A destination of records."""

    def write(self, record: Record) -> None:
        """Write one record, at once."""
        ...

    def close(self) -> None:
        """Close the log."""
        ...


class JsonLines:
    """A file with one JSON object per line. A resumed run first removes the lines after `step`, since these steps run
    again. The file of another run is kept under another name."""

    def __init__(self, path: Path, step: int) -> None:
        lines = _lines(path)
        if lines and not step:
            path.rename(
                next(free for n in itertools.count(1) if not (free := path.with_suffix(f".{n}.jsonl")).exists())
            )
        kept = [line for line in lines if step and _step_of(line) <= step]
        replace_file(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps({name: _json_value(value) for name, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard. Those of evaluations have names of their own."""

    def __init__(self, directory: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # needs an extra
        except ImportError as error:
            raise ConstraintError(
                "logging.tensorboard needs the package tensorboard",
                values=str(error),
                alternatives="pip install 'autopar[tensorboard]'",
            ) from None
        self._writer: Any = SummaryWriter(str(directory), purge_step=step + 1 if step else None)

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases."""

    def __init__(self, project: str, config: Mapping[str, Any], directory: Path | None) -> None:
        wandb = _wandb()
        self._run = wandb.init(project=project, config=dict(config), dir=None if directory is None else str(directory))

    def write(self, record: Record) -> None:
        self._run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def check_logging(config: TrainerConfig) -> None:
    """Raise ConstraintError or OutputError, before anything starts, where logs or traces cannot be written."""
    section = config.logging
    if section.tensorboard:
        if directory_of(config) is None:
            raise ConstraintError("logging.tensorboard needs logging.directory", alternatives="checkpoint_directory")
        try:
            import tensorboard  # noqa: F401  # an extra
        except ImportError:
            raise ConstraintError(
                "logging.tensorboard needs the package tensorboard", alternatives="pip install 'autopar[tensorboard]'"
            ) from None
    if section.wandb is not None:
        _wandb()
    if (directory := directory_of(config)) is not None:
        require_folder(directory)
        if (directory / METRICS_FILE).is_dir():
            raise OutputError(
                "the log must be a file",
                values=f"{directory / METRICS_FILE} is a folder",
                alternatives="another logging.directory",
            )
    if config.profiler.directory is not None:
        require_folder(Path(config.profiler.directory))


def directory_of(config: TrainerConfig) -> Path | None:
    """Return the folder of the logs, if there is one."""
    named = config.logging.directory or config.checkpoint_directory
    return None if named is None else Path(named)


@contextlib.contextmanager
def logs(config: TrainerConfig, step: int) -> Iterator[list[Log]]:
    """Open the logs of the configuration, for a run that begins after `step`."""
    directory, section = directory_of(config), config.logging
    opened: list[Log] = []
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            opened.append(JsonLines(directory / METRICS_FILE, step))
            if section.tensorboard:
                opened.append(TensorBoard(directory / "tensorboard", step))
        if section.wandb is not None:
            opened.append(WeightsAndBiases(section.wandb, config.dump(), directory))
        yield opened
    finally:
        for log in opened:
            log.close()


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without a line that a crash cut off."""
    records = []
    for line in _lines(Path(path)):
        with contextlib.suppress(ValueError):
            records.append(parse_json(line))
    return records


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _step_of(line: str) -> float:
    """Return the step of a line, or infinity for a line that cannot be read."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json_value(value: Any) -> Any:
    """Return a value as JSON has it: inf and nan are texts."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _wandb() -> Any:
    try:
        import wandb  # where a user has it
    except ImportError:
        raise ConstraintError("logging.wandb needs the package wandb", alternatives="pip install wandb") from None
    return wandb
