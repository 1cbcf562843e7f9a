"""Models whose weights stay in a Hugging Face folder's files: the same values as transformers loads, in parts."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import autopar
from autopar.errors import ModelError
from autopar.launch import run_ranks
from autopar.models.lazy_weights import stored_of
from autopar.models.loading import load_model
from autopar.program import GeneratedProgram
from autopar.running.weights import ValueSource

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(**{**SIZES, **changes})
    return getattr(transformers, name)(config)


def lazily(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_model(f"hf:{folder}", lazy=True).model


def require_equal(folder: Path) -> None:
    """Every parameter and buffer has what transformers' own loading gives; no parameter is in memory."""
    found, expected = lazily(folder), load_model(f"hf:{folder}").model
    value = ValueSource(found)
    parameters = dict(found.named_parameters(remove_duplicate=False))
    assert all(each.is_meta for each in parameters.values())
    for name, tensor in expected.named_parameters(remove_duplicate=False):
        assert torch.equal(value(name), tensor) and value(name).dtype == tensor.dtype == torch.float32, name
        assert stored_of(parameters.pop(name)) is not None
    buffers = dict(found.named_buffers())
    for name, tensor in expected.named_buffers():
        assert torch.equal(buffers.pop(name), tensor), name
    assert not parameters and not buffers


@pytest.mark.parametrize(("name", "changes"), [
    ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("BertForMaskedLM", {}),
    ("ViTForImageClassification", {"image_size": 16, "patch_size": 4}),
    ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
])  # fmt: skip
def test_values_are_those_that_transformers_loads(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model_of(name, **changes).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1 or name == "ResNetForImageClassification"
    require_equal(tmp_path)


def test_names_without_the_base_models_prefix_are_found(tmp_path: Path) -> None:
    """A file of the base model's names fits the model with a head, but for what it lacks: that is an error."""
    model = model_of("LlamaForCausalLM", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    short = {name.removeprefix("model."): value for name, value in state.items()}
    assert short.keys() != state.keys()
    save_file(short, tmp_path / "model.safetensors", {"format": "pt"})
    require_equal(tmp_path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda state: state.pop("model.norm.weight"), "missing or of another shape, such as model.norm.weight"),
    (lambda state: state.update({"model.norm.weight": torch.ones(16)}), r"model.norm.weight \[16\] for \[32\]"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    model_of("LlamaForCausalLM").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        lazily(tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    model_of("LlamaForCausalLM").save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    first = tmp_path / shards["model.norm.weight"]
    first.write_bytes(first.read_bytes()[:-8])
    with pytest.raises(ModelError, match=f"{first.name} cannot be read"):
        lazily(tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="outside of its folder"):
        lazily(tmp_path)


@pytest.mark.parametrize("kind", ["experts", "untied", "bin"])
def test_what_transformers_converts_is_loaded_by_it_with_a_word(kind: str, tmp_path: Path) -> None:
    """Stacked experts, tied names with two values, other files: whole, and never wrong."""
    if kind == "experts":
        model, reason = model_of("MixtralForCausalLM", num_local_experts=4, num_key_value_heads=2), "converts model"
        model.save_pretrained(tmp_path)
    else:
        model, reason = model_of("LlamaForCausalLM", tie_word_embeddings=True), "differ in the files"
        model.save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        if kind == "untied":
            state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1
            save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        else:
            reason = "no safetensors"
            torch.save(state, tmp_path / "pytorch_model.bin")
            (tmp_path / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match=reason):
        found = load_model(f"hf:{tmp_path}", lazy=True).model
    expected = getattr(transformers, type(model).__name__).from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in expected.state_dict().items())


def compiled(model: Any, ranks: int, **constraints: Any) -> autopar.CompiledProgram:
    tokens = torch.randint(SIZES["vocab_size"], (4, 8), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "labels": tokens}
    return autopar.compile(model, f"{ranks} cpu", example_inputs=inputs, constraints=constraints)


def trained(program: GeneratedProgram) -> tuple[dict[str, Any], float, dict[str, Any]]:
    """Values as loaded (arrays), the first step's loss, values after it."""

    def values() -> dict[str, Any]:
        return {name: value.numpy() for name, value in step.full_state_dict().items()}

    step = program.build()  # type: ignore[attr-defined]
    before = values()
    tokens = torch.randint(60, (4, 8), generator=torch.Generator().manual_seed(0))
    loss = float(step(step.local_batch({"input_ids": tokens, "labels": tokens})))
    return before, loss, values()


@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [
    {"dp": 2, "zero": 3},
    pytest.param({"dp": 2, "tp": 2, "zero": 3}, marks=pytest.mark.slow),
    pytest.param({"tp": 2, "pp": 2, "micro_batches": 2, "dp": 1}, marks=pytest.mark.slow),
])  # fmt: skip
def test_ranks_read_their_own_parts(constraints: dict[str, Any], tmp_path: Path) -> None:
    """Bitwise the values, and the step, of the same plan with the model in memory; tied, and odd rows are padded."""
    changes = {"num_key_value_heads": 2, "vocab_size": 61, "tie_word_embeddings": "pp" not in constraints}
    model_of("LlamaForCausalLM", **changes).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = load_model(f"hf:{tmp_path}").model
    ranks = math.prod(constraints.get(axis, 1) for axis in ("dp", "tp", "pp"))
    wholly = run_ranks(trained, (compiled(loaded, ranks, **constraints),), ranks)[0]
    found = run_ranks(trained, (compiled(lazily(tmp_path), ranks, **constraints),), ranks)[0]
    assert found[1] == wholly[1]
    for before, after in zip(wholly[0::2], found[0::2], strict=True):
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
    assert all(np.array_equal(value.detach().numpy(), found[0][name]) for name, value in loaded.named_parameters())


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("most_bytes", [5 * 10**9, 20_000])
def test_a_program_is_saved_with_weights_that_were_never_in_memory(
    most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.running.folder.MOST_BYTES", most_bytes)
    model_of("LlamaForCausalLM").bfloat16().save_pretrained(tmp_path / "model")
    program = compiled(lazily(tmp_path / "model"), 1)
    folder = program.save(tmp_path / "program")
    files = sorted(folder.glob("weights*.safetensors"))
    assert (len(files) == 1) == (most_bytes > 20_000) == (not (folder / "weights.safetensors.index.json").exists())
    found: dict[str, torch.Tensor] = {}
    for path in files:
        found |= load_file(path)
    expected = dict(load_model(f"hf:{tmp_path / 'model'}").model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    package = program.load_package()
    runtime = __import__(f"{package.__name__}.runtime.weight_files", fromlist=["stored_weights"])
    read = runtime.stored_weights(folder)
    assert all(torch.equal(read(name), value) for name, value in expected.items())
    assert not (program.save(tmp_path / "bare", weights=False) / "weights.safetensors").exists()


def growth(program: GeneratedProgram) -> tuple[float, float]:
    """MiB of memory in files and at its peak that loading takes, over what the step has before it."""
    peaks: list[dict[str, int]] = []

    def memory() -> dict[str, int]:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return {words[0]: int(words[1]) // 1024 for words in lines if words[0] in ("VmHWM:", "VmRSS:")}

    class Watched(ValueSource):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            peaks.append(memory())

    build = __import__("autopar.running.build", fromlist=["ValueSource"])
    build.ValueSource = Watched
    step = program.build()  # type: ignore[attr-defined]
    stored = sum(bucket.master.numel() * 4 for bucket in step.buckets) / 2**20
    return stored, memory()["VmHWM:"] - peaks[0]["VmRSS:"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory peaks are Linux's")
def test_loading_takes_no_more_memory_than_a_block(tmp_path: Path) -> None:
    """An embedding of 256 MiB in the files' bf16, 512 MiB in fp32: neither is ever whole in a rank of four."""
    model_of("LlamaForCausalLM", vocab_size=4096, hidden_size=32768, num_hidden_layers=1,
             intermediate_size=8, num_attention_heads=256, num_key_value_heads=1, head_dim=2,
             tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path)  # fmt: skip
    program = compiled(lazily(tmp_path), 4, dp=4, zero=3, memory="30GiB")
    for stored, peak in run_ranks(growth, (program,), 4):
        assert stored > 128
        assert peak < 128
