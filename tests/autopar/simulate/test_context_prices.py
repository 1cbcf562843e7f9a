"""Context parallelism of a given strategy costs what the plan of the same strategy does."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from examples.models import EXAMPLES


def both(name: str, cluster: str, sizes: dict[str, int], exchange: str, **given: Any) -> tuple[Any, Any]:
    """Predictions of the pinned plan, and of the strategy."""
    example = EXAMPLES[name](**sizes)
    given = {"zero": 0, "micro_batches": 1, "recompute": "none"} | given
    options: dict[str, Any] = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "precision": "bf16"}
    pins = given | {"context": exchange}
    plan = autopar.compile(example.model, cluster, constraints=pins, **options).plan.prediction
    strategy = given | {"cp_exchange": exchange.replace("_", "-")}
    return plan, autopar.predict(example.model, cluster, strategy, **options)


SMALL = {"layers": 2, "width": 256, "num_heads": 8, "seq_len": 512, "batch_size": 8}


@pytest.mark.parametrize(
    ("name", "exchange", "given"),
    [
        pytest.param("llama", "ring", {"dp": 2, "cp": 2}, marks=pytest.mark.slow),
        ("llama_gqa", "all_gather", {"dp": 1, "cp": 4}),
        pytest.param("gpt2", "ring", {"dp": 1, "cp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("bert", "all_gather", {"dp": 2, "cp": 2, "micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3", "ring", {"dp": 2, "cp": 2, "zero": 1}, marks=pytest.mark.slow),
        pytest.param("llama", "all_gather", {"dp": 2, "cp": 2, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("llama", "ring", {"dp": 2, "cp": 2, "recompute": "selective"}, marks=pytest.mark.slow),
    ],
)
def test_a_strategy_takes_what_its_plan_does(name: str, exchange: str, given: dict[str, Any]) -> None:
    plan, found = both(name, "4 h100-sxm", SMALL, exchange, **given)
    assert found.step_seconds == pytest.approx(plan.step_seconds, rel=1e-6)
    assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=1e-6)


def test_a_framework_has_its_own_habits() -> None:
    """Published frameworks are taken not to copy keys and values in memory."""
    example = EXAMPLES["llama"](**SMALL)
    strategy = {"dp": 2, "cp": 2, "zero": 0, "micro_batches": 1, "cp_exchange": "ring"}
    found = autopar.predict(
        example.model, "4 h100-sxm", strategy, example_inputs=example.inputs, framework="megatron-2023"
    )
    assert found.seconds["p2p cp"] > 0
