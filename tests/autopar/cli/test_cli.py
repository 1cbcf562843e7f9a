"""The command line: what it prints and writes, and that mistakes end in words and exit code 2, not in a traceback."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import Result
from typer.testing import CliRunner

from autopar.cli import app
from autopar.plan import Plan
from autopar.training import checkpoints
from tests import forked

GPT2 = ("examples.models:gpt2", "--cluster", "4 cpu")

UNTRACEABLE = """
import torch
from torch import nn

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if y.sum().item() > 0:  # decided by a value
            y = y * 2
        return y.square().mean()

def make():
    return Branching(), {"x": torch.randn(8, 8)}
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def fails(*words: str) -> str:
    """The message of a command that must fail as a user's mistake does."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output and result.output.startswith("error: ")
    return " ".join(result.output.split())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return path


def test_plan_is_written_and_explained(tmp_path: Path) -> None:
    out, code = tmp_path / "plan.yaml", tmp_path / "program"
    result = run("plan", *GPT2, "--set", "tp=2", "--set", "zero=1", "--out", str(out), "--code", str(code))
    assert result.exit_code == 0, result.output
    plan = Plan.from_file(out)
    assert str(plan.mesh) == "dp2 x tp2"
    assert {stored.zero for stored in plan.scopes["GPT2Block"].parameters.values()} == {1}
    assert "GPT2Block x 2 (transformer.h.0 ... transformer.h.1)" in result.output
    assert (code / "model.py").exists() and (code / "weights.safetensors").exists()

    short = run("report", str(out))
    assert short.exit_code == 0 and "dp2 x tp2" in short.output
    full = run("report", str(out), "--model", "examples.models:gpt2", "--batch", "8")
    assert full.exit_code == 0, full.output
    assert re.search(r"one step +(\S+ \S+)", full.output)[1] == re.search(r"one step +(\S+ \S+)", short.output)[1]


@pytest.mark.slow
def test_configuration_is_planned_without_memory(config: Path) -> None:
    """100 billion parameters."""
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}
    fields = json.loads(config.read_text()) | sizes | {"num_hidden_layers": 32}
    config.write_text(json.dumps(fields))
    words = ("--cluster", "8x8 h100-sxm", "--batch", "128", "--seq", "32", "--precision", "bf16")
    result = run("plan", f"hf:{config}", *words, "--set", "tp=8", "--set", "pp=8")
    assert result.exit_code == 0, result.output
    assert "LlamaDecoderLayer x 32" in result.output


def test_untraceable_model_shows_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "branching_model.py").write_text(UNTRACEABLE)
    monkeypatch.chdir(tmp_path)
    message = fails("plan", "branching_model:make", "--cluster", "4 cpu")
    assert "branching_model.py:12: if y.sum().item() > 0:" in message


def test_number_of_devices_that_fits_no_mesh() -> None:
    result = run("plan", "examples.models:gpt2", "--cluster", "7 cpu")
    text = " ".join(result.output.split())
    assert result.exit_code == 0 and "every rank repeats all of the work" in text and "over 1, 2, 4, 8 devices" in text
    message = fails("plan", *GPT2, "--set", "tp=3")
    assert "tp=3 for 4 devices" in message and "dp=2 x tp=2" in message


@pytest.mark.slow
def test_budget_names_the_smallest_that_fits() -> None:
    words = ("plan", *GPT2, "--set", "dp=4", "--set", "micro_batches=1")
    message = fails(*words, "--memory", "100KiB")
    assert "no plan fits the memory of one rank" in message
    kinds = ("parameters", "gradients", "optimizer state", "activations", "transient")
    breakdown = {kind: float(re.search(rf"{kind} ([\d.]+) KiB", message)[1]) for kind in kinds}
    smallest = int(re.search(r"memory=(\d+)", message)[1])
    assert 0.85 * smallest < sum(breakdown.values()) * 1024 < 1.02 * smallest  # printed in whole KiB
    assert run(*words, "--set", f"memory={smallest}").exit_code == 0
    assert "no plan fits" in fails(*words, "--set", f"memory={int(smallest * 0.9)}")


def test_typo_in_a_constraint(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text('parameters: {"*.c_atn.weight": {tp: "S(1/3)"}}\n')
    message = fails("plan", *GPT2, "--constraints", str(limits))
    assert "matches no parameter" in message and "'*.c_atn.weight'" in message and "attn.c_attn.weight" in message
    assert "did you mean 'zero'" in fails("plan", *GPT2, "--set", "zeero=3")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("mlp.c_fc.weight", "dp=Rp tp=S(7)", "does not divide into equal shards"),
        ("mlp.c_fc.weight", "dp=Rp tp=Q", "line "),
        ("mlp.c_fc.weight", "dp=S(0) tp=R zero=2", "dp=Rp"),
    ],
)
def test_edited_plan_with_an_illegal_placement(
    tmp_path: Path, written: str, name: str, value: str, wanted: str
) -> None:
    path = edited(tmp_path, written, "parameters", name, value)
    message = fails("report", str(path), "--model", "examples.models:gpt2")
    assert wanted in message


def test_edited_plan_with_an_illegal_option(tmp_path: Path, written: str) -> None:
    path = edited(tmp_path, written, "calls", "add_2", "dp=d0 tp=d9")
    message = fails("report", str(path), "--model", "examples.models:gpt2")
    assert "GPT2Block.calls.add_2 has no such option" in message and "tp=R" in message


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a plan file."""
    path = tmp_path_factory.mktemp("written") / "plan.yaml"
    assert run("plan", *GPT2, "--set", "tp=2", "--out", str(path)).exit_code == 0
    return path.read_text()


def edited(folder: Path, written: str, table: str, name: str, value: str) -> Path:
    """A plan file with one entry of its layer class changed, as a person would."""
    path = folder / "plan.yaml"
    data = yaml.safe_load(written)
    data["layers"]["GPT2Block"][table][name] = value
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def test_unknown_names() -> None:
    assert "Did you mean 'h200-sxm'?" in fails("plan", "examples.models:gpt2", "--cluster", "4 h200")
    assert "no callable 'gpt3'" in fails("plan", "examples.models:gpt3", "--cluster", "4 cpu")
    assert "hf:path/to/config.json" in fails("plan", "gpt2", "--cluster", "4 cpu")
    assert "no_such.yaml" in fails("report", "no_such.yaml")


def test_mistakes_in_a_training_configuration(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("steps: 3\n")
    assert "names no model" in fails("train", str(path))
    path.write_text("model: examples.models:gpt2\nlerning_rate: 0.1\n")
    assert "did you mean 'learning_rate'" in fails("train", str(path))


@pytest.mark.distributed
def test_verify_passes_and_fails() -> None:
    words = ("verify", "examples.models:mlp", "--cluster", "2 cpu", "--steps", "2", "--set", "dp=2")
    equal = run(*words)
    assert equal.exit_code == 0 and "equal within 1e-05" in equal.output, equal.output
    different = run(*words, "--tolerance", "1e-30")
    assert different.exit_code == 1 and "DIFFERENT within 1e-30" in different.output


def test_no_ranks_are_started_on_another_models_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.nn.Linear(2, 2)
    progress = {"step": 1, "num_samples": 1, "seed": 0}
    save = partial(checkpoints.save_plain, other, torch.optim.AdamW(other.parameters()), progress)
    checkpoints.write(tmp_path, 1, save, True, lambda: None)
    monkeypatch.setattr("autopar.training.loop.run_ranks", lambda *args: pytest.fail("ranks were started"))
    result = run("train", "examples.models:gpt2", "--cluster", "2 cpu", "--steps", "2", "--checkpoint", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert "error: the checkpoint" in result.output and "is of another model: it lacks " in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.distributed
def test_train_from_a_configuration(tmp_path: Path, config: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 40)
    path = tmp_path / "train.yaml"
    fields = {"model": f"hf:{config}", "data": str(text), "sequence_length": 32, "cluster": "2 cpu", "steps": 12,
              "global_batch_size": 8, "learning_rate": 0.01, "log_every": 1,
              "checkpoint_directory": str(tmp_path / "runs")}  # fmt: skip
    path.write_text(yaml.safe_dump(fields))
    # In a process of its own: the progress lines come from a rank, whose output this process cannot capture.
    done = forked.run(["-m", "autopar", "train", str(path)])
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"step \d+/12 +loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 1.0
    assert f"{losses[0]:.4f} -> {losses[-1]:.4f}" in done.stdout
    assert (tmp_path / "runs" / "step-00000012").is_dir()


@pytest.mark.parametrize(
    ("command", "texts"), [("train", ["[default: 100]", "[default: 0.001]"]), ("plan", ["or fp32]"])]
)
def test_help_says_defaults(command: str, texts: list[str]) -> None:
    """A `[default: ...]` in the text of an option is not taken for markup."""
    shown = " ".join(CliRunner().invoke(app, [command, "--help"]).output.replace("│", " ").split())
    for text in texts:
        assert text in shown
