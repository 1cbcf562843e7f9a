"""Error messages say constraint, values and alternatives, and survive the way between processes."""

from __future__ import annotations

import pickle

import pytest

from autopar import errors

SUBCLASSES = [
    errors.ModelError,
    errors.TraceError,
    errors.ClusterError,
    errors.ConstraintError,
    errors.PlanError,
    errors.InfeasibleError,
    errors.WorldSizeError,
]


def test_message_with_phrases() -> None:
    error = errors.WorldSizeError("the plan needs 8 processes", values="4 are running", alternatives="re-plan for 4")
    assert str(error) == "the plan needs 8 processes\n  got: 4 are running\n  instead: re-plan for 4"


def test_message_leaves_out_what_is_missing() -> None:
    assert str(errors.TraceError("no loss")) == "no loss"
    assert str(errors.TraceError("no loss", alternatives=["labels", "loss_fn="])) == (
        "no loss\n  instead:\n    labels\n    loss_fn="
    )


def test_message_with_named_values() -> None:
    error = errors.InfeasibleError("16 GiB hold no plan", values={"parameters": "12 GiB", "gradients": "6 GiB"})
    assert str(error) == "16 GiB hold no plan\n  got:\n    parameters = 12 GiB\n    gradients = 6 GiB"


def test_long_values_are_indented_below_their_label() -> None:
    error = errors.TraceError("torch refused", values="first\nsecond")
    assert str(error).splitlines() == ["torch refused", "  got:", "    first", "    second"]


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_every_error_is_a_value_error_and_pickles(kind: type[errors.AutoparError]) -> None:
    error = kind("constraint", values={"a": 1}, alternatives=("b", "c"))
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(error, ValueError)
    assert type(copy) is kind
    assert (str(copy), copy.constraint, copy.values, copy.alternatives) == (
        str(error),
        "constraint",
        {"a": 1},
        ("b", "c"),
    )
