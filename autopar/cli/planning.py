"""Commands that plan, predict and explain: `autopar plan | report | simulate | explain | compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.options import (
    Backend,
    Batch,
    ClusterText,
    ConstraintFile,
    Flags,
    Force,
    Fp8,
    GivenCluster,
    GivenModel,
    Json,
    Log,
    Memory,
    Model,
    Options,
    Page,
    Processes,
    Seq,
    Settings,
    Source,
    Timeline,
    compile_job,
    is_plan_file,
    plan_of_model,
    program_of_source,
    read_cluster,
    read_job,
    require_outputs,
)
from autopar.cli.output import console, print_json, say, show, working
from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError
from autopar.explain.compare import compare as compare_plans
from autopar.explain.compare import comparison_panels
from autopar.explain.processes import spare_processes
from autopar.explain.questions import explain as ask
from autopar.explain.terminal import explanation_panels
from autopar.files.outputs import write_output
from autopar.models.job import parse_settings
from autopar.page.run_log import read_log
from autopar.plan import Plan
from autopar.planning.planner import Planned
from autopar.profiling.trials import profile_of
from autopar.report import report_panels
from autopar.report.facts import facts_of
from autopar.report.json_facts import facts_json, plan_json, record_json
from autopar.report.terminal import plan_summary
from autopar.report.timeline import write_timeline
from autopar.strategies import predict
from autopar.strategies.text import comparison_lines, fit_lines, prediction_lines
from autopar.strategies.what_if import parse_changes
from autopar.trial_report import trial_notes


def plan(
    model: Model,
    flags: Flags,
    cluster: ClusterText = "detect",
    backend: Backend = None,
    fp8: Fp8 = None,
    out: Annotated[str | None, typer.Option(help="write the plan to this YAML file", metavar="FILE")] = None,
    code: Annotated[
        str | None, typer.Option(help="write the generated program to this folder", metavar="FOLDER")
    ] = None,
    timeline: Timeline = None,
    html: Page = None,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Choose the fastest plan that fits, and report it."""
    require_outputs(code, [out, timeline, html], force)
    spec = read_cluster(cluster, flags.processes, model)
    job = read_job(model, spec.num_devices, flags, meta=code is None, lazy=True)
    compiled = compile_job(job, spec, flags.plan_options(backend=backend, fp8=fp8))
    _print_report(compiled, as_json)
    for note in trial_notes(compiled, profile_of(cluster)):
        say(f"note: {note}")
    if out:
        say(f"plan written to {write_output(out, compiled.plan.to_yaml(), force)}")
    if code:
        say(f"program written to {compiled.save(code)}")
    _write_timeline(compiled, timeline, force)
    _write_page(compiled, html, None, force)


def report(
    source: Source,
    flags: Flags,
    model: GivenModel = None,
    cluster: GivenCluster = None,
    timeline: Timeline = None,
    html: Page = None,
    log: Log = None,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Report a plan file, or the plan for a model: the sharding of every layer, and the predicted time and memory."""
    require_outputs(None, [timeline, html], force)
    flags.plan_options()  # refuse a wrong flag even where it changes nothing
    if log is not None:
        _require_log(log, html)
    if is_plan_file(source) and model is None and timeline is None and html is None:
        saved = Plan.from_file(source)
        if as_json:
            print_json(plan_json(saved))
            return
        show(*plan_summary(saved))
        say(f"\n`autopar report {source} --model MODEL` reports every layer and predicts the plan again.")
        return
    compiled = program_of_source(source, model, cluster, flags)
    _print_report(compiled, as_json)
    _write_timeline(compiled, timeline, force)
    _write_page(compiled, html, log, force)


def simulate(
    model: Model,
    cluster: ClusterText = "detect",
    processes: Processes = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Annotated[str, typer.Option(help="fp32, tf32, bf16, fp16, fp8, mxfp8 or nvfp4")] = "bf16",
    framework: Annotated[str, typer.Option(help="autopar, megatron-2021, fsdp, deepspeed-zero3, ...")] = "autopar",
    settings: Settings = None,
    memory: Memory = None,
    constraints: ConstraintFile = None,
    option: Options = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="compare with a step under this change; may be repeated. batch=64; tp=4, recompute=full, ...: the "
            "strategy; device=h100-sxm, inter_node=ib-200g; device.peak=x2, device.bandwidth=2e12, "
            "device.memory=96GiB, intra_node.bandwidth=x0.5, inter_node.latency=1e-5; cluster=..., framework=..., "
            "precision=...",
            metavar="NAME=VALUE",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="fail if the strategy does not fit the memory")] = False,
    timeline: Timeline = None,
    force: Force = False,
) -> None:
    """Predict a strategy given with --set (dp, tp, pp, cp, ep, zero, micro_batches, ...), without searching."""
    require_outputs(None, [timeline], force)
    changes = parse_changes(parse_settings(what_if or (), "--what-if"))
    spec = read_cluster(cluster, processes, model)
    flags = Flags(batch=batch, seq=seq, option=option, settings=settings, memory=memory, constraints=constraints)
    job = read_job(model, spec.num_devices, flags, meta=True)
    prediction = predict(
        job.model,
        spec,
        flags.limits,
        example_inputs=job.inputs,
        loss_fn=job.loss_fn,
        global_batch_size=batch,
        precision=precision,
        framework=framework,
        check=check,
    )
    for line in (*prediction_lines(prediction), *fit_lines(prediction)):
        say(line)
    if changes:
        for line in ("", *comparison_lines(prediction.what_if(**changes))):
            say(line)
    if timeline is not None:
        say(f"timeline written to {prediction.write_timeline(timeline, force)}")


def explain(
    source: Source,
    flags: Flags,
    model: GivenModel = None,
    cluster: GivenCluster = None,
    timeline: Timeline = None,
    seconds: Annotated[float, typer.Option(help="time limit; the answers so far are printed after it")] = 60.0,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Explain a plan: its bottleneck, the cost of other decisions, and the gain from more hardware."""
    require_outputs(None, [timeline], force)
    source_of_facts: CompiledProgram | Planned
    if is_plan_file(source) or timeline is not None:
        source_of_facts = compiled = program_of_source(source, model, cluster, flags)
    else:  # the program is not needed
        compiled, source_of_facts = None, plan_of_model(source, cluster, flags)
    with working("planning under changed conditions") as tell:
        explanation = ask(source_of_facts, seconds=seconds, tell=tell, processes=spare_processes())
    if as_json:
        print_json(record_json("explanation", explanation))
    else:
        show(*explanation_panels(explanation))
    if compiled is not None:
        _write_timeline(compiled, timeline, force)


def compare(
    first: Annotated[str, typer.Argument(help="a plan file", show_default=False)],
    second: Annotated[str, typer.Argument(help="another plan file", show_default=False)],
    model: Annotated[str | None, typer.Option(help="the model of both plans, to predict them again")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="as in plan, with --model \\[default: each plan's own cluster]")
    ] = None,
    processes: Processes = None,
    seq: Seq = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Compare two plans: decisions, stages, placements, time and memory."""
    plans = [Plan.from_file(path) for path in (first, second)]
    if model is not None:
        flags = Flags(processes=processes, seq=seq, option=option)
        programs = (program_of_source(path, model, cluster, flags) for path in (first, second))
        plans = [program.plan for program in programs]
    comparison = compare_plans(*plans)
    if as_json:
        print_json(record_json("comparison", comparison))
        return
    show(*comparison_panels(comparison, (first, second)))


def _print_report(compiled: CompiledProgram, as_json: bool) -> None:
    if as_json:
        print_json(facts_json(facts_of(compiled)))
        return
    show(*report_panels(compiled, console().width))


def _require_log(log: str, html: str | None) -> None:
    """Raise ConstraintError for a log without a page, and OutputError for a file that is no log."""
    if html is None:
        raise ConstraintError("--log needs a page", values=f"--log {log}", alternatives=f"--log {log} --html FILE")
    read_log(log)


def _write_page(compiled: CompiledProgram, path: str | None, log: str | None, force: bool) -> None:
    if path is not None:
        with working("pricing what-ifs and leaner plans"):
            written = compiled.report_html(path, log=log, force=force)
        say(f"page written to {written}")


def _write_timeline(compiled: CompiledProgram, path: str | None, force: bool) -> None:
    if path is not None:
        say(f"timeline written to {write_timeline(compiled, path, force)}")
