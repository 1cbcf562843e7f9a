"""A strategy takes the seconds and bytes of the plan that the same constraints pin, on every axis and on products."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

import autopar
from examples.models import EXAMPLES

SMALL = {"layers": 4, "width": 256, "num_heads": 8, "seq_len": 512, "batch_size": 16}
CLUSTER = "8 h100-sxm"
PIPELINE = {"pp": 2, "dp": 4, "zero": 0, "micro_batches": 4}
UNPINNED = {"pp": 1, "ddp": 1, "tp": 1, "cp": 1, "ep": 1, "micro_batches": 1, "recompute": "none", "offload": "none"}
OF_PLANS = ("context", "parameters", "forbid_parameters")
"""Constraints that a strategy has in other words."""
ON_CP = {"parameters": {"*experts*": {"cp": "S(0)"}}}
"""Ranks of a plan's cp have different experts. A strategy has them in its ep."""


@cache
def model(name: str) -> tuple[Any, dict[str, Any]]:
    if name != "mixtral":
        example = EXAMPLES[name](**SMALL)
        return example.model, {"example_inputs": example.inputs, "loss_fn": example.loss_fn}
    with torch.device("meta"):
        config = transformers.MixtralConfig(
            vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
        )  # fmt: skip
        ids = torch.zeros(16, 512, dtype=torch.int64)
        return transformers.MixtralForCausalLM(config), {"example_inputs": {"input_ids": ids, "labels": ids}}


def both(name: str, pins: dict[str, Any]) -> tuple[Any, Any]:
    """Predictions of the pinned plan, and of the strategy."""
    module, arguments = model(name)
    pins = UNPINNED | pins
    plan = autopar.compile(module, CLUSTER, constraints=pins, precision="bf16", **arguments).plan.prediction
    strategy = {key: value for key, value in pins.items() if key not in OF_PLANS}
    if "context" in pins:
        strategy["cp_exchange"] = pins["context"].replace("_", "-")
    if "parameters" in pins:
        strategy["ep"] *= pins["cp"]
    return plan, autopar.predict(module, CLUSTER, strategy, precision="bf16", **arguments)


def case(name: str, *, slow: bool = True, **pins: Any) -> Any:
    words = "-".join(f"{key}{value}" for key, value in pins.items() if "parameters" not in key)
    return pytest.param(name, pins, id=f"{name}-{words}", marks=pytest.mark.slow if slow else ())


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("name", "pins"),
    [
        *(case("llama", dp=8, zero=zero, slow=zero != 3) for zero in (0, 1, 2, 3)),
        case("llama", dp=4, tp=2, zero=1, micro_batches=2, slow=False),
        case("llama", ddp=2, dp=4, zero=1),
        case("gpt2", dp=2, tp=4, zero=0),
        *(case("llama", **PIPELINE, schedule=name, slow=name != "1f1b") for name in ("gpipe", "1f1b", "zero-bubble")),
        case("llama", **PIPELINE, schedule="interleaved", chunks=2),
        *(case("llama", dp=8, zero=1, recompute=mode) for mode in ("selective", "full")),
        case("llama", dp=8, zero=1, offload="optimizer"),
        case("llama", dp=4, cp=2, zero=1, context="ring"),
        case("llama_gqa", dp=2, cp=4, zero=0, context="all_gather", slow=False),
        case("bert", dp=4, cp=2, zero=0, micro_batches=2, context="all_gather"),
        case("qwen3", dp=4, cp=2, zero=1, context="ring"),
        *(case("llama", dp=4, cp=2, zero=0, recompute=mode, context="ring") for mode in ("selective", "full")),
        case("llama", dp=2, cp=2, tp=2, zero=1, context="all_gather"),
        case("llama", **PIPELINE | {"dp": 2}, cp=2, schedule="1f1b", context="ring"),
        case("llama", **PIPELINE | {"dp": 1}, cp=2, tp=2, schedule="1f1b", context="all_gather"),
        case("mixtral", dp=8, zero=1),
        case("mixtral", dp=4, tp=2, etp=2, zero=0),
        case("mixtral", dp=4, cp=2, zero=0, context="all_gather", forbid_parameters={"*experts*": {"cp": "S(0)"}}),
        *(case("mixtral", dp=8, ep=8, zero=zero, slow=zero != 1) for zero in (0, 1, 3)),
        case("mixtral", dp=8, ep=2, zero=1, micro_batches=2, recompute="full"),
        case("mixtral", ddp=2, dp=4, ep=2, zero=1),
        case("mixtral", dp=4, tp=2, etp=2, ep=4, zero=0),
        case("mixtral", dp=4, tp=2, etp=1, ep=2, zero=1, slow=False),
        case("mixtral", **PIPELINE, ep=2, schedule="1f1b"),
        case("mixtral", dp=4, cp=2, zero=0, context="all_gather", **ON_CP),
        case("mixtral", dp=4, cp=2, ep=2, zero=1, context="ring", **ON_CP),
        case("mixtral", **PIPELINE | {"dp": 1}, cp=2, tp=2, etp=1, schedule="1f1b", context="all_gather", **ON_CP),
    ],
)
def test_a_strategy_takes_what_its_plan_does(name: str, pins: dict[str, Any]) -> None:
    plan, found = both(name, pins)
    assert found.step_seconds == pytest.approx(plan.step_seconds, rel=1e-6)
    assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=1e-6)


def test_a_framework_has_its_own_habits() -> None:
    """Published frameworks are taken not to copy keys and values in memory."""
    module, arguments = model("llama")
    strategy = {"dp": 4, "cp": 2, "zero": 0, "micro_batches": 1, "cp_exchange": "ring"}
    generated, published = (
        autopar.predict(module, CLUSTER, strategy, framework=framework, precision="bf16", **arguments)
        for framework in ("autopar", "megatron-2023")
    )
    assert published.seconds["p2p cp"] > 0
    assert published.num_bytes["transient"] < generated.num_bytes["transient"]
