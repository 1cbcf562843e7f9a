"""Miniatures that round as the plan does pass where rounding is all that differs, and fail where more does."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.certify.cuts import cuts_of
from autopar.certify.miniature import judged, train_rounded
from autopar.certify.miniature_run import Trained
from autopar.compiled import CompiledProgram
from autopar.running import folder
from autopar.verify import roundings, sgd_with_momentum, verify_program
from autopar.verify_report import GRADIENTS, LOSS, VerifyReport
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
    miniature = trained()
    findings = judged(lossy(), miniature)
    assert roundings(lossy()) == miniature.rounds == ("fp8", "compression gather int8, reduce int8")
    assert findings.ok and not findings.gaps and miniature.left == ()
    # Of three bits after the leading one, and of 1/127 of a block's largest, something is lost, and not much.
    assert 1e-2 < miniature.report.together < GRADIENTS / 2 and 0 < miniature.report.loss < LOSS / 2
    assert f"gradients were off by {miniature.report.together:.1g} in norm" in findings.not_proven[0]


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
    imported_modules = folder.imported_modules

    def with_defect(sources: Any) -> dict[str, str]:
        modules = imported_modules(sources)
        assert right in modules[file]
        return modules | {file: modules[file].replace(right, wrong)}

    monkeypatch.setattr(folder, "imported_modules", with_defect)
    assert not judged(lossy(), trained()).ok


@pytest.mark.slow
@pytest.mark.distributed
def test_verify_judges_what_rounds_as_a_certificate_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate's gradient is off by half of itself, as of a token or two the experts are chosen otherwise."""
    example = EXAMPLES["mixtral"](width=128, layers=2)
    program = autopar.compile(
        example.model,
        "2 cpu",
        example_inputs=example.inputs,
        fp8=True,
        compression={"gather": "int8"},
        constraints={"dp": 2, "zero": 3},
        optimizer=sgd_with_momentum,
    )
    report = verify_program(program, example.inputs, steps=2)
    assert report.ok() and report.rounds == ("fp8", "compression gather int8")
    assert not report.ok(report.tolerance) and report.largest_gradient > report.tolerance > report.together > 0.02
    imported_modules = folder.imported_modules

    def with_defect(sources: Any) -> dict[str, str]:
        modules, right = imported_modules(sources), "scaled.mul_(scale_b_M1.t())"
        return modules | {"kernels/fp8.py": modules["kernels/fp8.py"].replace(right, "scaled")}

    monkeypatch.setattr(folder, "imported_modules", with_defect)
    wrong = verify_program(program, example.inputs, steps=2)
    assert not wrong.ok() and any("all gradients together" in fault for fault in wrong.faults())


def test_an_update_that_is_wrong_is_no_rounding() -> None:
    right = VerifyReport(0.001, {"w": 0.4}, {"w": 1e-7}, {}, {}, (), (), "dp2", together=0.1, rounds=("fp8",))
    assert right.ok()
    for change, said in (
        ({"parameters": {"w": 1e-3}}, "an update by its own gradients"),
        ({"together": 0.3}, "all gradients together"),
        ({"together": math.nan}, "all gradients together"),
        ({"loss": 0.1}, "the loss"),
        ({"buffers": {"mean": 0.5}}, "a buffer"),
    ):
        wrong = replace(right, **change)
        assert not wrong.ok() and said in wrong.faults()[0]
