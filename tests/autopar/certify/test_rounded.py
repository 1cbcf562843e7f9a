"""Miniatures that round as the plan does pass where rounding is all that differs, and fail where more does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import autopar
from autopar.certify.cuts import cuts_of
from autopar.certify.rounded import GRADIENTS, LOSS, judged, train_rounded
from autopar.certify.small_job import Trained, roundings
from autopar.compiled import CompiledProgram
from autopar.running import folder
from examples.models import EXAMPLES


@cache
def lossy() -> CompiledProgram:
    example = EXAMPLES["mixtral"](width=64)
    return autopar.compile(
        example.model,
        "2 h100-sxm",
        example_inputs=example.inputs,
        precision="bf16",
        fp8=True,
        compression={"gather": "int8", "reduce": "int8"},
        constraints={"dp": 2, "zero": 3, "micro_batches": 2},
    )


def trained() -> Trained:
    return train_rounded(lossy(), cuts_of(lossy().plan)[0], None)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_miniature_rounds_as_the_plan_does() -> None:
    made = trained()
    found = judged(lossy(), made)
    assert roundings(lossy()) == made.rounds == ("fp8", "compression gather int8, reduce int8")
    assert found.ok and not found.gaps and made.left == ()
    # Of three bits after the leading one, and of 1/127 of a block's largest, something is lost, and not much.
    assert 1e-2 < made.report.together < GRADIENTS / 2 and 0 < made.report.loss < LOSS / 2
    assert f"gradients were off by {made.report.together:.1g} in norm" in found.not_proven[0]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("runtime/compressed.py", "codes_NFB[:, blocks], scales_NF[:, blocks], (", "codes_NFB[:1], scales_NF[:1], ("),
        ("kernels/fp8.py", "scaled.mul_(scale_b_M1.t())", "scaled"),
    ],
    ids=["a sum without a rank's codes", "a product without its scale"],
)
def test_a_defect_of_what_rounds_fails_it(monkeypatch: pytest.MonkeyPatch, file: str, right: str, wrong: str) -> None:
    own = folder.imported_modules

    def with_defect(sources: Any) -> dict[str, str]:
        modules = own(sources)
        assert right in modules[file]
        return modules | {file: modules[file].replace(right, wrong)}

    monkeypatch.setattr(folder, "imported_modules", with_defect)
    assert not judged(lossy(), trained()).ok
