"""What a reader should know of a plan beside its numbers: unknown operators, checks left out, idle axes, rows' ways."""

from __future__ import annotations

from autopar.costs.layer_costs import HOST
from autopar.ir.compression import NOTHING_COMPRESSED
from autopar.program import GeneratedProgram
from autopar.report.exchanges import exchange_notes
from autopar.units import seconds_text
from codegen.functions import function_of


def notes_of(compiled: GeneratedProgram) -> tuple[str, ...]:
    """A sentence each."""
    notes: list[str] = []
    unknown = sorted({op.node.op for op in compiled.best.operators.values() if not op.has_rule})
    if unknown:
        notes.append(
            f"without a sharding rule, so every rank computes them whole: {', '.join(unknown)} (autopar.register_rule)"
        )
    cut = {
        op.node.op.split(".")[1] for op in compiled.best.operators.values() if op.has_rule and function_of(op.node.op)
    }
    if cut:
        notes.append(f"custom Functions, cut as the operators that they call may be: {', '.join(sorted(cut))}")
    values = [f"{each.text} is {each.value!r}" for each in compiled.program.any.guards]
    notes += [f"a value of the batch decides what forward does: {text} in the example" for text in values]
    notes += [f"a check of values that the program leaves out: {line}" for line in compiled.best.graph.unchecked]
    if compiled.plan.compression and not compiled.plan.compresses:
        notes.append(NOTHING_COMPRESSED)
    if compiled.best.repeated_work:
        notes.append(compiled.best.repeated_work)
    else:
        notes += [f"nothing is split over {axis}: its ranks repeat the same work" for axis in compiled.best.idle_axes]
    return (*notes, *_bound_by_host(compiled), *exchange_notes(compiled))


def _bound_by_host(compiled: GeneratedProgram) -> list[str]:
    """Where devices wait for most of a step: what does not help, and what does."""
    prediction = compiled.plan.prediction
    waiting = prediction.seconds.get(HOST, 0.0)
    if waiting <= prediction.step_seconds / 2:
        return []
    whole, device = prediction.step_seconds, prediction.step_seconds - waiting
    return [
        f"the host's calls take {seconds_text(whole)}, the devices {seconds_text(device)}: more devices do not help; "
        "larger batches do" + ("" if compiled.backend == "inductor" else ", and so may backend inductor")
    ]
