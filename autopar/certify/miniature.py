"""The miniature: the model's own class, small, trained on processes of this machine against one process.

What single calls cannot show is shown here: ZeRO's collectives, gradients over data-parallel ranks, recomputation,
messages between stages in the order of the schedule, state that the host holds, the optimizer's step. Where the plan's
axes need more processes than MOST_RANKS, several miniatures have some of the axes each (`cuts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from autopar.certify.cuts import cuts_of
from autopar.certify.findings import Findings, grouped
from autopar.certify.rounded import judged, train_rounded
from autopar.certify.small_config import has_config
from autopar.certify.small_job import STEPS, Miniature, Trained, targets_of, train_miniature
from autopar.compiled import CompiledProgram
from autopar.costs.updates import DefaultAdamW
from autopar.errors import AutoparError, InternalError
from autopar.launch import RankError
from autopar.verify import roundings
from autopar.verify_report import VerifyReport

_Result = TypeVar("_Result")

UNSHOWN = "training as a whole (ZeRO, sums of gradients over ranks, recomputation, messages between stages, updates)"


def prove_miniature(compiled: CompiledProgram, given: Miniature | None = None) -> Findings:
    """Trains as many miniatures as the plan's axes need, STEPS steps each."""
    why_not = _why_none(compiled, given)
    if why_not:
        return Findings("miniature", gaps=(f"{UNSHOWN}: {why_not}",))
    cuts, left = cuts_of(compiled.plan)
    failures: list[str] = []
    gaps = list(left)
    every = [_tried(f"on {cut}", partial(train_miniature, compiled, cut, given), failures, gaps) for cut in cuts]
    trained = [each for each in every if each is not None]
    failures += [f"miniature on {each.text}: {_fault(each.report)}" for each in trained if not each.report.ok()]
    wanted = roundings(compiled)
    rounded, of_rounding = None, Findings("rounded")
    if wanted:
        train = partial(train_rounded, compiled, cuts, given)
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


def _tried(what: str, train: Callable[[], _Result], failures: list[str], gaps: list[str]) -> _Result | None:
    """What a training returns; where it does not end, that is a failure of the program's or a gap."""
    try:
        return train()
    except (InternalError, RankError) as error:  # the program was made wrong, or does not run
        failures.append(f"miniature {what}: {error}")
    except (AutoparError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        kind = "" if isinstance(error, AutoparError) else f"{type(error).__name__}: "
        gaps.append(f"a miniature {what} was not trained: {kind}{(str(error).splitlines() or [''])[0]}")
    return None


def _why_none(compiled: CompiledProgram, given: Miniature | None) -> str:
    if given is not None:
        return ""
    if not has_config(compiled.model):
        return "the model's class takes no configuration that could be made small; give a miniature"
    if compiled.loss_fn is not None:
        return "the model's loss is a function of its own, whose targets cannot be made up; give a miniature"
    return ""


def _switches(compiled: CompiledProgram) -> Iterator[str]:
    """What was asked for of the program that miniatures, which run on a CPU, go without."""
    if compiled.backend != "eager":
        yield f"backend {compiled.backend}: miniatures run layers eagerly"


KERNELS = ("kernels.", "grouped.", "fp8.")


def _beyond(compiled: CompiledProgram, trained: list[Trained]) -> Iterator[str]:
    """What miniatures do otherwise than the program, whatever its plan."""
    own = targets_of(compiled.program)
    in_miniatures = frozenset[str]().union(*(each.targets for each in trained))
    yield from grouped((target, _reason(target, target in in_miniatures)) for target in sorted(own) if _reason(target))
    others = sorted(target for target in own - in_miniatures if not _reason(target)) if trained else ()
    if others:
        yield f"{', '.join(others)}: called by no miniature; the calls of the plan that they stand for were proven"
    lacks = [set(each.lacks.items()) for each in trained]
    missing = sorted(set[tuple[str, int]].intersection(*lacks)) if lacks else ()
    if missing:
        names = ", ".join(f"{op} ({count})" for op, count in missing)
        yield f"calls that the plan's model has and a miniature in fp32 has not: {names}; they were proven one by one"
    if compiled.plan.precision != "fp32":
        yield f"{compiled.plan.precision}: everything was computed in fp32 or fp64, so that errors mean something"
    if compiled.plan.pipeline.offload.startswith("nvme:") and trained:
        yield f"{compiled.plan.pipeline.offload}: miniatures kept the optimizer's state in a folder of this machine"
    if compiled.program.any.has_fused_update and isinstance(compiled.optimizer, DefaultAdamW):
        yield "AdamW's kernel, which updates all that a rank has at once: miniatures have torch's own AdamW"


def _reason(target: str, is_in_miniature: bool = True) -> str:
    """Why a call of the program is not proven by what a CPU runs, "" if it is."""
    if target.startswith(KERNELS):
        return (
            "kernels of a GPU; their references in torch were run, and the calls that they stand for proven"
            if is_in_miniature
            else "kernels of a GPU; the calls that they stand for were proven"
        )
    if target.startswith(("overlapped.", "async_tp.")):
        return "run communication beside products on a GPU; here one follows the other"
    return ""


def _fault(report: VerifyReport) -> str:
    beyond = report.beyond(report.tolerance)
    found = [f"loss is off by {report.loss:.1e}"] if report.loss > report.tolerance else []
    found += [f"{len(beyond)} tensors are off, such as {', '.join(beyond[:3])}"] if beyond else []
    return "; ".join([*found, *report.proves_nothing]) or "not equal"
