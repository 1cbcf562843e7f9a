"""Every example model is what it says: sizes, loss, gradients, dropout, seeds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from examples.models import EXAMPLES, IGNORED_LABEL, Example, llama_gqa, mlp, nanogpt, transformer_encoder

NAMES = sorted(EXAMPLES)
TIED = {"gpt2": "lm_head", "opt": "lm_head", "qwen2": "lm_head", "qwen3": "lm_head", "t5": "lm_head", "nanogpt": "head"}
W, V, S = 32, 96, 16  # width, vocabulary, sequence of every default

NORM, LINEAR_W = 2 * W, W * W + W  # LayerNorm; a linear W -> W with bias
GPT_BLOCK = 2 * NORM + (3 * W * W + 3 * W) + LINEAR_W + (4 * W * W + 4 * W) + (4 * W * W + W)
LLAMA_BLOCK = 2 * W + 4 * W * W + 3 * (W * 2 * W)
# Parameters per block and outside the blocks, from the papers' shapes; tied matrices count once.
EXPECTED_COUNTS = {
    "gpt2": (GPT_BLOCK, V * W + S * W + NORM),
    "opt": (GPT_BLOCK, V * W + (S + 4) * W + NORM),
    "llama": (LLAMA_BLOCK, 2 * V * W + W),
    "llama_gqa": (LLAMA_BLOCK - 2 * (W * W // 2), 2 * V * W + W),
    "qwen2": (LLAMA_BLOCK + 3 * W, V * W + W),
    "qwen3": (LLAMA_BLOCK + 2 * (W // 4), V * W + W),
    "mixtral": (LLAMA_BLOCK + 3 * 3 * (W * 2 * W) + 4 * W, 2 * V * W + W),
    "bert": (GPT_BLOCK, V * W + S * W + 2 * W + NORM + (LINEAR_W + NORM + V)),
    # An encoder block and a decoder block, without biases; 8 buckets of 4 heads on both sides.
    "t5": (12 * W * W + 2 * W + 16 * W * W + 3 * W, V * W + 2 * W + 2 * 8 * 4),
    "vit": (GPT_BLOCK, (3 * 4 * 4 * W + W) + W + S * W + NORM + (W * 12 + 12)),
    "nanogpt": (GPT_BLOCK, V * W + S * W + NORM),
    "transformer_encoder": (GPT_BLOCK, V * W + (W * 12 + 12)),
    "mlp": (LINEAR_W, (16 * W + W) + (W * 8 + 8) - 2 * LINEAR_W),
}


class Dropouts(TorchFunctionMode):
    """Records the probability of every dropout that runs, attention's included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[float] = set()
        self.attention: set[float] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            self.seen.add(float(kwargs.get("p", args[1] if len(args) > 1 else 0.5)))
        if func is F.scaled_dot_product_attention:
            self.attention.add(float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)))
        if func is F.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            self.attention.add(float(bound.arguments["dropout_p"]))
        return func(*args, **kwargs)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [2, 3])
def test_parameter_count_is_the_architectures(name: str, layers: int) -> None:
    per_block, outside = EXPECTED_COUNTS[name]
    assert num_parameters(EXAMPLES[name](layers=layers).model) == layers * per_block + outside


@pytest.mark.parametrize("name", NAMES)
def test_untrained_loss_is_chance_and_every_parameter_has_a_gradient(name: str) -> None:
    example = EXAMPLES[name]()
    loss = example.loss()
    num_classes = {"vit": 12, "transformer_encoder": 12, "mlp": None}.get(name, V)
    if num_classes is not None:
        assert loss.item() == pytest.approx(math.log(num_classes), rel=0.1)
    loss.backward()
    for parameter_name, parameter in example.model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), parameter_name
    assert sum(float(p.grad.abs().sum()) for p in example.model.parameters() if p.grad is not None) > 0


@pytest.mark.parametrize("name", sorted({*NAMES} - {"mixtral"}))  # whose loss jumps where a token changes its expert
def test_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """Central difference along the gradient's direction, against the gradient's norm."""
    example = EXAMPLES[name]()
    example.model.double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in example.inputs.items()}
    example = Example(example.model, inputs, example.loss_fn)
    example.loss().backward()
    parameters = [p for p in example.model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters if p.grad is not None))
    losses = {}
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            for parameter in parameters:
                assert parameter.grad is not None
                parameter += step * parameter.grad / norm
            losses[step] = float(example.loss())
            for parameter in parameters:
                assert parameter.grad is not None
                parameter -= step * parameter.grad / norm
    assert (losses[1e-3] - losses[-1e-3]) / 2e-3 == pytest.approx(norm, rel=5e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_dropout_reaches_every_dropout(name: str, dropout: float) -> None:
    with Dropouts() as found:
        EXAMPLES[name](dropout=dropout).loss()
    assert found.seen <= {dropout}
    if name == "mlp":
        assert found.seen == {dropout} and not found.attention
    else:
        assert found.attention == {dropout}


@pytest.mark.parametrize("name", NAMES)
def test_dropout_off_means_the_loss_is_a_function_of_the_seed(name: str) -> None:
    torch.manual_seed(1)
    first = EXAMPLES[name]()
    loss = first.loss()
    torch.manual_seed(2)
    second = EXAMPLES[name]()
    assert torch.equal(loss, second.loss()) and torch.equal(loss, first.loss())
    for name_a, value in first.inputs.items():
        assert torch.equal(value, second.inputs[name_a])
    assert not torch.equal(loss, EXAMPLES[name](seed=5).loss())
    noisy = EXAMPLES[name](dropout=0.5)
    assert not torch.equal(noisy.loss(), noisy.loss())


@pytest.mark.parametrize("name", NAMES)
def test_sizes_divide_by_four(name: str) -> None:
    example = EXAMPLES[name]()
    sizes = [size for value in example.inputs.values() for size in value.shape if size != 3]
    assert all(size % 4 == 0 for size in sizes), sizes
    odd = [name for name, p in example.model.named_parameters() if any(s % 4 for s in p.shape if s not in (1, 3))]
    assert odd == (["bert.embeddings.token_type_embeddings.weight"] if name == "bert" else [])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mlp", "vit")])
def test_halves_of_the_batch_hold_unequal_numbers_of_labels(name: str) -> None:
    """Else an average of averages would be as good as the mean, and tests would miss the difference."""
    labels = list(EXAMPLES[name]().inputs.values())[-1]
    counts = [int((half != IGNORED_LABEL).sum()) for half in labels.chunk(2)]
    assert 0 < counts[0] != counts[1] > 0


@pytest.mark.parametrize("name", sorted(TIED))
def test_output_matrix_is_the_embedding(name: str) -> None:
    model: Any = EXAMPLES[name]().model
    embedding = model.token_embedding if name == "nanogpt" else model.get_input_embeddings()
    assert model.get_submodule(TIED[name]).weight is embedding.weight


def test_llama_is_not_tied_and_groups_heads() -> None:
    model: Any = llama_gqa().model
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    assert llama_gqa(num_kv_heads=4).model.get_parameter("model.layers.0.self_attn.k_proj.weight").shape == (32, 32)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("mlp", "nanogpt", "transformer_encoder")])
def test_hugging_face_models_use_sdpa_and_no_cache(name: str) -> None:
    config = EXAMPLES[name]().model.config
    assert config._attn_implementation == "sdpa"
    assert not getattr(config, "use_cache", False)


def test_bert_pads_and_labels_only_real_positions() -> None:
    inputs = EXAMPLES["bert"]().inputs
    padding = inputs["attention_mask"] == 0
    assert padding.any() and not padding.all(dim=1).any()
    assert bool((inputs["labels"][padding] == IGNORED_LABEL).all())


def test_nanogpt_equals_gpt2_with_its_weights() -> None:
    """The hand-written model against transformers' GPT-2, to which it is the same function up to the GELU's form."""
    ours, theirs = nanogpt().model.double(), EXAMPLES["gpt2"](activation_function="gelu").model.double()
    names = {
        "transformer.wte": "token_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.ln_f": "final_norm",
        "transformer.h": "blocks",
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.proj",
        "ln_2": "feed_forward_norm",
        "mlp.c_fc": "feed_forward.up",
        "mlp.c_proj": "feed_forward.proj",
        "lm_head": "head",
    }
    state = {}
    for name, value in theirs.state_dict().items():
        transposed = value.dim() == 2 and ".c_" in name  # GPT-2 keeps these as [in, out]
        for old, new in names.items():
            name = name.replace(old, new)
        state[name] = value.T if transposed else value
    ours.load_state_dict(state)
    tokens = torch.randint(V, (3, S))
    labels = torch.where(torch.rand(3, S) < 0.3, IGNORED_LABEL, tokens)
    targets = torch.cat([labels[:, 1:], torch.full((3, 1), IGNORED_LABEL)], dim=1)
    logits, loss = ours(tokens, targets)
    reference: Any = theirs(input_ids=tokens, labels=labels)
    torch.testing.assert_close(logits, reference.logits, rtol=1e-10, atol=1e-12)
    # transformers computes the loss of any dtype in fp32
    torch.testing.assert_close(loss, reference.loss.double(), rtol=1e-6, atol=0)


def test_nanogpt_without_targets_gives_logits_only() -> None:
    tokens = nanogpt().inputs["tokens"]
    logits, loss = nanogpt().model(tokens)
    assert logits.shape == (8, S, V) and loss is None


@pytest.mark.parametrize("factory", [mlp, transformer_encoder])
def test_separate_loss_takes_the_output_and_the_last_input(factory: Callable[..., Example]) -> None:
    example = factory()
    *model_inputs, target = example.inputs.values()
    assert example.loss_fn is not None
    output = example.model(*model_inputs)
    if factory is mlp:
        expected = ((output - target) ** 2).mean()
    else:
        log_probabilities = output.log_softmax(-1)[target != IGNORED_LABEL]
        picked = log_probabilities.gather(1, target[target != IGNORED_LABEL][:, None])
        expected = -picked.mean()
    torch.testing.assert_close(example.loss_fn(output, target), expected)


def test_sizes_can_be_chosen() -> None:
    example = EXAMPLES["llama"](
        layers=1, width=64, num_heads=8, num_kv_heads=4, vocab_size=256, seq_len=32, batch_size=2, ffn_width=160
    )
    model = example.model
    assert model.get_parameter("model.layers.0.mlp.up_proj.weight").shape == (160, 64)
    assert model.get_parameter("lm_head.weight").shape == (256, 64)
    assert example.inputs["input_ids"].shape == (2, 32)
