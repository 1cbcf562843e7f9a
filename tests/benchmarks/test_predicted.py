"""The figures of benchmarks.predicted that need no measurement."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.predicted import PLANS, SIZES, Pair, regret, tau
from examples.models import EXAMPLES


def test_tau_is_one_for_the_same_order_and_minus_one_for_the_reverse() -> None:
    assert tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1


def test_tau_counts_pairs_in_order_less_pairs_out_of_order() -> None:
    # M. Kendall's own example of ranks: 10 objects with S = 31 - 14 = 17 of 45.
    first = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    second = [3, 1, 2, 6, 4, 9, 8, 5, 10, 7]
    score = sum((b > a) - (b < a) for a, b in itertools.combinations(second, 2))
    assert tau(first, second) == pytest.approx(score / 45)
    # tau-b with one tie among three: (2 - 0) / sqrt(2 * 3).
    assert tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 6**0.5)


def test_tau_of_pairs_that_are_apart() -> None:
    assert tau([2, 1, 3], [1.0, 1.05, 2.0]) == pytest.approx(1 / 3)
    assert tau([2, 1, 3], [1.0, 1.05, 2.0], close=0.1) == 1


def test_regret_is_of_the_plan_that_is_predicted_to_be_fastest() -> None:
    assert regret([3.0, 1.0, 2.0], [1.0, 1.5, 9.0]) == 0.5
    assert regret([1.0, 2.0, 3.0], [1.0, 1.5, 9.0]) == 0


def test_errors_are_of_the_median() -> None:
    class Compiled:
        class plan:  # noqa: N801
            class prediction:  # noqa: N801
                step_seconds = 1.2

    pair = Pair("gpt2", 2, {"dp": 2, "zero": 0}, Compiled, {})
    assert pair.error([1.0, 0.5, 9.0]) == pytest.approx(0.2)
    assert pair.text == "dp=2 zero=0"


def test_there_are_enough_pairs_and_every_model_takes_its_size() -> None:
    assert all(len(plans) == len({str(plan) for plan in plans}) == 20 for plans in PLANS.values())
    for name, size in SIZES.items():
        example = EXAMPLES[name](**{**size, "layers": 1})
        assert next(iter(example.inputs.values())).shape[0] == size["batch_size"]
