"""What the commands share: their options, and what becomes of them."""

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
from rich.console import Console
from rich.text import Text

from autopar.cli.output import say, words_to, working
from autopar.compile import compile_with, planned_alone
from autopar.compiled import CompiledProgram
from autopar.costs.updates import OptimizerFactory
from autopar.errors import AutoparError, ModelError, OutputError, PlanError
from autopar.files.folder_swap import require_replaceable
from autopar.files.outputs import require_writable
from autopar.integrations.job import Job, constraints_of, load_job, parse_settings
from autopar.integrations.loading import require_model
from autopar.ir.plan_data import Basis
from autopar.launch import RankError
from autopar.plan import Plan
from autopar.planning.planner import Planned
from autopar.report.tables import WIDTH, VisibleConsole
from autopar.settings.arguments import check_numbers
from autopar.settings.compile_options import CompileOptions
from autopar.training.loop import resolve_cluster
from autopar.units import bytes_text, either_text, seconds_text
from codegen.axes import AXES
from cost_models.mixed import AnyCluster
from cost_models.schedule import SCHEDULES

USER_ERROR, RANK_FAILED, INTERNAL_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 1, 70, 130, 141
"""Exit codes; those above 128 as a shell gives them for the signals SIGINT and SIGPIPE."""
shows_traceback: ContextVar[bool] = ContextVar("shows_traceback", default=False)
"""Whether the command line has --traceback."""

Model = Annotated[
    str, typer.Argument(help="module:factory, file.py:factory, or hf:path/to/config.json", show_default=False)
]
ClusterText = Annotated[
    str, typer.Option(help='"4x8 h100-sxm", a TOML file, or "detect": what this machine has, measured')
]
Processes = Annotated[int | None, typer.Option(help="processes that share this machine, with --cluster detect")]
Batch = Annotated[
    int | None,
    typer.Option(help="rows of one optimiser step over all ranks \\[default: the factory's, or 8 per device]"),
]
Seq = Annotated[int | None, typer.Option(help="tokens per row \\[default: the factory's, or at most 128]")]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 \\[default: a plan file's own, or fp32]")]
Backend = Annotated[
    str | None,
    typer.Option(
        help="eager, inductor, which compiles the layers with torch.compile, or async-tp: products beside their "
        "transfers, where GPUs share memory \\[default: eager]"
    ),
]
Compress = Annotated[
    list[str] | None,
    typer.Option(
        "--compress",
        help="round what ZeRO sends (lossy); may be repeated. gather=int8 or fp8: parameters; reduce=int8: gradients",
        metavar="NAME=VALUE",
    ),
]
Fp8 = Annotated[
    bool | None,
    typer.Option("--fp8/--no-fp8", help="linear layers multiply in 8 bits, e4m3 (lossy)", show_default=False),
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
GivenCluster = Annotated[str | None, typer.Option("--cluster", help="as in plan; the plan file's own by default")]
GivenModel = Annotated[str | None, typer.Option("--model", help="the model of the plan file, which is priced anew")]
Timeline = Annotated[
    str | None,
    typer.Option(help="write the simulated step to this file, for Perfetto or chrome://tracing", metavar="FILE"),
]
Page = Annotated[
    str | None,
    typer.Option("--html", help="write the report as a page with drawings to this file; no network", metavar="FILE"),
]
Log = Annotated[
    str | None,
    typer.Option("--log", help="with --html: a run's metrics.jsonl, to be shown beside the prediction", metavar="FILE"),
]
Json = Annotated[
    bool, typer.Option("--json", help="print one JSON object (docs/cli.md) instead; words go to standard error")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print nothing but errors, and JSON that is asked for")]
Force = Annotated[
    bool, typer.Option("--force", help="write over files that autopar did not write, or that were edited since")
]


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
        """The constraints of the file, with those of --set and --memory over them."""
        return constraints_of(self.settings or (), self.memory, self.constraints)

    def plan_options(self, **more: Any) -> dict[str, Any]:
        """Fields of PlanOptions by name: what the flags say, and `more` that is not None."""
        fields = {
            "global_batch_size": self.batch,
            "precision": self.precision,
            "compression": parse_settings(self.compress, "--compress") if self.compress else None,
            "constraints": self.limits or None,
        }
        return {name: value for name, value in (fields | more).items() if value is not None}


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """What typer is given for a command: its `flags` as one option each, `--quiet`, its errors in words with their exit
    code."""
    signature = inspect.signature(function, eval_str=True)
    parts = {field.name: field for field in dataclasses.fields(Flags)}
    hints = get_type_hints(Flags, include_extras=True)
    taken: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.annotation is Flags:
            taken += [
                parameter.replace(name=name, default=part.default, annotation=hints[name])
                for name, part in parts.items()
            ]
        else:
            taken.append(parameter)
    taken.append(inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet))

    numbers = [each.name for each in taken if _is_number(each.annotation)]

    @functools.wraps(function)
    def called(**given: Any) -> None:
        try:
            check_numbers({name: given[name] for name in numbers if given[name] is not None})
            if "flags" in signature.parameters:
                given["flags"] = Flags(**{name: given.pop(name) for name in parts})
            with words_to(given.pop("quiet"), given.get("as_json", False)):
                function(**given)
                sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # nobody reads on: what is still to be flushed at exit goes nowhere, too
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            raise typer.Exit(_tell(error)) from None

    called.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in taken}
    return called


def _is_number(annotation: Any) -> bool:
    """Whether an option takes a number; `codegen.runtime.options.RANGES` has the range of each by its name."""
    kind = get_args(annotation)[0]
    return not {int, float}.isdisjoint((kind, *get_args(kind)))


def _tell(error: Exception) -> int:
    """Print an error, with its traceback where that is asked for; the exit code."""
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
        what = " ".join(f"{type(error).__name__}: {error}".split())
        kind, code = "internal error", INTERNAL_ERROR
        text = f"this is a defect of autopar, not of what it was given: {what} ({_place(error)}){advice}"
    VisibleConsole(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble((kind, "bold red"), ": ", text))
    return code


def _place(error: Exception) -> str:
    """Where it was raised, as the innermost of our own lines: `autopar/plan.py, line 12`."""
    home = Path(__file__).resolve().parents[2]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(home)]
    own = [frame for frame in frames if "site-packages" not in Path(frame.filename).relative_to(home).parts]
    return f"{Path(own[-1].filename).relative_to(home)}, line {own[-1].lineno}" if own else "outside of autopar"


def read_cluster(text: str, processes: int | None, model: str | None = None) -> AnyCluster:
    """Return the cluster that --cluster names; notes of its measurement go to stderr.

    model: the name of the model that is planned on it. A misspelled one is refused before anything is measured.
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
    """The model with a batch; meta: without memory, where it comes from a configuration; lazy: as in load_model."""
    options = parse_settings(flags.option or (), "--option")
    return load_job(
        model, num_devices=num_devices, batch=flags.batch, seq=flags.seq, options=options, meta=meta, lazy=lazy
    )


def compile_job(
    job: Job, cluster: AnyCluster, options: dict[str, Any], optimizer: OptimizerFactory | None = None
) -> CompiledProgram:
    """autopar.compile of a job. options: fields of PlanOptions by name."""
    asked = CompileOptions(example_inputs=job.inputs, loss_fn=job.loss_fn, optimizer=optimizer, **options)
    with working(f"planning for {cluster}"):
        return compile_with(job.model, cluster, asked)


def plan_of_model(source: str, cluster: str | None, flags: Flags) -> Planned:
    """The plan that is chosen for a model, without its program."""
    options = flags.plan_options()
    spec = read_cluster(cluster or "detect", flags.processes, source)
    job = read_job(source, spec.num_devices, flags, meta=True)
    asked = CompileOptions(example_inputs=job.inputs, loss_fn=job.loss_fn, **options)
    with working(f"planning for {spec}"):
        return planned_alone(job.model, spec, asked)


def program_of_source(source: str, model: str | None, cluster: str | None, flags: Flags) -> CompiledProgram:
    """The program of a plan file and its model, or of the plan that is chosen for a model.

    What a plan file was priced for holds where no flag says otherwise; what is otherwise then is told.
    """
    options = flags.plan_options()
    if not is_plan_file(source):
        spec = read_cluster(cluster or "detect", flags.processes, source)
        return compile_job(read_job(source, spec.num_devices, flags, meta=True), spec, options)
    given = Plan.from_file(source)
    if model is None:
        raise PlanError("a plan file alone cannot be priced", alternatives="--model with the model that it is for")
    name = cluster or ("detect" if "measured" in given.cluster else given.cluster)
    spec = read_cluster(name, flags.processes or (given.num_ranks if name == "detect" else None), model)
    basis = given.basis or Basis()
    job = _job_of_plan(model, spec.num_devices, flags, given.global_batch_size, basis.seq_len)
    kernels = {} if given.basis is None else {"kernels": "on" if basis.kernels else "off"}
    of_plan = {"precision": given.precision, "backend": basis.backend, **kernels}
    found = compile_job(job, spec, of_plan | options | {"plan": given, "global_batch_size": None})
    _tell_differences(given, found.plan)
    return found


def _job_of_plan(model: str, num_devices: int, flags: Flags, rows: int, seq_len: int | None) -> Job:
    """The plan's model with the plan's batch; a factory that takes no rows or no length has those of its own."""
    asked = replace(flags, batch=flags.batch or rows)
    for each in (replace(asked, seq=flags.seq or seq_len), asked):
        with contextlib.suppress(ModelError):
            return read_job(model, num_devices, each, meta=True)
    return read_job(model, num_devices, flags, meta=True)


def _tell_differences(given: Plan, found: Plan) -> None:
    """To stderr, where a plan that was priced anew has other figures than its file: both, and why."""
    first, second = given.prediction, found.prediction
    if math.isclose(first.step_seconds, second.step_seconds, rel_tol=1e-6) and math.isclose(
        first.peak_bytes, second.peak_bytes, rel_tol=1e-6
    ):
        return
    reasons = found.basis.differences(given.basis) if given.basis is not None and found.basis is not None else []
    if given.cluster != found.cluster:
        reasons.append(f"cluster {found.cluster} instead of {given.cluster}")
    figures = [f"{seconds_text(each.step_seconds)} and {bytes_text(each.peak_bytes)}" for each in (first, second)]
    why = "; ".join(reasons) or "another version or profile, or an edited plan"
    say(f"note: the file says {figures[0]}, priced anew the plan has {figures[1]} ({why})", as_note=True)


def require_outputs(code: str | None, files: list[str | None], force: bool) -> None:
    """Raises OutputError, before any work, where a command's folder or one of its files cannot be written."""
    named = [Path(file).absolute() for file in files if file is not None]
    if len(set(named)) < len(named):
        raise OutputError("two outputs have one name", values=str(named[0]), alternatives="a file for each")
    for file in named:
        require_writable(file, force)
        if code is not None and Path(code).absolute() in (file, *file.parents):
            raise OutputError(
                "an output lies in the program's folder, which autopar replaces whole",
                values=str(file),
                alternatives=f"a file outside of {code}, which gets a plan.yaml of its own",
            )
    if code is not None:
        require_replaceable(Path(code))


def is_plan_file(source: str) -> bool:
    """Whether an argument is a plan and not a model."""
    return source.endswith((".yaml", ".yml"))


def console() -> Console:
    """A console as wide as the terminal, up to the report's width, which is also what a file gets."""
    made = VisibleConsole(highlight=False)
    return VisibleConsole(highlight=False, markup=False, width=min(made.width, WIDTH) if made.is_terminal else WIDTH)
