"""Train miniatures: the model's own class, small, on processes of this machine against one process.

This shows what single calls cannot: ZeRO's collectives, gradients over data-parallel ranks, recomputation, messages
between stages in schedule order, state on the host, and the optimizer's step. If the plan's axes need more processes
than MOST_RANKS, several miniatures have some of the axes each (`cuts.py`).

One more miniature rounds as the plan does: products in fp8, and ZeRO's messages in 8-bit codes. The exact miniatures
show what a program computes; this one shows that rounding adds its own error and nothing else. A CPU uses the same
codes and scales as a GPU and sums their products in fp32 (codegen/kernels/fp8.py and quantize.py). One process computes
without rounding, and all gradients of a step are compared as one vector. Single tensors say little: small ones share
blocks of codes with large ones, and a token or two may be routed to other experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from autopar.certify.certificate import Findings, grouped
from autopar.certify.cuts import Cut, cuts_of
from autopar.certify.miniature_config import has_config
from autopar.certify.miniature_run import STEPS, Miniature, Trained, targets_of, train_miniature
from autopar.compiled import CompiledProgram
from autopar.costs.updates import DefaultAdamW
from autopar.errors import AutoparError, InternalError
from autopar.ir.mesh import ZERO_AXES
from autopar.launch import RankError
from autopar.verify import roundings
from autopar.verify_report import GRADIENTS, LOSS, VerifyReport

_Result = TypeVar("_Result")

UNSHOWN = "training as a whole (ZeRO, sums of gradients over ranks, recomputation, messages between stages, updates)"


def prove_miniature(compiled: CompiledProgram, miniature: Miniature | None = None) -> Findings:
    """Train as many miniatures as the plan's axes need, STEPS steps each."""
    why_not = _why_none(compiled, miniature)
    if why_not:
        return Findings("miniature", gaps=(f"{UNSHOWN}: {why_not}",))
    cuts, left = cuts_of(compiled.plan)
    failures: list[str] = []
    gaps = list(left)
    every = [_tried(f"on {cut}", partial(train_miniature, compiled, cut, miniature), failures, gaps) for cut in cuts]
    trained = [training for training in every if training is not None]
    failures += [
        f"miniature on {training.text}: {_fault(training.report)}" for training in trained if not training.report.ok()
    ]
    wanted = roundings(compiled)
    rounded, of_rounding = None, Findings("rounded")
    if wanted:
        train = partial(train_rounded, compiled, cuts, miniature)
        rounded = _tried(f"with {' and '.join(wanted)}", train, failures, gaps)
    if rounded is not None:
        of_rounding = judged(compiled, rounded)
        failures += of_rounding.failures
        gaps += of_rounding.gaps
    gaps += grouped((f"the miniature on {t.mesh}", f"without the plan's {text}") for t in trained for text in t.left)
    if not trained and not failures:
        gaps.insert(0, f"{UNSHOWN}: no miniature was trained")
    errors = {t.text: max(t.report.loss, t.report.largest_gradient, t.report.largest_parameter) for t in trained}
    worst = max(errors, key=lambda name: errors[name], default="")
    return Findings(
        subject="miniature",
        counts={
            "miniatures trained": len(trained),
            "miniatures that the mesh needs": len(cuts),
            **({"miniatures that round as the plan does": int(rounded is not None)} if wanted else {}),
            "steps each": STEPS if trained else 0,
            "processes of the largest": max(cut.num_ranks for cut in cuts),
            "calls": sum(t.calls for t in trained),
            "calls with the plan's option": sum(t.kept for t in trained),
            "gradients compared in the last": len(trained[-1].report.gradients) if trained else 0,
        },
        largest_error=errors.get(worst),
        worst="; ".join(t.text for t in trained),
        failures=tuple(failures),
        gaps=(*gaps, *_switches(compiled)),
        not_proven=(*of_rounding.not_proven, *_beyond(compiled, [*trained, *([rounded] if rounded else [])])),
    )


def _tried(description: str, train: Callable[[], _Result], failures: list[str], gaps: list[str]) -> _Result | None:
    """Run a training and return its result; record an exception as a failure of the program or as a gap."""
    try:
        return train()
    except (InternalError, RankError) as error:  # the program is wrong, or does not run
        failures.append(f"miniature {description}: {error}")
    except (AutoparError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        kind = "" if isinstance(error, AutoparError) else f"{type(error).__name__}: "
        gaps.append(f"a miniature {description} was not trained: {kind}{(str(error).splitlines() or [''])[0]}")
    return None


def _why_none(compiled: CompiledProgram, miniature: Miniature | None) -> str:
    if miniature is not None:
        return ""
    if not has_config(compiled.model):
        return "the model's class has no configuration to shrink; pass a miniature"
    if compiled.loss_fn is not None:
        return "the model has a separate loss function, and its targets are unknown; pass a miniature"
    return ""


def _switches(compiled: CompiledProgram) -> Iterator[str]:
    """Yield requested features of the program that miniatures cannot have on a CPU."""
    if compiled.backend != "eager":
        yield f"backend {compiled.backend}: miniatures run layers eagerly"


KERNELS = ("kernels.", "grouped.", "fp8.")


def _beyond(compiled: CompiledProgram, trained: list[Trained]) -> Iterator[str]:
    """Yield differences between miniatures and any program, whatever its plan."""
    program_targets = targets_of(compiled.program)
    in_miniatures = frozenset[str]().union(*(training.targets for training in trained))
    yield from grouped(
        (target, _reason(target, target in in_miniatures)) for target in sorted(program_targets) if _reason(target)
    )
    others = sorted(target for target in program_targets - in_miniatures if not _reason(target)) if trained else ()
    if others:
        yield f"{', '.join(others)}: called by no miniature; the calls of the plan that they stand for were proven"
    lacks = [set(training.lacks.items()) for training in trained]
    missing = sorted(set[tuple[str, int]].intersection(*lacks)) if lacks else ()
    if missing:
        names = ", ".join(f"{op} ({count})" for op, count in missing)
        yield f"calls that the plan's model has and a miniature in fp32 has not: {names}; they were proven one by one"
    if compiled.plan.precision != "fp32":
        yield f"{compiled.plan.precision}: everything was computed in fp32 or fp64, to make errors meaningful"
    if compiled.plan.pipeline.offload.startswith("nvme:") and trained:
        yield f"{compiled.plan.pipeline.offload}: miniatures kept the optimizer's state in a folder of this machine"
    if compiled.program.any.has_fused_update and isinstance(compiled.optimizer, DefaultAdamW):
        yield "AdamW's kernel, which updates all parameters of a rank at once: miniatures use torch's AdamW"


def _reason(target: str, is_in_miniature: bool = True) -> str:
    """Return why running on a CPU does not prove a call of the program; "" if it does."""
    if target.startswith(KERNELS):
        return (
            "kernels of a GPU; their references in torch were run, and the calls that they stand for proven"
            if is_in_miniature
            else "kernels of a GPU; the calls that they stand for were proven"
        )
    if target.startswith(("overlapped.", "async_tp.")):
        return "overlap communication with products on a GPU; here one follows the other"
    return ""


def _fault(report: VerifyReport) -> str:
    beyond = report.beyond(report.tolerance)
    faults = [f"loss is off by {report.loss:.1e}"] if report.loss > report.tolerance else []
    faults += [f"{len(beyond)} tensors are off, such as {', '.join(beyond[:3])}"] if beyond else []
    return "; ".join([*faults, *report.proves_nothing]) or "not equal"


def train_rounded(compiled: CompiledProgram, cuts: list[Cut], miniature: Miniature | None) -> Trained:
    """Train one miniature with the plan's roundings. Raises the errors of `train_miniature`. cuts: of the exact
    miniatures; the first one in which ZeRO sends something is used."""
    shared = (cut for cut in cuts if any(cut.degrees.get(axis, 1) > 1 for axis in ZERO_AXES))
    cut = next(shared, cuts[0]) if compiled.plan.compresses else cuts[0]
    return train_miniature(compiled, cut, miniature, is_rounded=True)


def judged(compiled: CompiledProgram, trained: Trained) -> Findings:
    """Return the findings of a miniature that rounds."""
    report, planned = trained.report, roundings(compiled)
    without = [rounding for rounding in planned if rounding not in trained.rounds]
    description = f"{' and '.join(trained.rounds)} on {trained.text}"
    return Findings(
        subject="rounded",
        failures=tuple(f"miniature in {description}: {text}" for text in report.faults()) if trained.rounds else (),
        gaps=tuple(f"{rounding}: the miniature has nothing that it rounds" for rounding in without),
        not_proven=(
            f"more accurate rounding: in {description} a miniature's gradients were off by {report.together:.1g} "
            f"in norm, and its loss by {report.loss:.1g}, where {GRADIENTS:g} and {LOSS:.1g} pass",
        )
        if trained.rounds
        else (),
    )
