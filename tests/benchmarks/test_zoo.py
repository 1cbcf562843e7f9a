"""What benchmarks/zoo.py says of a model: what every rank computes whole, and why a model fails."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

import autopar
from autopar.errors import TraceError
from autopar.verify import sgd_with_momentum
from benchmarks import zoo
from examples.models import mlp

ROWS, IN, WIDTH, OUT = 8, 16, 32, 8


def test_work_that_every_rank_repeats_is_named_with_its_share() -> None:
    """An MLP with whole weights on four tensor-parallel ranks: two linears, a GELU and the squared error's mean."""
    example = mlp(layers=2, batch_size=ROWS, in_width=IN, width=WIDTH, out_width=OUT)
    compiled = autopar.compile(
        example.model,
        zoo.IDEAL,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints={"tp": 4, "parameters": {"*": {"tp": "R"}}, "activations": {"*": {"tp": "R"}}},
        optimizer=sgd_with_momentum,
    )
    found = zoo.replicated(compiled)
    linears = 2 * ROWS * (IN * WIDTH + WIDTH * OUT)
    gelu, loss = ROWS * WIDTH, ROWS * OUT
    total = linears + gelu + loss
    expected = {"aten.linear.default": linears / total, "aten.gelu.default": gelu / total}
    assert found == pytest.approx(expected)
    assert loss / total < zoo.NOTABLE


def test_nothing_is_whole_where_rows_are_dealt_out() -> None:
    compiled = zoo.planned(mlp(), zoo.Plan({"dp": 4}))
    assert zoo.replicated(compiled) == {}


def test_a_plan_is_tried_on_the_models_that_offer_its_axis() -> None:
    found = list(zoo.cases(["mlp", "mistral", "mixtral"], ["free", "ep2", "cp2"]))
    assert found == [
        ("mlp", "free"),
        ("mistral", "free"),
        ("mistral", "cp2"),
        ("mixtral", "free"),
        ("mixtral", "ep2"),
        ("mixtral", "cp2"),
    ]


def test_a_model_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(zoo.OutOfTime, match="not planned within"), zoo.at_most(0.05):
        sum(math.sqrt(i) for i in range(10**10))


def test_a_row_that_fails_says_why_by_one_line() -> None:
    error = TraceError("the loss depends on a coin", values="two faces", alternatives="no coin")
    assert zoo.first_line(error) == "TraceError: the loss depends on a coin"
    remote = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: wrong\n  got: 3\n'
    assert zoo.first_line(RuntimeError(remote)) == "ValueError: wrong"


def test_the_summary_counts_models_and_gathers_causes() -> None:
    rows = [
        zoo.Row("gpt2", "free", mesh="dp4", error=3e-7),
        zoo.Row("mlp", "free", failure="TraceError: no"),
        zoo.Row("vit", "free", failure="TraceError: no"),
    ]
    assert zoo.summary(rows) == (
        "free: 1 of 3 models, largest error 3.0e-07\n2 x TraceError: no: mlp (free), vit (free)"
    )


@pytest.mark.slow
def test_eager_training_has_what_classes_note_when_they_are_first_built() -> None:
    """The ranks start before Segformer's class is loaded, which registers the hidden states that its head reads."""
    command = [sys.executable, "-m", "benchmarks.zoo", "--only", "mlp,segformer", "--plans", "dp2 x tp2 zero 3"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=zoo.ROOT, timeout=200, check=False)
    assert found.returncode == 0 and "2 of 2 models" in found.stdout, found.stdout + found.stderr
