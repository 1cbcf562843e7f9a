"""The fine-tuning script on two processes gives the losses and the folder of the one on a single process."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests import forked

HOME = Path(__file__).resolve().parents[2]
STEPS = 20


def lines_of(*command: str, ranks: int = 1) -> list[str]:
    """Return the lines that a script prints of its steps, without those that another rank has printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOME)}
    ended = forked.run(command, ranks=ranks, cwd=HOME, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return list(dict.fromkeys(line for line in ended.stdout.splitlines() if line.startswith("step")))


@pytest.mark.slow
@pytest.mark.distributed
def test_losses_and_folder_are_those_of_one_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 64}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    given = (str(tmp_path / "model"), "--steps", str(STEPS), "--length", "32")
    plain = lines_of("-m", "examples.finetune.plain", *given, "--out", str(tmp_path / "plain"))
    more = ("--cluster", "2 cpu", "--out", str(tmp_path / "parallel"))
    parallel = lines_of("-m", "examples.finetune.parallel", *given, *more, ranks=2)
    assert len(plain) == STEPS + STEPS // 10
    for ours, theirs in zip(parallel, plain, strict=True):
        assert ours.split()[:3] == theirs.split()[:3]
        assert float(ours.split()[-1]) == pytest.approx(float(theirs.split()[-1]), rel=1e-5)
    ids = torch.arange(32)[None] * 7 % 256
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(tmp_path / name)(input_ids=ids).logits
            for name in ("parallel", "plain")
        ]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


def test_ten_lines_differ_at_most() -> None:
    texts = [(HOME / f"examples/finetune/{name}.py").read_text() for name in ("plain", "parallel")]
    code = [text.split('"""', 2)[2].splitlines() for text in texts]
    changes = [line for line in difflib.ndiff(*code) if line.startswith("+ ")]
    assert 0 < len(changes) <= 10
