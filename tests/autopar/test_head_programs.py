"""Plans and programs with padded heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cluster import as_cluster
from autopar.compile import advised_search
from autopar.launch import run_ranks
from autopar.planning.make_request import request_of
from autopar.planning.planner import search_plans
from autopar.settings.compile_options import CompileOptions
from autopar.verify import verify_program
from examples.models import EXAMPLES, Example
from tests.autopar.test_verify import IDEAL, TOLERANCE, _train

BY_HEADS = {"parameters": {"*.q_proj.weight": {"tp": "S(0)"}}}


def llama_like(name: str, heads: int, groups: int, **sizes: Any) -> Example:
    return EXAMPLES[name](width=8 * heads, num_heads=heads, head_dim=8, num_key_value_heads=groups, layers=1, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "is_padded"),
    [
        ("gpt2", {"width": 48, "num_heads": 6}, True),
        # Without a causal mask rows may be cut, which divides all work
        ("bert", {"hidden_size": 48, "num_attention_heads": 6}, False),
    ],
)
def test_the_faster_of_plans_with_padding_and_without(name: str, sizes: dict[str, int], is_padded: bool) -> None:
    example = EXAMPLES[name](layers=1, **sizes)
    options = CompileOptions(example_inputs=example.inputs, loss_fn=example.loss_fn, constraints={"tp": 4})
    request = request_of(example.model, as_cluster(IDEAL), options)
    assert request.unpadded is not None
    plans = [search_plans(variant).best.plan for variant in (request, replace(request, trace=request.unpadded))]
    seconds = [plan.prediction.step_seconds for plan in plans]
    assert [plan.heads_padded_to for plan in plans] == [4, 1] and (seconds[0] < seconds[1]) == is_padded
    best = advised_search(request).best
    assert best.plan.prediction.step_seconds == min(seconds)
    assert (request.of(best.graph).trace is request.trace) == is_padded


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("build", "pins", "where"),
    [
        (partial(llama_like, "llama", 6, 3), {"tp": 4, "recompute": "full"} | BY_HEADS, 'padding=16, padded="S(1)"'),
        # of 7 queries a group gets one more, which sees the group's values: what it gives is zeroed
        (
            partial(llama_like, "qwen2", 14, 2, seq_len=64),
            {"tp": 4, "recompute": "selective"},
            'padding=8, padded="S(0/2)"',
        ),
    ],
)
def test_grouped_heads_train_as_one_process_does(
    build: Callable[[], Example], pins: dict[str, Any], where: str
) -> None:
    example = build()
    options = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "optimizer": torch.optim.AdamW}
    compiled = autopar.compile(example.model, IDEAL, constraints=pins, **options)
    assert compiled.plan.heads_padded_to == 4 and where in compiled.source
    # AdamW makes whole steps of round-off, which differs between processors: updates are compared by themselves.
    report = verify_program(compiled, example.inputs, is_replayed=True)
    assert report.ok(TOLERANCE), str(report)


@pytest.mark.slow
@pytest.mark.distributed
def test_checkpoints_and_plans_have_no_padding(tmp_path: Path) -> None:
    """5 heads in each third of one matrix: 8 on tp4, 6 on tp2. The plan's file says so, checkpoints have 5."""
    example = EXAMPLES["gpt2"](layers=1, width=40, num_heads=5)
    options = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "optimizer": torch.optim.AdamW}
    pins = {"tp": 4, "parameters": {"*.c_attn.weight": {"tp": "S(1/3)"}}}
    compiled = autopar.compile(example.model, IDEAL, constraints=pins, **options)
    assert 'Param((40, 120), tp="S(1/3)", padding=24, padded="S(1/3)")' in compiled.source
    saved = tmp_path / "plan.yaml"
    saved.write_text(compiled.plan.to_yaml())
    first = autopar.compile(example.model, IDEAL, plan=saved, **options)
    assert first.source == compiled.source
    report = verify_program(first, example.inputs)
    assert report.ok(TOLERANCE), str(report)
    straight = run_ranks(_train, (first, example.inputs, 4, None, None), 4)[0]
    half = run_ranks(_train, (first, example.inputs, 2, None, tmp_path / "half"), 4)[0]
    second = autopar.compile(example.model, IDEAL, constraints={"dp": 2, "tp": 2, "zero": 3}, **options)
    assert 'zero=3, padding=8, padded="S(1/3)"' in second.source
    rest = run_ranks(_train, (second, example.inputs, 2, tmp_path / "half", None), 4)[0]
    assert half + rest == pytest.approx(straight, rel=1e-5)
