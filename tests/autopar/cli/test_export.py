"""`autopar export`: what training left, read again by transformers and by load_state_dict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

from autopar import Trainer, TrainerConfig
from autopar.cli import app
from autopar.errors import ModelError, OutputError
from autopar.files.tensor_files import TensorFiles, TensorSpec
from autopar.models.loading import load_model
from autopar.models.pretrained_export import save_pretrained

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
TOKENS = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))


def run(*words: Any) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, words)])


def done(*words: Any) -> None:
    result = run(*words)
    assert result.exit_code == 0, result.output


def source_of(folder: Path, name: str, **changes: Any) -> Path:
    """A folder as it comes from a hub, in bf16, with a tokenizer's files."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(**{**SIZES, **changes})
    getattr(transformers, name)(config).bfloat16().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("of the original")
    return folder


def train(source: Path, checkpoints: Path, **constraints: Any) -> Any:
    """The trained model, of a run on two processes that began with the folder."""
    model = load_model(f"hf:{source}", lazy=True).model
    config = TrainerConfig(cluster="2 cpu", steps=2, checkpoint_directory=str(checkpoints), log_every=0,
                           learning_rate=0.1, constraints=constraints)  # fmt: skip
    Trainer(model, config, [{"input_ids": TOKENS, "labels": TOKENS}]).fit()
    return model.eval()


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "changes", "constraints"), [
    ("LlamaForCausalLM", {"tie_word_embeddings": True, "vocab_size": 61}, {"tp": 2}),
    pytest.param("LlamaForCausalLM", {}, {"dp": 2, "zero": 3}, marks=pytest.mark.slow),
    pytest.param("MixtralForCausalLM", {"num_local_experts": 4}, {"dp": 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_checkpoint_becomes_a_folder(name: str, changes: Any, constraints: Any, tmp_path: Path) -> None:
    """Equal logits in transformers' hands; its own names, shards and config; with and without --model."""
    source = source_of(tmp_path / "source", name, **changes)
    trained = train(source, tmp_path / "checkpoints", **constraints)
    tokens = TOKENS % 61
    with torch.no_grad():
        logits = trained(input_ids=tokens).logits
        before = getattr(transformers, name).from_pretrained(source, dtype=torch.float32).eval()
        assert not torch.allclose(before(input_ids=tokens).logits, logits, atol=0.1)
        for number, words in enumerate(([], ["--model", f"hf:{source}"])):
            folder = tmp_path / f"out{number}"
            done(tmp_path / "checkpoints", "--hf", folder, *words)
            found = transformers.AutoModelForCausalLM.from_pretrained(folder)
            assert type(found).__name__ == name and found.dtype == torch.float32
            assert torch.equal(found.eval()(input_ids=tokens).logits, logits)
            original, config = (json.loads((f / "config.json").read_text()) for f in (source, folder))
            differing = {"dtype", "transformers_version", "torch_dtype", "_name_or_path"}
            assert {k: v for k, v in original.items() if k not in differing} == {
                k: v for k, v in config.items() if k not in differing
            }
            files = (load_file(f / "model.safetensors").keys() for f in (source, folder))
            assert next(files) == next(files)
            assert (folder / "tokenizer.json").read_text() == "{}" and not (folder / "README.md").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a plain run on this process."""
    home = tmp_path_factory.mktemp("run")
    model = load_model(f"hf:{source_of(home / 'source', 'LlamaForCausalLM', tie_word_embeddings=True)}").model
    config = TrainerConfig(auto_parallel=False, steps=1, checkpoint_directory=str(home / "checkpoints"), log_every=0)
    Trainer(model, config, [{"input_ids": TOKENS, "labels": TOKENS}]).fit()
    torch.save(model.state_dict(), home / "trained.pt")
    return home / "checkpoints"


def test_a_checkpoint_becomes_a_file(checkpoint: Path, tmp_path: Path) -> None:
    """Without a model the names that training had; with it, every name of the state dict; a dtype on request."""
    trained = torch.load(checkpoint.parent / "trained.pt", weights_only=True)
    done(checkpoint, "--safetensors", tmp_path / "plain.safetensors")
    plain = load_file(tmp_path / "plain.safetensors")
    assert plain.keys() == trained.keys() - {"lm_head.weight"}
    spec = f"hf:{checkpoint.parent / 'source'}"
    done(next(checkpoint.glob("step-*")), "--safetensors", tmp_path / "named.safetensors", "--model", spec)
    named = load_file(tmp_path / "named.safetensors")
    assert named.keys() == trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in (named | plain).items())
    done(checkpoint, "--safetensors", tmp_path / "half.safetensors", "--dtype", "bf16")
    half = load_file(tmp_path / "half.safetensors")
    assert all(torch.equal(value, trained[name].bfloat16()) for name, value in half.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "half.safetensors", "named.safetensors", "plain.safetensors"
    ]  # fmt: skip


def test_nothing_of_anyone_is_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "mine.safetensors").write_text("mine")
    assert "autopar did not write it" in run(checkpoint, "--hf", tmp_path / "mine").output.replace("\n", " ")
    assert "the output file exists" in run(checkpoint, "--safetensors", tmp_path / "mine.safetensors").output
    assert (tmp_path / "mine" / "notes.txt").read_text() == (tmp_path / "mine.safetensors").read_text() == "mine"
    for _ in range(2):  # one of ours is replaced
        done(checkpoint, "--hf", tmp_path / "ours")


def test_mistakes_are_told(checkpoint: Path, tmp_path: Path) -> None:
    spec = source_of(tmp_path / "other", "LlamaForCausalLM", num_hidden_layers=3)
    for words, message in (
        ((checkpoint,), "export writes one format at a time"),
        ((checkpoint, "--hf", tmp_path / "a", "--dtype", "int3"), "--dtype names an unknown dtype"),
        ((tmp_path / "none", "--hf", tmp_path / "a"), "the folder has no complete checkpoint"),
        ((checkpoint, "--hf", tmp_path / "a", "--model", f"hf:{spec}"), "is of another model"),
    ):
        result = run(*words)
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "a").exists()


def test_damage_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    original = next(checkpoint.glob("step-*"))
    broken.mkdir()
    for path in original.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            data[-1] ^= 1
        (broken / path.name).write_bytes(data)
    result = run(broken, "--hf", tmp_path / "out")
    assert result.exit_code == 2 and "differs from its checksum" in " ".join(result.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_shards_are_as_large_as_asked(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    values = (((name,), value) for name, value in model.named_parameters())
    save_pretrained(values, model, tmp_path / "out", dtype=torch.bfloat16, most_bytes=10_000)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("model-*.safetensors")]
    assert len(sizes) > 3 and max(sizes) < 12_000
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.bfloat16
    assert all(torch.equal(value.bfloat16(), found.state_dict()[name]) for name, value in model.named_parameters())
    with pytest.raises(ModelError, match="not of transformers"):
        save_pretrained((), torch.nn.Linear(2, 2), tmp_path / "linear")


def test_a_tensor_file_wants_what_was_announced(tmp_path: Path) -> None:
    specs = {
        "count": TensorSpec((), torch.int64),
        "odd": TensorSpec((3,), torch.bool),
        "x": TensorSpec((2, 3), torch.float32),
    }
    values = {"odd": torch.tensor([True, False, True]), "x": torch.randn(3, 2).T, "count": torch.tensor(7)}
    with TensorFiles(tmp_path, "all", specs, 10**6) as files:
        for name, value in values.items():
            files.write(name, value)
    found = load_file(tmp_path / "all.safetensors")
    assert all(torch.equal(found[name], value) for name, value in values.items())
    with pytest.raises(OutputError, match="some tensors were not written"), TensorFiles(tmp_path, "b", specs, 9):
        pass
    with TensorFiles(tmp_path, "c", {}, 9) as files, pytest.raises(OutputError, match="cannot be written: y"):
        files.write("y", torch.zeros(1))
