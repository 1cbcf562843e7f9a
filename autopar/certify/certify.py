"""Certifying a program: each part of the proof in order, and how long it took."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.certify.certificate import Certificate, hash_of
from autopar.certify.decisions import check_decisions
from autopar.certify.edges import check_edges
from autopar.certify.findings import Findings
from autopar.certify.messages import prove_messages
from autopar.certify.miniature import UNSHOWN, prove_miniature
from autopar.certify.operators import prove_operators
from autopar.certify.reshards import prove_reshards
from autopar.certify.schedules import check_schedule
from autopar.certify.small_job import Miniature
from autopar.compiled import CompiledProgram
from autopar.profiling.machine import own_version
from autopar.running.process_state import check_starting
from codegen.program import PipelineProgram


def certify_program(
    compiled: CompiledProgram,
    *,
    train: bool = True,
    miniature: Miniature | None = None,
    planning_seconds: float | None = None,
) -> Certificate:
    """Proves on this machine, without the cluster, what can be proven of a program.

    train: whether a miniature is trained on local processes, too. miniature: (model, batch, loss_fn or None) where the
    model has no configuration from which autopar can make a small one. planning_seconds: of CPU, that it took until
    now, to be noted.
    """
    program, plan = compiled.program, compiled.plan
    if train:
        check_starting("certify")
    parts: list[Callable[[], Findings]] = [
        lambda: prove_operators(compiled.best),
        lambda: prove_reshards(program),
        lambda: check_decisions(compiled),
        lambda: check_edges(program, compiled.best),
    ]
    if isinstance(program, PipelineProgram):
        parts += [lambda: prove_messages(program), lambda: check_schedule(program)]
    findings = [_timed(part) for part in parts]
    if train:
        findings.append(_timed(lambda: prove_miniature(compiled, miniature)))
    else:
        findings.append(Findings("miniature", gaps=(f"{UNSHOWN}: no miniature was asked for",)))
    return Certificate(
        model=plan.model,
        cluster=plan.cluster,
        mesh=plan.mesh_text,
        num_ranks=plan.num_ranks,
        plan_sha256=hash_of(plan),
        versions={"autopar": own_version(), "torch": str(torch.__version__), "Python": platform.python_version()},
        findings=tuple(findings),
        cpu_seconds=sum(each.seconds for each in findings),
        planning_seconds=planning_seconds,
    )


def _timed(part: Callable[[], Findings]) -> Findings:
    """What a part found, with the CPU-seconds that it and the processes that it started took."""
    before = cpu_seconds()
    found = part()
    return replace(found, seconds=cpu_seconds() - before)


def cpu_seconds() -> float:
    """CPU-seconds of this process and the processes that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
