"""LoRA adapters of the `peft` package: only they are trained, under any plan, and it saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import autopar
from autopar import Trainer, TrainerConfig

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def base() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64,
                                      num_attention_heads=4, num_key_value_heads=2, use_cache=False)  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted() -> Any:
    """Adapters on column- and row-parallel layers, with gradients in both of their factors from the first step on."""
    chosen = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base(), chosen)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [{"dp": 4, "zero": 3}, {"dp": 2, "tp": 2}])
def test_adapters_train_as_on_one_process(constraints: dict[str, Any]) -> None:
    report = autopar.verify(adapted(), "4 cpu", example_inputs=BATCH, constraints=constraints)
    assert report.ok(1e-5), report
    assert "of 12 compared" in str(report)  # two factors of three layers, twice: the rest has no gradient


@pytest.mark.slow
@pytest.mark.distributed
def test_trained_adapters_are_saved_by_peft(tmp_path: Path) -> None:
    """Those of a plain run; the base is as it was, and the adapters on another base give the trained logits."""
    trained: list[Any] = []
    for parallel in ({"cluster": "2 cpu", "constraints": {"tp": 2}}, {"auto_parallel": False}):
        model = adapted()
        Trainer(model, TrainerConfig(**parallel, steps=3, log_every=0, learning_rate=0.01), [BATCH]).fit()
        trained.append(model)
    program, plain = (dict(model.named_parameters()) for model in trained)
    before = dict(adapted().named_parameters())
    for name, value in program.items():
        assert torch.allclose(value, plain[name], atol=1e-5), name
        assert torch.equal(value, before[name]) != ("lora_" in name), name
    trained[0].save_pretrained(tmp_path)
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 12
    again = peft.PeftModel.from_pretrained(base(), tmp_path)
    with torch.no_grad():
        assert torch.equal(again.eval()(TOKENS).logits, trained[0].eval()(TOKENS).logits)
