"""GPT-OSS, whose attention has sinks, in windows and without in turns: programs on real processes against one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import autopar
from tests.autopar.test_context_parallel import IDEAL


def gpt_oss() -> tuple[transformers.GptOssForCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        max_position_embeddings=64, attn_implementation="eager", experts_implementation="grouped_mm",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    ids = torch.randint(64, (8, 16))
    return model, {"input_ids": ids, "labels": ids}


def test_programs_say_what_they_compute() -> None:
    model, batch = gpt_oss()
    source = autopar.compile(model, IDEAL, example_inputs=batch, constraints={"dp": 4, "cp": 1}).source
    assert source.count("attention = sink_attention(") == 2
    assert "before=4, after=0" in source and "is_causal=True" in source


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [
    {"dp": 2, "tp": 2, "zero": 3, "recompute": "selective"},
    {"pp": 2, "tp": 2, "micro_batches": 2, "recompute": "full"},
    {"cp": 2, "dp": 2, "context": "all_gather"},
])  # fmt: skip
def test_programs_equal_one_process(constraints: dict[str, Any]) -> None:
    model, batch = gpt_oss()
    report = autopar.verify(model, IDEAL, example_inputs=batch, constraints=constraints)
    assert sum(name.endswith("sinks") for name in report.gradients) == 2
    assert report.ok(1e-5), str(report)
