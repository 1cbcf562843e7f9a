"""Certify a program: run each part of the proof in order and measure its time."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.certify.certificate import Certificate, Findings, hash_of
from autopar.certify.decisions import check_decisions
from autopar.certify.edges import check_edges
from autopar.certify.messages import prove_messages
from autopar.certify.miniature import UNSHOWN, prove_miniature
from autopar.certify.miniature_run import Miniature
from autopar.certify.operators import prove_operators
from autopar.certify.reshards import prove_reshards
from autopar.certify.schedules import check_schedule
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
    """Prove a program on this machine, without the cluster, as far as possible.

    train: whether to train a miniature on local processes as well. miniature: (model, batch, loss_fn or None) for
    models without a configuration from which autopar can build a small one. planning_seconds: CPU-seconds used so far,
    recorded in the certificate.
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
        cpu_seconds=sum(finding.seconds for finding in findings),
        planning_seconds=planning_seconds,
    )


def _timed(part: Callable[[], Findings]) -> Findings:
    """Run a part; return its findings with the CPU-seconds of this process and its children."""
    before = cpu_seconds()
    findings = part()
    return replace(findings, seconds=cpu_seconds() - before)


def cpu_seconds() -> float:
    """Return the CPU-seconds of this process and of its child processes that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
