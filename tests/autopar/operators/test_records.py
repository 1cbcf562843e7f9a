"""The traits of every record are what torch's schemas, tags and kernels say."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from autopar.operators import traits
from autopar.operators.record import Creation, Layout, Operator
from autopar.operators.records import RECORDS
from autopar.operators.schemas import argument_names, is_seeded
from autopar.rules.registry import builtin_table

OWN = {"update_buffer", "draw", "expert_linear", "sink_attention", "window_attention", "grouped_mm"}
"""Operators of autopar, and one of which torch has no public form."""
SEEDED_IN_PARTS = traits.RECURRENT
"""Operators that draw between their layers."""


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """Return torch's overloads of a base name: of the plain form, and of the private one where there is no other."""
    forms = (name, f"_{name}", f"__{name}__")
    packet = next(getattr(torch.ops.aten, form) for form in forms if hasattr(torch.ops.aten, form))
    every = [getattr(packet, overload) for overload in packet.overloads()]
    return [op for op in every if not op._schema.is_mutable and "out" not in argument_names(op)]


def aliases(op: torch._ops.OpOverload) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in op._schema.returns)


TORCH = sorted(RECORDS.keys() - OWN)


@pytest.mark.parametrize("name", TORCH)
def test_the_operator_is_torchs(name: str) -> None:
    assert overloads(name)


@pytest.mark.parametrize("name", TORCH)
def test_views_are_those_that_torch_says_share_memory(name: str) -> None:
    """`contiguous` and `to` share memory only where they have nothing to do."""
    shares = any(aliases(op) for op in overloads(name))
    assert shares == (RECORDS[name].is_view or name in ("contiguous", "to"))


@pytest.mark.parametrize("name", TORCH)
def test_drawn_operators_are_those_that_torch_seeds(name: str) -> None:
    """Attention has the tag of its dropout on the operators that it calls; recurrent layers call dropout."""
    seeded = any(map(is_seeded, overloads(name)))
    assert seeded <= (RECORDS[name].is_drawn or name in SEEDED_IN_PARTS)
    assert not RECORDS[name].is_drawn or seeded


@pytest.mark.parametrize("name", [name for name in TORCH if name in traits.SIZES])
def test_the_argument_of_sizes_is_the_schemas(name: str) -> None:
    record = RECORDS[name]
    wanted = record.shape or record.sizes
    assert any(wanted in argument_names(op) for op in overloads(name))


@pytest.mark.parametrize("name", [name for name in TORCH if name in traits.ADDED])
def test_the_argument_that_a_product_adds_is_the_schemas(name: str) -> None:
    assert all(RECORDS[name].added in argument_names(op) for op in overloads(name))


COMPLEX = {"conj", "imag", "real", "view_as_complex", "view_as_real"}
"""Views of other numbers than the operand's."""


def test_every_operator_with_a_rule_that_shares_memory_is_a_view() -> None:
    names = {packet.removeprefix("aten.").removeprefix("_") for packet in builtin_table() if "aten." in packet}
    plain = {name for name in names if hasattr(torch.ops.aten, name) and any(map(aliases, overloads(name)))}
    # `unfold` shows elements several times; the others return the operand itself where they have nothing to do.
    assert plain - traits.VIEWS == COMPLEX | {"unfold", "contiguous", "to", "positive"}


def arguments(record: Operator) -> list[tuple[object, ...]]:
    """Return arguments behind a tensor [2, 3] for operators that move its elements."""
    shapes: dict[str, tuple[object, ...]] = {
        "to": (torch.float64,),
        "view": ([3, 2],),
        "reshape": ([3, 2],),
        "unsafe_view": ([3, 2],),
        "unflatten": (1, [3, 1]),
        "unsqueeze": (0,),
        "view_as": (torch.zeros(3, 2),),
        "transpose": (0, 1),
        "permute": ([1, 0],),
        "swapaxes": (0, 1),
        "swapdims": (0, 1),
        "movedim": (0, 1),
        "slice": (1, 0, 2),
        "select": (1, 0),
        "narrow": (1, 0, 2),
        "split": (1, 1),
        "split_with_sizes": ([1, 2], 1),
        "unsafe_split": (1, 1),
        "chunk": (3, 1),
        "expand": ([4, 2, 3],),
        "expand_as": (torch.zeros(4, 2, 3),),
        "broadcast_to": ([4, 2, 3],),
        "repeat": ([4, 1],),
        "repeat_interleave": (2, 1),
    }
    return [shapes.get(record.name, ())]


@pytest.mark.parametrize("name", sorted(traits.MOVING))
def test_a_layout_is_where_the_elements_go(name: str) -> None:
    """Elements that are all different tell where each of them went."""
    x = torch.arange(6.0).reshape(2, 3)
    record = RECORDS[name]
    forms = (name, f"_{name}")
    packet = next(getattr(torch.ops.aten, form) for form in forms if hasattr(torch.ops.aten, form))
    operand: object = [x, x + 6] if record.layout is Layout.JOINED else x
    result = packet(operand, *arguments(record)[0])
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    order = torch.cat([part.reshape(-1) for part in results]).tolist()
    whole = x.reshape(-1).tolist()
    if record.is_view:
        assert {part.untyped_storage().data_ptr() for part in results} == {x.untyped_storage().data_ptr()}
    match record.layout:
        case Layout.SAME:
            assert results[0].tolist() == x.tolist()
        case Layout.RESHAPED:
            assert order == whole
        case Layout.PERMUTED:
            assert order != whole and sorted(order) == whole
        case Layout.PART:
            assert set(order) <= set(whole) and max(part.numel() for part in results) < x.numel()
        case Layout.REPEATED:
            assert len(order) > len(whole) and set(order) == set(whole)
        case Layout.JOINED:
            assert sorted(order) == list(map(float, range(12)))


@pytest.mark.parametrize("name", sorted(traits.FINITE_EVERYWHERE))
def test_smooth_operators_are_pointwise_and_finite(name: str) -> None:
    """Their value at one element is that of the whole tensor there, from large negative to large positive numbers."""
    assert any(torch.Tag.pointwise in op.tags for op in overloads(name))
    x = torch.tensor([-1e4, -1.0, 0.0, 1.0, 1e4], dtype=torch.float64, requires_grad=True)
    packet = getattr(torch.ops.aten, name)
    pairs = dict.fromkeys(("add", "sub", "rsub", "mul"), (x, x))
    operands = pairs | {"where": (x > 0, x, x), "masked_fill": (x, x > 0, 0.0)}
    value = packet(*operands.get(name, (x,)))
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert value.isfinite().all() and slope.isfinite().all()


@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if record.creation and name not in OWN])
def test_created_tensors_have_their_shape_from_sizes_or_an_operand(name: str) -> None:
    creation = RECORDS[name].creation
    for op in overloads(name):
        has_operand = argument_names(op)[:1] == ("self",)
        assert has_operand == (creation is not Creation.SIZES)
    assert (creation is Creation.LIKE) == name.endswith("_like")


@pytest.mark.parametrize("name", sorted(traits.ELEMENT_LOSSES | traits.CLASS_LOSSES))
def test_losses_have_a_reduction(name: str) -> None:
    assert all("reduction" in argument_names(op) for op in overloads(name))


def test_products_have_the_flops_that_torch_counts() -> None:
    counted = {str(packet).removeprefix("aten.").removeprefix("_") for packet in flop_registry}
    assert counted & RECORDS.keys() == {"mm", "addmm", "bmm", "baddbmm", "convolution"}
    assert counted & RECORDS.keys() <= traits.MATMULS


@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if record.fill is not None])
def test_a_created_tensor_is_filled(name: str) -> None:
    record, x = RECORDS[name], torch.tensor([5.0, 6.0])
    operands = {Creation.SIZES: ([2],), Creation.NEW: (x, [2]), Creation.LIKE: (x,)}[record.creation or Creation.SIZES]
    operands = () if name == "scalar_tensor" else operands
    number = 3.0 if isinstance(record.fill, str) else record.fill
    result = getattr(torch.ops.aten, name)(*operands, *((3.0,) if isinstance(record.fill, str) else ()))
    assert (result == number).all()
    assert not isinstance(record.fill, str) or all(record.fill in argument_names(op) for op in overloads(name))


def test_constants_have_no_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not x.detach().requires_grad
    assert {"detach", "update_buffer"} == {name for name, record in RECORDS.items() if record.is_constant}
