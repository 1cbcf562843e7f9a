"""A traced Graph computes what the eager model computes: loss and every parameter gradient, in training mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph, LayerRun, Node, Ref, map_refs
from examples.models import EXAMPLES, Example
from tests.autopar.interpret import assert_equals_eager, tensors_of

# The fast tests have llama and gpt2, which these are much like.
ALIKE = ("llama_gqa", "qwen2", "opt")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in EXAMPLES]


@cache
def deep(name: str) -> Example:
    return EXAMPLES[name](layers=5)


@cache
def deep_graph(name: str, full_depth: bool = False) -> Graph:
    example = deep(name)
    return trace(example.model, example.inputs, example.loss_fn, cuts=() if full_depth else None)


def canonical(graph: Graph) -> Graph:
    """Calls numbered in order, parameters sorted: what is left must not depend on how the graph was traced."""
    renamed: dict[str, str] = {}

    def rename(ref: Ref) -> Ref:
        return Ref(renamed.get(ref.node, ref.node), ref.index)

    def node(item: Node, number: int) -> Node:
        renamed[item.name] = f"call{number}"
        return replace(
            item, name=f"call{number}", args=map_refs(item.args, rename), kwargs=map_refs(item.kwargs, rename)
        )

    body: list[Node | LayerRun] = []
    for number, piece in enumerate(graph.body):
        if isinstance(piece, Node):
            body.append(node(piece, number))
            continue
        outer, args = dict(renamed), tuple(rename(ref) for ref in piece.args)
        # Formal inputs are called after their producers, whose numbering differs with the depth.
        renamed = {name: f"in{i}" for i, (name, _) in enumerate(piece.layer.inputs)}
        inputs = tuple((f"in{i}", meta) for i, (_, meta) in enumerate(piece.layer.inputs))
        nodes = tuple(node(item, i) for i, item in enumerate(piece.layer.nodes))
        outputs = tuple(rename(ref) for ref in piece.layer.outputs)
        parameters = tuple(sorted(piece.layer.parameters, key=lambda p: p.name))
        layer = replace(piece.layer, inputs=inputs, nodes=nodes, outputs=outputs, parameters=parameters)
        renamed = outer
        body.append(replace(piece, layer=layer, args=args))
    parameters = tuple(sorted(graph.parameters, key=lambda p: p.name))
    logits = None if graph.logits is None else rename(graph.logits)
    return replace(graph, body=tuple(body), parameters=parameters, loss=rename(graph.loss), logits=logits)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_equal_eager(name: str) -> None:
    example = deep(name)
    assert example.model.training
    assert_equals_eager(deep_graph(name), example.model, example.inputs, example.loss())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_extended_trace_equals_full_trace(name: str) -> None:
    assert canonical(deep_graph(name)) == canonical(deep_graph(name, full_depth=True))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_models(name: str) -> None:
    """Every parameter and buffer once, under its first name, with its ties, shape and dtype."""
    model = deep(name).model
    found = {p.name: p for p in deep_graph(name).parameters}
    eager = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert found.keys() == eager.keys()
    for key, tensor in eager.items():
        meta = found[key].meta
        want = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        assert (meta.shape, meta.dtype, meta.requires_grad) == want
        assert found[key].is_buffer == (not isinstance(tensor, nn.Parameter))
        aliases = [n for n, t in tensors_of(model).items() if t is tensor and n != key]
        assert sorted(found[key].aliases) == sorted(aliases)
    persistent = {n for n in model.state_dict(keep_vars=True) if n in found}
    assert {n for n, p in found.items() if p.persistent} == persistent


def test_tied_weight_is_one_parameter_used_twice() -> None:
    graph = deep_graph("gpt2")
    (tied,) = [p for p in graph.parameters if p.aliases]
    assert (tied.name, tied.aliases) == ("transformer.wte.weight", ("lm_head.weight",))
    users = [piece.op for piece in graph.body if isinstance(piece, Node) and Ref(tied.name) in piece.inputs]
    assert users == ["aten.embedding.default", "aten.linear.default"]


# --- encoder-decoder ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=4, num_decoder_layers=5, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).train()
    batch = {"input_ids": torch.randint(64, (2, 8)), "labels": torch.randint(64, (2, 6))}
    return model, batch


@pytest.mark.slow
def test_t5(t5: tuple[nn.Module, dict[str, Tensor]]) -> None:
    """Two stacks, cross-attention, and a relative bias that the first block alone computes."""
    model, batch = t5
    graph = trace(model, batch)
    assert_equals_eager(graph, model, batch, model(**batch).loss)
    runs = {r.instances[0].rpartition(".")[0]: r.instances for r in graph.body if isinstance(r, LayerRun)}
    assert runs == {
        "encoder.block": tuple(f"encoder.block.{i}" for i in range(1, 4)),
        "decoder.block": tuple(f"decoder.block.{i}" for i in range(1, 5)),
    }
    assert canonical(graph) == canonical(trace(model, batch, cuts=()))


# --- the user's model is left alone ---------------------------------------------------------------------------


def test_meta_model_traces_like_a_real_one() -> None:
    real = deep_graph("llama")
    with torch.device("meta"):
        example = EXAMPLES["llama"](layers=5)
    assert all(p.is_meta for p in example.model.parameters())
    assert trace(example.model, example.inputs) == real


def test_model_is_left_as_it_was() -> None:
    example = EXAMPLES["gpt2"](layers=4, dropout=0.1)
    model = example.model.eval()
    model.config.use_cache = True
    before = copy.deepcopy(model.state_dict())
    graph = trace(model, example.inputs)
    assert not model.training and model.config.use_cache and len(model.transformer.h) == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    layer = next(piece.layer for piece in graph.body if isinstance(piece, LayerRun))
    rates = [n.args[1] for n in layer.nodes if n.op == "aten.dropout.default"]
    assert rates == [0.1, 0.1], "training mode is traced whatever mode the model is in"


def test_batch_size_and_dtype_of_the_trace() -> None:
    example = EXAMPLES["nanogpt"](layers=2)
    graph = trace(example.model, example.inputs, batch_size=2, param_dtype=torch.bfloat16)
    assert graph.batch_size == 2
    assert {i.name: i.meta.shape for i in graph.inputs} == {"tokens": (2, 16), "targets": (2, 16)}
    assert {p.meta.dtype for p in graph.parameters if not p.is_buffer} == {torch.bfloat16}
    half = copy.deepcopy(example.model).to(torch.bfloat16)
    batch = {name: value[:2] for name, value in example.inputs.items()}
    assert_equals_eager(graph, half, batch, half(**batch)[1])


# --- losses and inputs ----------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two inputs, one of them optional, and an output without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(4, 6)

    def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.first(left).relu()
        return hidden if right is None else hidden * self.second(right)


class Target(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, *tensors: Tensor) -> Tensor:
        return torch.stack([self.linear(t) for t in tensors]).sum(0)


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def weighted(output: Tensor, target: Tensor, weight: Tensor, scale: float = 2.0) -> Tensor:
    return scale * (weight * (output - target).square()).mean()


LEFT, RIGHT = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(2, -1, 12).reshape(3, 4)
WANT, WEIGHT = torch.linspace(0, 3, 18).reshape(3, 6), torch.linspace(1, 2, 18).reshape(3, 6)
LOSSES: dict[str, tuple[Callable[[], nn.Module], Any, Any, Callable[[nn.Module], Tensor]]] = {
    "tuple, loss_fn(out)": (Pair, (LEFT, RIGHT), square, lambda m: square(m(LEFT, RIGHT))),
    "tuple, loss_fn(out, target)": (Pair, (LEFT, WANT), F.mse_loss, lambda m: F.mse_loss(m(LEFT), WANT)),
    "tuple, both inputs and target": (Pair, (LEFT, RIGHT, WANT), Target(), lambda m: F.mse_loss(m(LEFT, RIGHT), WANT)),
    "tuple, two targets": (Pair, (LEFT, WANT, WEIGHT), weighted, lambda m: weighted(m(LEFT), WANT, WEIGHT)),
    "dict, loss_fn(out)": (Pair, {"left": LEFT}, square, lambda m: square(m(LEFT))),
    "dict, any order": (
        Pair,
        {"right": RIGHT, "goal": WANT, "left": LEFT},
        F.mse_loss,
        lambda m: F.mse_loss(m(LEFT, RIGHT), WANT),
    ),
    "one tensor": (Pair, LEFT, square, lambda m: square(m(LEFT))),
    "varargs": (Positional, (LEFT, RIGHT, WANT), F.mse_loss, lambda m: F.mse_loss(m(LEFT, RIGHT), WANT)),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", LOSSES)
def test_loss_functions_and_input_forms(case: str) -> None:
    make, inputs, loss_fn, eager = LOSSES[case]
    model = make()
    graph = trace(model, inputs, loss_fn)
    tensors = inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
    batch = dict(zip((i.name for i in graph.inputs), tensors, strict=True))
    assert_equals_eager(graph, model, batch, eager(model))


class Returns(nn.Module):
    """A model that computes its own loss and returns it in the given form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        output = self.linear(x)
        return self.form(output.square().mean(), output)


@pytest.mark.parametrize(
    "form",
    [lambda s, o: s, lambda s, o: (o, s), lambda s, o: [s, o], lambda s, o: {"logits": o, "loss": s}],
    ids=["scalar", "tuple", "list", "dict"],
)
def test_models_that_return_their_loss(form: Callable[[Tensor, Tensor], Any]) -> None:
    model = Returns(form)
    assert_equals_eager(trace(model, (LEFT,)), model, {"x": LEFT}, model.linear(LEFT).square().mean())


def test_no_scalar_loss_is_an_error() -> None:
    with pytest.raises(TraceError, match="no scalar loss") as caught:
        trace(Returns(lambda s, o: o), (LEFT,))
    assert "loss_fn=" in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "loss_fn", "message"),
    [
        ((LEFT,), F.mse_loss, "too few items"),
        ((LEFT, RIGHT, WANT), None, "more items than the model takes"),
        ({"left": torch.tensor(1.0)}, square, "no tensor with a batch dim"),
    ],
)
def test_wrong_inputs_are_errors(inputs: Any, loss_fn: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(Pair(), inputs, loss_fn)


# --- what cannot be traced ------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3 * grads[0]


class UsesDouble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Double.apply(self.linear(x))
        return doubled.mean()


def test_custom_function_is_one_call_and_still_works_after() -> None:
    model = UsesDouble()
    assert [node.op for node in trace(model, (LEFT,)).body if isinstance(node, Node)] == [
        "aten.linear.default",
        "autograd_function.Double.default",
        "aten.mean.default",
    ]
    model(LEFT).backward()
    assert model.linear.bias.grad is not None
    torch.testing.assert_close(model.linear.bias.grad, torch.full((6,), 3 / 6))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).mean()
        if loss > 0:  # the line that the error must name
            loss = -loss
        return loss


def test_branch_on_data_names_the_users_line() -> None:
    code = Branches.forward.__code__
    with pytest.raises(TraceError) as caught:
        trace(Branches(), (LEFT,))
    assert f"{code.co_filename}:{code.co_firstlineno + 2}: if loss > 0:" in str(caught.value)


def test_branch_on_data_below_a_module_call() -> None:
    """The innermost user line is named, not the call above it."""
    code = Branches.forward.__code__
    with pytest.raises(TraceError) as caught:
        trace(nn.Sequential(nn.Identity(), Branches()), (LEFT,))
    assert f"{code.co_filename}:{code.co_firstlineno + 2}:" in str(caught.value)


class Autocasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x).float().mean()


def test_autocast_inside_forward_is_refused() -> None:
    with pytest.raises(TraceError, match="autocast"):
        trace(Autocasts(), (LEFT,))


def test_a_product_of_different_dtypes_is_refused_in_full_precision() -> None:
    with pytest.raises(TraceError, match="dtype"):
        trace(nn.Linear(8, 1), {"input": torch.ones(4, 8, dtype=torch.float64)}, lambda output: output.sum())
