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
    console,
    is_plan_file,
    plan_of_model,
    program_of_source,
    read_cluster,
    read_job,
    require_outputs,
)
from autopar.cli.output import print_json, say, working
from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError
from autopar.explain.compare import compare as compare_plans
from autopar.explain.compare import comparison_panels
from autopar.explain.processes import spare_processes
from autopar.explain.questions import explain as ask
from autopar.explain.render import explanation_panels
from autopar.files.outputs import write_output
from autopar.integrations.job import parse_settings
from autopar.page.run_log import read_log
from autopar.plan import Plan
from autopar.planning.planner import Planned
from autopar.profiling.trials import profile_of
from autopar.report import report_panels
from autopar.report.facts import facts_of
from autopar.report.json_facts import facts_json, plan_json, record_json
from autopar.report.summary import plan_summary
from autopar.report.timeline import write_timeline
from autopar.simulate import predict
from autopar.simulate.text import comparison_lines, fit_lines, prediction_lines
from autopar.simulate.what_if import parse_changes
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
    """Choose the fastest plan that fits, and report what it does."""
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
    """What a plan file, or the plan that would be chosen for a model, does with every layer, and what it costs."""
    require_outputs(None, [timeline, html], force)
    flags.plan_options()  # what is wrong in a flag is said also where the flag changes nothing
    if log is not None:
        _require_log(log, html)
    if is_plan_file(source) and model is None and timeline is None and html is None:
        given = Plan.from_file(source)
        if as_json:
            print_json(plan_json(given))
            return
        for panel in plan_summary(given):
            console().print(panel)
        say(f"`autopar report {source} --model MODEL` explains every layer and prices the plan anew.")
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
            help="show the step beside one with this changed; may be repeated. batch=64; tp=4, recompute=full, ...: of "
            "the strategy; device=h100-sxm, inter_node=ib-200g; device.peak=x2, device.bandwidth=2e12, "
            "device.memory=96GiB, intra_node.bandwidth=x0.5, inter_node.latency=1e-5; cluster=..., framework=..., "
            "precision=...",
            metavar="NAME=VALUE",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="fail where it does not fit the memory")] = False,
    timeline: Timeline = None,
    force: Force = False,
) -> None:
    """Predict a strategy given with --set (dp, tp, pp, cp, ep, zero, micro_batches, ...), without searching."""
    require_outputs(None, [timeline], force)
    changes = parse_changes(parse_settings(what_if or (), "--what-if"))
    spec = read_cluster(cluster, processes, model)
    flags = Flags(batch=batch, seq=seq, option=option, settings=settings, memory=memory, constraints=constraints)
    job = read_job(model, spec.num_devices, flags, meta=True)
    found = predict(
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
    for line in (*prediction_lines(found), *fit_lines(found)):
        say(line)
    if changes:
        for line in ("", *comparison_lines(found.what_if(**changes))):
            say(line)
    if timeline is not None:
        say(f"timeline written to {found.write_timeline(timeline, force)}")


def explain(
    source: Source,
    flags: Flags,
    model: GivenModel = None,
    cluster: GivenCluster = None,
    timeline: Timeline = None,
    seconds: Annotated[float, typer.Option(help="after which no further question is asked")] = 60.0,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Why this plan: what binds it, what other decisions would cost, and what more of everything would buy."""
    require_outputs(None, [timeline], force)
    found_by: CompiledProgram | Planned
    if is_plan_file(source) or timeline is not None:
        found_by = compiled = program_of_source(source, model, cluster, flags)
    else:  # the program is not needed
        compiled, found_by = None, plan_of_model(source, cluster, flags)
    with working("planning again, to see what binds") as tell:
        found = ask(found_by, seconds=seconds, tell=tell, processes=spare_processes())
    if as_json:
        print_json(record_json("explanation", found))
    else:
        for panel in explanation_panels(found):
            console().print(panel)
    if compiled is not None:
        _write_timeline(compiled, timeline, force)


def compare(
    first: Annotated[str, typer.Argument(help="a plan file", show_default=False)],
    second: Annotated[str, typer.Argument(help="another plan file", show_default=False)],
    model: Annotated[str | None, typer.Option(help="the model of both, which are then priced anew")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="as in plan, to price both on; by default each on its own")
    ] = None,
    processes: Processes = None,
    seq: Seq = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Two plans side by side: decisions, stages, placements, time and memory."""
    plans = [Plan.from_file(path) for path in (first, second)]
    if model is not None:
        flags = Flags(processes=processes, seq=seq, option=option)
        programs = (program_of_source(path, model, cluster, flags) for path in (first, second))
        plans = [program.plan for program in programs]
    found = compare_plans(*plans)
    if as_json:
        print_json(record_json("comparison", found))
        return
    for panel in comparison_panels(found, (first, second)):
        console().print(panel)


def _print_report(compiled: CompiledProgram, as_json: bool) -> None:
    if as_json:
        print_json(facts_json(facts_of(compiled)))
        return
    screen = console()
    for panel in report_panels(compiled, screen.width):
        screen.print(panel)


def _require_log(log: str, html: str | None) -> None:
    """Raises ConstraintError for a log without a page, and OutputError for what is no log, before anything is done."""
    if html is None:
        raise ConstraintError("a log is shown on the page", values=f"--log {log}", alternatives="--html FILE beside it")
    read_log(log)


def _write_page(compiled: CompiledProgram, path: str | None, log: str | None, force: bool) -> None:
    if path is not None:
        with working("pricing what-ifs and leaner plans"):
            written = compiled.report_html(path, log=log, force=force)
        say(f"page written to {written}")


def _write_timeline(compiled: CompiledProgram, path: str | None, force: bool) -> None:
    if path is not None:
        say(f"timeline written to {write_timeline(compiled, path, force)}")
