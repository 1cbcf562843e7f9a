"""The miniature once more, rounding as the plan does: products in fp8, and what ZeRO sends in codes of 8 bits.

The exact miniatures show what a program computes; this one shows that rounding adds to it what rounding does and no
more. On a CPU the same codes and scales are made as on a GPU, and products of them are summed in fp32
(codegen/kernels/fp8.py and quantize.py). One process computes without rounding, and all gradients of a step are
compared as one vector: single tensors say little, as small ones share blocks of codes with large ones, and as experts
are chosen otherwise for a token or two.
"""

from __future__ import annotations

from autopar.certify.cuts import Cut
from autopar.certify.findings import Findings
from autopar.certify.small_job import Miniature, Trained, train_miniature
from autopar.compiled import CompiledProgram
from autopar.ir.mesh import ZERO_AXES
from autopar.verify import roundings
from autopar.verify_report import GRADIENTS, LOSS


def train_rounded(compiled: CompiledProgram, cuts: list[Cut], given: Miniature | None) -> Trained:
    """Trains one miniature with the plan's roundings. Raises what `train_miniature` raises.

    cuts: of the exact miniatures; of those the first on which ZeRO sends something is taken.
    """
    shared = (cut for cut in cuts if any(cut.degrees.get(axis, 1) > 1 for axis in ZERO_AXES))
    cut = next(shared, cuts[0]) if compiled.plan.compresses else cuts[0]
    return train_miniature(compiled, cut, given, is_rounded=True)


def judged(compiled: CompiledProgram, trained: Trained) -> Findings:
    """What a miniature that rounds shows."""
    report, wanted = trained.report, roundings(compiled)
    without = [each for each in wanted if each not in trained.rounds]
    found = f"{' and '.join(trained.rounds)} on {trained.text}"
    return Findings(
        subject="rounded",
        failures=tuple(f"miniature in {found}: {text}" for text in report.faults()) if trained.rounds else (),
        gaps=tuple(f"{each}: the miniature has nothing that it rounds" for each in without),
        not_proven=(
            f"rounding more nearly than this: in {found} a miniature's gradients were off by {report.together:.1g} in "
            f"norm, and its loss by {report.loss:.1g}, where {GRADIENTS:g} and {LOSS:.1g} pass",
        )
        if trained.rounds
        else (),
    )
