"""`autopar simulate`: predict a strategy without a search."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.options import (
    Batch,
    ClusterText,
    ConstraintFile,
    Flags,
    Force,
    Memory,
    Model,
    Options,
    Processes,
    Seq,
    Settings,
    Timeline,
    read_cluster,
    read_job,
    require_outputs,
)
from autopar.cli.output import say
from autopar.models.job import parse_settings
from autopar.strategies import predict
from autopar.strategies.text import comparison_lines, fit_lines, prediction_lines
from autopar.strategies.what_if import parse_changes


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
