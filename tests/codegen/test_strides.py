"""A program calls `view` where every layout allows it, `reshape` where a copy can happen, and nothing that fails."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from codegen.program import Call, LayerLoop, LayerRunSpec, ModuleClass, Program, Reshard, Statement, TensorType, Var
from codegen.strides import Strides, contiguous, with_strides


def var(name: str, *shape: int, dtype: str = "float32", **placements: str) -> Var:
    return Var(name, TensorType(shape, dtype, tuple(placements.items())))


def call(target: str, result: Var, *args: Any) -> Call:
    return Call(f"aten.{target}", args, (), (result,))


def view(result: Var, source: Var, target: str = "view.default") -> Call:
    return call(target, result, source, result.type.shape)


def program(
    inputs: tuple[Var, ...], body: tuple[Statement, ...], layers: tuple[ModuleClass, ...] = (), size: int = 1
) -> Program:
    root = module("Net", inputs, body, body[-1].results[:1])  # type: ignore[union-attr]
    runs = tuple(LayerRunSpec(layer.name, ("layers.0", "layers.1")) for layer in layers)
    return Program(
        name="Net", axes=("tp",), axis_sizes=(size,), precision="fp32", global_batch_size=4, num_micro_batches=1,
        inputs={}, layers=layers, root=root, runs=runs,
    )  # fmt: skip


def module(name: str, inputs: tuple[Var, ...], body: tuple[Statement, ...], outputs: tuple[Var, ...]) -> ModuleClass:
    return ModuleClass(name, "", {}, {}, inputs, body, outputs)


def targets(found: Program) -> list[str]:
    return [each.target.removeprefix("aten.") for each in found.root.body if isinstance(each, Call)]


X, MOVED, FLAT = var("x", 4, 6, 8), var("moved", 4, 8, 6), var("flat", 4, 48)


def test_a_view_of_what_is_contiguous_stays() -> None:
    assert targets(with_strides(program((X,), (view(FLAT, X),)))) == ["view.default"]
    assert targets(with_strides(program((X,), (view(FLAT, X, "_unsafe_view.default"),)))) == ["view.default"]


@pytest.mark.parametrize("target", ["view.default", "_unsafe_view.default"])
def test_a_view_across_transposed_dims_becomes_a_reshape(target: str) -> None:
    body = (call("transpose.int", MOVED, X, 1, 2), view(FLAT, MOVED, target))
    assert targets(with_strides(program((X,), body)))[1] == "reshape.default"


def test_a_copy_between_them_keeps_the_view() -> None:
    copied = var("copied", 4, 8, 6)
    copying = call("contiguous.default", copied, MOVED)
    body = (call("transpose.int", MOVED, X, 1, 2), copying, view(FLAT, copied))
    assert targets(with_strides(program((X,), body)))[2] == "view.default"


def test_a_dim_that_is_split_stays_a_view_of_transposed_dims() -> None:
    split = var("split", 4, 2, 4, 6)
    body = (call("transpose.int", MOVED, X, 1, 2), view(split, MOVED))
    assert targets(with_strides(program((X,), body)))[1] == "view.default"


@pytest.mark.parametrize(("size", "kept"), [(1, "view.default"), (2, "reshape.default")])
def test_a_reshard_returns_a_contiguous_tensor(size: int, kept: str) -> None:
    """What comes back in the order of memory after two transposes is a view, unless ranks exchange it in between."""
    before, after = var("moved", 4, 8, 6, tp="S(1)"), var("moved", 4, 8, 6, tp="S(2)")
    exchange = Reshard("tp", "all_to_all", before, (("split_dim", 2), ("concat_dim", 1)), after)
    first, back = var("x", 4, 6, 8, tp="S(2)"), var("back", 4, 6, 8, tp="S(1)")
    sizes = (4, 48 // size)
    flat = Var("flat", TensorType((4, 48), "float32", (("tp", "S(1)"),)))
    body = (
        call("transpose.int", before, first, 1, 2),
        exchange,
        call("transpose.int", back, after, 1, 2),
        Call("aten.view.default", (back, sizes), (), (flat,)),
    )
    assert targets(with_strides(program((first,), body, size=size)))[-1] == kept


def test_attention_has_the_layouts_of_all_backends() -> None:
    q = var("q", 2, 4, 8, 16)
    made, moved, rows = var("made", 2, 4, 8, 16), var("moved", 2, 8, 4, 16), var("rows", 2, 8, 64)
    attention = call("scaled_dot_product_attention.default", made, q, q, q)
    body = (attention, call("transpose.int", moved, made, 1, 2), view(rows, moved))
    found = with_strides(program((q,), body))
    assert targets(found)[-1] == "reshape.default"
    (result,) = found.root.body[0].results  # type: ignore[union-attr]
    assert result.type.strides == {(512, 128, 16, 1), (512, 16, 64, 1)}
    (result,) = found.root.body[2].results  # type: ignore[union-attr]
    assert result.type.strides == {(512, 64, 1)}


def test_calls_that_take_some_strides_only_get_contiguous_operands() -> None:
    pairs, moved, numbers = var("x", 4, 2, 8), var("moved", 4, 8, 2), var("numbers", 4, 8, dtype="complex64")
    body = (call("transpose.int", moved, pairs, 1, 2), call("view_as_complex.default", numbers, moved))
    assert targets(with_strides(program((pairs,), body)))[1:] == ["contiguous.default", "view_as_complex.default"]


def test_a_layer_is_called_with_all_layouts_that_layers_give() -> None:
    """The first layer is given a contiguous tensor, the second one what the first returned, transposed."""
    x, moved, rows, back = var("x", 4, 6, 6), var("moved", 4, 6, 6), var("rows", 24, 6), var("back", 4, 6, 6)
    body = (view(rows, x), view(back, rows), call("transpose.int", moved, back, 1, 2))
    layer = module("Block", (x,), body, (moved,))
    result = var("x", 4, 6, 6)
    loop = LayerLoop("Block", 0, 2, (x,), ((0, 0),), (result,))
    found = with_strides(program((x,), (loop,), (layer,)))
    assert found.layers[0].body[0].target == "aten.reshape.default"  # type: ignore[union-attr]
    once = with_strides(program((x,), (LayerLoop("Block", 0, 1, (x,), ((0, 0),), (result,)),), (layer,)))
    assert once.layers[0].body[0].target == "aten.view.default"  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(), (3,), (4, 1, 5), (2, 0, 3), (1, 1)])
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    wanted: Strides = torch.empty(shape).stride()
    assert contiguous(shape) == wanted or math.prod(shape) == 0
