"""The options that commands share, and the jobs, clusters and programs that they describe."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.text import Text

from autopar.cli.output import say, words_to, working
from autopar.compile import compile_with, planned_alone
from autopar.compiled import CompiledProgram
from autopar.costs.updates import OptimizerFactory
from autopar.errors import AutoparError, ModelError, OutputError, PlanError
from autopar.files.folder_swap import require_replaceable
from autopar.files.outputs import require_writable
from autopar.ir.plan_data import Basis
from autopar.launch import RankError
from autopar.models.job import Job, constraints_of, load_job, parse_settings
from autopar.models.loading import require_model
from autopar.plan import Plan
from autopar.planning.planner import Planned
from autopar.report.tables import VisibleConsole
from autopar.settings.arguments import check_numbers
from autopar.settings.compile_options import CompileOptions
from autopar.training.loop import resolve_cluster
from autopar.units import bytes_text, either_text, seconds_text
from codegen.axis_records import AXES
from cost_models.mixed_cluster import AnyCluster
from cost_models.schedule import SCHEDULES

USER_ERROR, RANK_FAILED, INTERNAL_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 1, 70, 130, 141
"""Exit codes. The last two are a shell's codes for SIGINT and SIGPIPE."""
shows_traceback: ContextVar[bool] = ContextVar("shows_traceback", default=False)
"""True if the command line has --traceback."""

Model = Annotated[
    str, typer.Argument(help="module:factory, file.py:factory, or hf:path/to/config.json", show_default=False)
]
ClusterText = Annotated[str, typer.Option(help='"4x8 h100-sxm", a TOML file, or "detect" to measure this machine')]
Processes = Annotated[int | None, typer.Option(help="processes that share this machine, with --cluster detect")]
Batch = Annotated[
    int | None,
    typer.Option(help="rows of one optimizer step over all ranks \\[default: the factory's, or 8 per device]"),
]
Seq = Annotated[int | None, typer.Option(help="tokens per row \\[default: the factory's, or at most 128]")]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 \\[default: a plan file's own, or fp32]")]
Backend = Annotated[
    str | None,
    typer.Option(
        help="eager; inductor: compile the layers with torch.compile; async-tp: overlap matrix products with their "
        "transfers between GPUs that share memory \\[default: eager]"
    ),
]
Compress = Annotated[
    list[str] | None,
    typer.Option(
        "--compress",
        help="compress ZeRO's traffic (lossy); may be repeated. gather=int8 or fp8: parameters; reduce=int8: gradients",
        metavar="NAME=VALUE",
    ),
]
Fp8 = Annotated[
    bool | None,
    typer.Option("--fp8/--no-fp8", help="compute linear layers in fp8, e4m3 (lossy)", show_default=False),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help=f"a constraint; may be repeated. {', '.join(f'{axis}=2' for axis in AXES)}: degrees; "
        "micro_batches=8; zero=3; "
        f"schedule={either_text(SCHEDULES)}; chunks=2: stages per pipeline rank, "
        f"{either_text(name for name, schedule in SCHEDULES.items() if schedule.chooses_chunks)}; "
        "recompute=none, offload, selective or full; offload=none, optimizer or parameters; memory=20GiB",
        metavar="NAME=VALUE",
    ),
]
Memory = Annotated[str | None, typer.Option(help='bytes that a rank may use, such as "20GiB"')]
ConstraintFile = Annotated[
    str | None, typer.Option("--constraints", help="a YAML or TOML file of constraints", metavar="FILE")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", help="an argument of the factory or field of the configuration", metavar="NAME=VALUE"
    ),
]

Source = Annotated[str, typer.Argument(help="a plan file, or a model", show_default=False)]
GivenCluster = Annotated[
    str | None, typer.Option("--cluster", help="as in plan \\[default: the plan file's, or detect]")
]
GivenModel = Annotated[
    str | None, typer.Option("--model", help="the model of the plan file, to compute its prices again")
]
Timeline = Annotated[
    str | None,
    typer.Option(help="write the simulated step as a trace for Perfetto or chrome://tracing", metavar="FILE"),
]
Page = Annotated[
    str | None,
    typer.Option("--html", help="write the report as one HTML page with diagrams, usable offline", metavar="FILE"),
]
Log = Annotated[
    str | None,
    typer.Option("--log", help="with --html: a run's metrics.jsonl, to show beside the prediction", metavar="FILE"),
]
Json = Annotated[
    bool, typer.Option("--json", help="print one JSON object (docs/cli.md); all other text goes to standard error")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print only errors, and the JSON of --json")]
Force = Annotated[bool, typer.Option("--force", help="replace files that autopar did not write, or that you edited")]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of every command that takes a model and plans, as typer reads them."""

    processes: Processes = None
    batch: Batch = None
    seq: Seq = None
    precision: Precision = None
    compress: Compress = None
    settings: Settings = None
    memory: Memory = None
    constraints: ConstraintFile = None
    option: Options = None

    @property
    def limits(self) -> dict[str, Any]:
        """The constraints of the file, overridden by --set and --memory."""
        return constraints_of(self.settings or (), self.memory, self.constraints)

    def plan_options(self, **more: Any) -> dict[str, Any]:
        """Return fields of PlanOptions by name: those of the flags, and those of `more` that are not None."""
        fields = {
            "global_batch_size": self.batch,
            "precision": self.precision,
            "compression": parse_settings(self.compress, "--compress") if self.compress else None,
            "constraints": self.limits or None,
        }
        return {name: value for name, value in (fields | more).items() if value is not None}


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command for typer: one option per field of `flags`, `--quiet`, and errors as a message and an exit
    code."""
    signature = inspect.signature(function, eval_str=True)
    parts = {field.name: field for field in dataclasses.fields(Flags)}
    hints = get_type_hints(Flags, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.annotation is Flags:
            parameters += [
                parameter.replace(name=name, default=part.default, annotation=hints[name])
                for name, part in parts.items()
            ]
        else:
            parameters.append(parameter)
    parameters.append(inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet))

    numbers = [option.name for option in parameters if _is_number(option.annotation)]

    @functools.wraps(function)
    def called(**arguments: Any) -> None:
        try:
            check_numbers({name: arguments[name] for name in numbers if arguments[name] is not None})
            if "flags" in signature.parameters:
                arguments["flags"] = Flags(**{name: arguments.pop(name) for name in parts})
            with words_to(arguments.pop("quiet"), arguments.get("as_json", False)):
                function(**arguments)
                sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader closed the pipe: discard what Python flushes at exit
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            raise typer.Exit(_tell(error)) from None

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {option.name: option.annotation for option in parameters}
    return called


def _is_number(annotation: Any) -> bool:
    """Return whether an option takes a number. `codegen.runtime.options.RANGES` has the ranges by name."""
    kind = get_args(annotation)[0]
    return not {int, float}.isdisjoint((kind, *get_args(kind)))


def _tell(error: Exception) -> int:
    """Print an error, with its traceback under --traceback. Returns the exit code."""
    with_traceback = shows_traceback.get()
    if with_traceback:
        traceback.print_exception(error)
    if isinstance(error, AutoparError):
        kind, text, code = "error", str(error), USER_ERROR
    elif isinstance(error, RankError):
        first, *others = str(error).splitlines()
        last = f" {others[-1]}" if others else ""
        kind, text, code = (
            "error",
            first.removesuffix("Traceback (most recent call last):").rstrip() + last,
            RANK_FAILED,
        )
    elif isinstance(error, OSError) and error.filename is not None:
        kind, text, code = "error", f"{error.filename}: {error.strerror}", USER_ERROR
    else:
        advice = "" if with_traceback else "; please report it with the output of --traceback"
        message = " ".join(f"{type(error).__name__}: {error}".split())
        kind, code = "internal error", INTERNAL_ERROR
        text = f"this is a defect of autopar, not of its input: {message} ({_place(error)}){advice}"
    VisibleConsole(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble((kind, "bold red"), ": ", text))
    return code


def _place(error: Exception) -> str:
    """Return the innermost line of autopar in an error's traceback: `autopar/plan.py, line 12`."""
    home = Path(__file__).resolve().parents[2]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(home)]
    our_frames = [frame for frame in frames if "site-packages" not in Path(frame.filename).relative_to(home).parts]
    return (
        f"{Path(our_frames[-1].filename).relative_to(home)}, line {our_frames[-1].lineno}"
        if our_frames
        else "outside of autopar"
    )


def read_cluster(text: str, processes: int | None, model: str | None = None) -> AnyCluster:
    """Return the cluster that --cluster names. Notes on its measurement go to standard error.

    model: the name of the model to plan, which is checked before the cluster is measured.
    """
    if model is not None:
        require_model(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec = resolve_cluster(text, processes)
    for warning in caught:
        say(f"note: {warning.message}", as_note=True)
    return spec


def read_job(model: str, num_devices: int, flags: Flags, meta: bool, lazy: bool = False) -> Job:
    """Load the model with a batch. meta: without memory, for a model from a configuration; lazy: as in load_model."""
    options = parse_settings(flags.option or (), "--option")
    return load_job(
        model, num_devices=num_devices, batch=flags.batch, seq=flags.seq, options=options, meta=meta, lazy=lazy
    )


def compile_job(
    job: Job, cluster: AnyCluster, options: dict[str, Any], optimizer: OptimizerFactory | None = None
) -> CompiledProgram:
    """Compile a job. options: fields of PlanOptions by name."""
    compile_options = CompileOptions(example_inputs=job.inputs, loss_fn=job.loss_fn, optimizer=optimizer, **options)
    with working(f"planning for {cluster}"):
        return compile_with(job.model, cluster, compile_options)


def plan_of_model(source: str, cluster: str | None, flags: Flags) -> Planned:
    """Choose the plan for a model, without its program."""
    options = flags.plan_options()
    spec = read_cluster(cluster or "detect", flags.processes, source)
    job = read_job(source, spec.num_devices, flags, meta=True)
    compile_options = CompileOptions(example_inputs=job.inputs, loss_fn=job.loss_fn, **options)
    with working(f"planning for {spec}"):
        return planned_alone(job.model, spec, compile_options)


def program_of_source(source: str, model: str | None, cluster: str | None, flags: Flags) -> CompiledProgram:
    """Compile a plan file with its model, or choose a plan for a model and compile it.

    Flags override the settings in the plan file. A note then says how the prediction differs from the file's.
    """
    options = flags.plan_options()
    if not is_plan_file(source):
        spec = read_cluster(cluster or "detect", flags.processes, source)
        return compile_job(read_job(source, spec.num_devices, flags, meta=True), spec, options)
    plan = Plan.from_file(source)
    if model is None:
        raise PlanError(
            "the prediction of a plan needs its model", values=source, alternatives="--model with the model of the plan"
        )
    name = cluster or ("detect" if "measured" in plan.cluster else plan.cluster)
    spec = read_cluster(name, flags.processes or (plan.num_ranks if name == "detect" else None), model)
    basis = plan.basis or Basis()
    job = _job_of_plan(model, spec.num_devices, flags, plan.global_batch_size, basis.seq_len)
    kernels = {} if plan.basis is None else {"kernels": "on" if basis.kernels else "off"}
    of_plan = {"precision": plan.precision, "backend": basis.backend, **kernels}
    compiled = compile_job(job, spec, of_plan | options | {"plan": plan, "global_batch_size": None})
    _tell_differences(plan, compiled.plan)
    return compiled


def _job_of_plan(model: str, num_devices: int, flags: Flags, rows: int, seq_len: int | None) -> Job:
    """Load the plan's model with the plan's rows and sequence length, if the factory takes them."""
    with_rows = replace(flags, batch=flags.batch or rows)
    for attempt in (replace(with_rows, seq=flags.seq or seq_len), with_rows):
        with contextlib.suppress(ModelError):
            return read_job(model, num_devices, attempt, meta=True)
    return read_job(model, num_devices, flags, meta=True)


def _tell_differences(filed: Plan, priced: Plan) -> None:
    """Print a note to standard error if the new prediction of a plan differs from its file's: both figures, and why."""
    first, second = filed.prediction, priced.prediction
    if math.isclose(first.step_seconds, second.step_seconds, rel_tol=1e-6) and math.isclose(
        first.peak_bytes, second.peak_bytes, rel_tol=1e-6
    ):
        return
    reasons = priced.basis.differences(filed.basis) if filed.basis is not None and priced.basis is not None else []
    if filed.cluster != priced.cluster:
        reasons.append(f"cluster {priced.cluster} instead of {filed.cluster}")
    figures = [
        f"{seconds_text(prediction.step_seconds)} and {bytes_text(prediction.peak_bytes)}"
        for prediction in (first, second)
    ]
    why = "; ".join(reasons) or "another version or profile, or an edited plan"
    say(f"note: the prediction is now {figures[1]}; the plan file has {figures[0]} ({why})", as_note=True)


def require_outputs(code: str | None, files: list[str | None], force: bool) -> None:
    """Raise OutputError, before any work, if a command's folder or one of its files cannot be written."""
    named = [Path(file).absolute() for file in files if file is not None]
    if len(set(named)) < len(named):
        raise OutputError(
            "two outputs have the same name", values=str(named[0]), alternatives="another file name for one of them"
        )
    for file in named:
        require_writable(file, force)
        if code is not None and Path(code).absolute() in (file, *file.parents):
            raise OutputError(
                "an output file is inside the program's folder, which autopar replaces as a whole",
                values=str(file),
                alternatives=f"a file outside {code}; autopar writes a plan.yaml into that folder",
            )
    if code is not None:
        require_replaceable(Path(code))


def is_plan_file(source: str) -> bool:
    """Return whether an argument is a plan file and not a model."""
    return source.endswith((".yaml", ".yml"))
