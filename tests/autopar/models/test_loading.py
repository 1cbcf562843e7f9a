"""Models by name: both forms, on real memory and on meta, and a clear error for each way to get it wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from autopar.errors import ModelError
from autopar.models.batches import random_batch
from autopar.models.loading import load_model
from tests import forked

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in (LLAMA | changes).items() if value is not None}))
    return path


def test_factory_that_returns_an_example() -> None:
    loaded = load_model("examples.models:mlp", layers=4)
    assert loaded.inputs is not None and loaded.loss_fn is torch.nn.functional.mse_loss
    assert len(list(loaded.model.parameters())) == 8
    assert loaded.model.training


@pytest.mark.parametrize(
    ("source", "num_inputs"),
    [
        ("return nn.Linear(4, 2)", None),
        ("return nn.Linear(4, 2), (torch.zeros(1, 4),)", 1),
        ("return nn.Linear(4, 2), {'input': torch.zeros(1, 4), 'target': torch.zeros(1, 2)}, F.mse_loss", 2),
    ],
)
def test_factory_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, num_inputs: int | None
) -> None:
    name = f"users_model_{num_inputs}"
    header = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
    (tmp_path / f"{name}.py").write_text(f"{header}def build():\n    {source}\n")
    monkeypatch.chdir(tmp_path)
    loaded, again = load_model(f"{name}:build"), load_model(f"{name}:build")
    assert (None if loaded.inputs is None else len(loaded.inputs)) == num_inputs
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), again.model.parameters(), strict=True))


def test_loading_leaves_the_callers_random_state_alone() -> None:
    before = torch.get_rng_state()
    load_model("examples.models:mlp")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("by_folder", [True, False])
def test_configuration_file(tmp_path: Path, by_folder: bool) -> None:
    path = write_config(tmp_path)
    loaded = load_model(f"hf:{tmp_path if by_folder else path}", num_hidden_layers=3)
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert len(loaded.model.get_submodule("model.layers")._modules) == 3
    batch = random_batch(loaded.model, batch_size=2, seq_len=8)
    output = loaded.model(**batch)
    assert output.past_key_values is None
    # cross-entropy of an untrained model over 96 tokens
    assert output.loss.item() == pytest.approx(4.56, rel=0.1)


def test_configuration_without_architecture_is_a_causal_language_model(tmp_path: Path) -> None:
    path = write_config(tmp_path, architectures=None)
    assert type(load_model(f"hf:{path}").model).__name__ == "LlamaForCausalLM"


def test_architecture_of_the_configuration_is_used(tmp_path: Path) -> None:
    path = write_config(tmp_path, architectures=["LlamaForSequenceClassification"])
    assert type(load_model(f"hf:{path}").model).__name__ == "LlamaForSequenceClassification"


def test_meta_takes_no_memory(tmp_path: Path) -> None:
    """Eight billion parameters, 32 GB in fp32, more than a test may have."""
    path = write_config(
        tmp_path,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    model = load_model(f"hf:{path}", meta=True).model
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248  # Llama 3 8B, as published
    assert random_batch(model, 1, 4)["input_ids"].device.type == "cpu"


def test_factory_on_meta() -> None:
    loaded = load_model("examples.models:nanogpt", meta=True)
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gpt2", r"this is not the name of a model\n  got: 'gpt2'"),
        (":build", "module:factory"),
        ("no_such_module:build", r"could not be imported\n  got: ModuleNotFoundError: No module named"),
        ("examples.models:no_such", r"no callable 'no_such'[\s\S]*llama_gqa"),
        ("examples.models:EXAMPLES", "no callable 'EXAMPLES'"),
        ("examples.text:standard_library", "does not return a model\n  got: it returned Corpus"),
        ("hf:no/such.json", r"no/such.json: No such file"),
    ],
)
def test_wrong_names_are_explained(spec: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_model(spec)


def test_failing_factory_is_quoted() -> None:
    with pytest.raises(ModelError, match="ValueError: an MLP has at least 2 linears, got layers=1"):
        load_model("examples.models:mlp", layers=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForNothing"]}, "has no class 'LlamaForNothing'"),
        ({"model_type": "no_such_type"}, "transformers does not know the configuration"),
        ({"num_attention_heads": 5}, "cannot be built|does not know"),
    ],
)
def test_wrong_configurations_are_explained(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_model(f"hf:{write_config(tmp_path, **changes)}")


def test_configuration_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_model(f"hf:{tmp_path}")


def test_random_batches() -> None:
    vit = load_model("examples.models:vit").model
    images = random_batch(vit, 3, 0)
    assert images["pixel_values"].shape == (3, 3, 12, 20) and images["labels"].shape == (3,)
    assert vit(**images).loss.isfinite()
    with pytest.raises(ModelError, match="max_position_embeddings = 16"):
        random_batch(load_model("examples.models:llama").model, 1, 17)
    with pytest.raises(ModelError, match="autopar cannot create a batch"):
        random_batch(torch.nn.Linear(1, 1), 1, 1)


def test_a_folder_gives_its_weights(tmp_path: Path) -> None:
    """Those that save_pretrained wrote, in fp32; on meta none, and of the configuration's file random ones."""
    torch.manual_seed(5)
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(str(write_config(tmp_path, torch_dtype="float32")))
    saved = transformers.LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path / "model")
    found = load_model(f"hf:{tmp_path / 'model'}").model
    assert found.training
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in saved.state_dict().items())
    assert next(load_model(f"hf:{tmp_path / 'model'}", meta=True).model.parameters()).is_meta
    random = load_model(f"hf:{tmp_path / 'model' / 'config.json'}").model
    assert not torch.equal(random.state_dict()["lm_head.weight"], saved.state_dict()["lm_head.weight"])
    saved.half().save_pretrained(tmp_path / "half")
    assert next(load_model(f"hf:{tmp_path / 'half'}").model.parameters()).dtype == torch.float32


def test_a_folder_with_weights_of_another_model_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(str(write_config(tmp_path)))
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    write_config(tmp_path / "model", num_hidden_layers=3)
    with pytest.raises(ModelError, match="missing or of another shape"):
        load_model(f"hf:{tmp_path / 'model'}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(f"hf:{tmp_path / 'model'}")


def test_loading_weights_leaves_torchs_devices_alone(tmp_path: Path) -> None:
    """transformers replaces torch.linspace while it loads, and torch keeps the constructors of a device's first use."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(str(write_config(tmp_path)))
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from autopar.models.loading import load_model\n"
        f"load_model('hf:{tmp_path / 'model'}')\n"
        "with torch.device('meta'):\n"
        "    print(torch.linspace(0, 1, 2).device)\n"
    )
    ended = forked.run([str(script)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert ended.stdout == "meta\n", ended.stderr
