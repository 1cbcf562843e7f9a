"""Products in chunks beside their collectives: the numbers of the whole model's products, both ways of running them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from codegen.runtime import async_tp, symmetric_memory
from codegen.runtime.mesh import Axis, Mesh
from tests.codegen.runtime.ranks import run_ranks
from tests.codegen.runtime.symmetric_on_cpu import GATHER, KINDS, SCATTER, Emulation

WIDTH, WIDTHS = 8, (6, 3, 5)
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative, in norm; rounding of one bf16 number is off by 2 ** -9."""


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Case:
    """A layer or several, and what they are given. shape: of the whole x but for its features, which is cut on `dim`.

    call: on a rank, from (its x, its weights, its biases, axis). num_layers: 0 stands for a row-parallel layer.
    """

    name: str
    call: Callable[..., tuple[Tensor, ...]]
    shape: tuple[int, ...]
    dim: int
    num_layers: int = 1
    has_bias: bool = True
    is_addmm: bool = False
    frozen: tuple[str, ...] = ()
    unread: tuple[int, ...] = ()

    def weights(self, rank: int, size: int, dtype: torch.dtype) -> list[Tensor]:
        """[out, in], or [in, out] for torch.addmm: one rank's."""
        if self.num_layers == 0:
            found = [values(50 + rank, WIDTHS[0], WIDTH // size, dtype=dtype)]
        else:
            found = [values(60 + 10 * rank + i, WIDTHS[i], WIDTH, dtype=dtype) for i in range(self.num_layers)]
        return [weight.t().contiguous() if self.is_addmm else weight for weight in found]

    def biases(self, rank: int, dtype: torch.dtype) -> list[Tensor | None]:
        """One rank's; the second of several layers has none. A row-parallel layer's is replicated."""
        if not self.has_bias:
            return [None] * max(1, self.num_layers)
        seed = 30 if self.num_layers == 0 else 30 + 10 * rank
        count = max(1, self.num_layers)
        return [None if i == 1 else values(seed + i, WIDTHS[i], dtype=dtype) for i in range(count)]


def gathered(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], axis: Axis, dim: int) -> tuple[Tensor, ...]:
    return async_tp.all_gather_linears(x, weights, biases, axis=axis, dim=dim)


def gathered_one(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], axis: Axis, dim: int
) -> tuple[Tensor, ...]:
    return (async_tp.all_gather_linear(x, weights[0], biases[0], axis=axis, dim=dim),)


def gathered_rows(x: Tensor, weights: list[Tensor], biases: list[Tensor], axis: Axis, dim: int) -> tuple[Tensor, ...]:
    rows = async_tp.all_gather_addmm(biases[0], x, weights[0], axis=axis, dim=dim)
    return (rows.view(*x.shape[:dim], x.shape[dim] * axis.size, *x.shape[dim + 1 : -1], -1),)


def scattered(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], axis: Axis, dim: int
) -> tuple[Tensor, ...]:
    return (async_tp.linear_reduce_scatter(x, weights[0], biases[0], axis=axis, dim=dim),)


def scattered_rows(x: Tensor, weights: list[Tensor], biases: list[Tensor], axis: Axis, dim: int) -> tuple[Tensor, ...]:
    rows, shape = x.flatten(0, -2), (*x.shape[:-1], weights[0].shape[1])
    return (async_tp.addmm_reduce_scatter(biases[0], rows, weights[0], shape=shape, axis=axis, dim=dim),)


CASES = (
    Case("layers along the sequence", gathered, (3, 8), 1, num_layers=3),
    Case("layers along the batch", gathered, (4, 3), 0, num_layers=2),
    Case("one row of the batch", gathered_one, (1, 8), 1, has_bias=False),
    Case("a matrix", gathered_one, (8,), 0),
    Case("more dims", gathered, (2, 4, 3), 1, num_layers=2),
    Case("addmm", gathered_rows, (3, 8), 1, is_addmm=True),
    Case("frozen and unread", gathered, (3, 8), 1, num_layers=3, frozen=("weight 0", "bias 0"), unread=(1,)),
    Case("x frozen", gathered, (3, 8), 1, num_layers=2, frozen=("x",)),
    Case("partial sum along the sequence", scattered, (3, 8), 1, num_layers=0),
    Case("partial sum along the batch", scattered, (4, 3), 0, num_layers=0, has_bias=False),
    Case("partial sums of a matrix", scattered, (8,), 0, num_layers=0),
    Case("partial sum of addmm", scattered_rows, (3, 8), 1, num_layers=0, is_addmm=True),
    Case("partial sum, x frozen", scattered, (3, 8), 1, num_layers=0, frozen=("x",)),
)


def named(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> dict[str, Tensor]:
    """Leaves by name."""
    pairs = {"x": x, **{f"weight {i}": w for i, w in enumerate(weights)}}
    return pairs | {f"bias {i}": b for i, b in enumerate(biases) if b is not None}


def parts_of(case: Case, axis: Axis, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """x, weights and biases of a rank, as leaves."""
    cut = case.dim if case.num_layers else -1
    x = values(1, *case.shape, WIDTH, dtype=dtype).chunk(axis.size, cut)[axis.rank].clone()
    weights, biases = case.weights(axis.rank, axis.size, dtype), case.biases(axis.rank, dtype)
    for name, leaf in named(x, weights, biases).items():
        leaf.requires_grad_(name not in case.frozen)
    return x, weights, biases


def on_rank(case: Case, axis: Axis, dtype: torch.dtype, wrapped: bool = False) -> dict[str, Tensor]:
    """Results and gradients of this rank, by name; of what is read."""
    x, weights, biases = parts_of(case, axis, dtype)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return case.call(x, weights, biases, axis, case.dim)

    # Not a leaf, as in a model, where there is a gradient.
    results = checkpoint(run, x * 1, use_reentrant=False) if wrapped else run(x * 1)
    read = {i: result for i, result in enumerate(results) if i not in case.unread}
    torch.autograd.backward(list(read.values()), [part_of_grad(case, i, axis, dtype) for i in read])
    found = {f"result {i}": result.detach() for i, result in enumerate(results)}
    assert all(result.is_contiguous() for result in results)
    leaves = named(x, weights, biases)
    return found | {f"grad of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def part_of_grad(case: Case, index: int, axis: Axis, dtype: torch.dtype) -> Tensor:
    """What arrives in backward on a rank: a gradient of its own, or its part of the one of a row-parallel layer."""
    seed = 90 + 10 * axis.rank + index if case.num_layers else 90
    whole = values(seed, *case.shape, WIDTHS[index], dtype=torch.bfloat16).to(dtype)
    return whole if case.num_layers else whole.chunk(axis.size, case.dim)[axis.rank].contiguous()


def wanted_on(case: Case, rank: int, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same from whole tensors in fp64, without ranks."""
    x = values(1, *case.shape, WIDTH, dtype=dtype).double()
    weights = [[weight.double() for weight in case.weights(r, size, dtype)] for r in range(size)]
    biases = [[None if bias is None else bias.double() for bias in case.biases(r, dtype)] for r in range(size)]
    if not case.num_layers:
        biases = [biases[0]] * size
    leaves = [named(x, weights[r], biases[r]) for r in range(size)]
    for name, leaf in (pair for own in leaves for pair in own.items()):
        leaf.requires_grad_(name not in case.frozen)
    matrices = [[weight.t() if case.is_addmm else weight for weight in own] for own in weights]
    if case.num_layers:
        pairs = [zip(matrices[r], biases[r], strict=True) for r in range(size)]
        results = [[F.linear(x, weight, bias) for weight, bias in own] for own in pairs]
        cut = case.dim
    else:
        whole = F.linear(x, torch.cat([own[0] for own in matrices], 1), biases[0][0])
        results, cut = [[part] for part in whole.chunk(size, case.dim)], -1
    products = [
        (result * part_of_grad(case, i, Axis("tp", size, r), torch.float64)).sum()
        for r, own in enumerate(results)
        for i, result in enumerate(own)
        if i not in case.unread
    ]
    torch.stack(products).sum().backward()
    found = {f"result {i}": result.detach() for i, result in enumerate(results[rank])}
    found |= {f"grad of {name}": leaf.grad for name, leaf in leaves[rank].items() if leaf.grad is not None}
    return found | ({"grad of x": x.grad.chunk(size, cut)[rank]} if x.grad is not None else {})


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype, label: str) -> None:
    assert found.keys() == wanted.keys(), label
    for name, value in wanted.items():
        assert found[name].shape == value.shape and found[name].dtype == dtype, f"{label}: {name}"
        error = (found[name].double() - value).norm() / value.norm()
        assert error < TOLERANCE[dtype], f"{label}: {name} is off by {error:.1e}"


def compare(rank: int, size: int, kind: str) -> int:
    """Every case, plain and beside its transfers; returns how many there were."""
    plain, count = Mesh.create(("tp",), (size,)).tp, 0
    emulation = Emulation(kind)
    shared = emulation.shared(plain)
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            wanted, label = wanted_on(case, rank, size, dtype), f"{case.name}, {dtype}"
            before = dict(emulation.calls)
            assert_close(on_rank(case, plain, dtype), wanted, dtype, f"{label}, plain")
            assert emulation.calls == before
            assert_close(on_rank(case, shared, dtype), wanted, dtype, label)
            forward, backward = (GATHER, SCATTER) if case.num_layers else (SCATTER, GATHER)
            needs_x = "x" not in case.frozen
            assert emulation.calls[forward] == before[forward] + 1, label
            assert emulation.calls[backward] == before[backward] + needs_x, label
            count += 1
        assert_close(on_rank(case, shared, torch.float32, True), wanted_on(case, rank, size, torch.float32),
                     torch.float32, f"{case.name}, recomputed")  # fmt: skip
    return count


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "kind"),
    [(2, "reference"), (2, "decomposed"), *(pytest.param(4, kind, marks=pytest.mark.slow) for kind in KINDS)],
)
def test_the_same_as_whole_products(size: int, kind: str) -> None:
    assert kind in KINDS
    assert run_ranks(compare, size, kind) == [2 * len(CASES)] * size


def saved_by(case: Case, axis: Axis) -> list[int]:
    """Bytes of each storage that is kept for backward."""
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x, weights, biases = parts_of(case, axis, torch.float32)
    with saved_tensors_hooks(note, lambda x: x):
        results = case.call(x * 1, weights, biases, axis, case.dim)
    assert all(result.requires_grad for result in results)
    return sorted(storages.values())


def kept(rank: int, size: int) -> list[tuple[list[int], list[int]]]:
    plain = Mesh.create(("tp",), (size,)).tp
    shared = Emulation("decomposed").shared(plain)
    return [(saved_by(case, plain), saved_by(case, shared)) for case in CASES if not case.frozen]


@pytest.mark.distributed
def test_both_ways_keep_the_same_bytes() -> None:
    for found in run_ranks(kept, 2):
        for plain, shared in found:
            assert plain == shared and plain


def odd_operands(rank: int, size: int) -> tuple[int, int]:
    """What the operators would not take runs plainly; a length that does not divide is refused as by the reshard."""
    plain = Mesh.create(("tp",), (size,)).tp
    emulation = Emulation("decomposed")
    shared = emulation.shared(plain)
    x, weight = values(1, 2, 4, 6), values(2, 3, 6)
    wide = [async_tp.all_gather_linear(x.double(), weight.double(), axis=axis, dim=1) for axis in (plain, shared)]
    assert torch.equal(*wide)
    with pytest.raises(ValueError, match="is not 1 sections over 2 ranks"):
        async_tp.linear_reduce_scatter(values(1, 2, 3, 6), weight, axis=shared, dim=1)
    strided = values(3, 4, 2, 12).transpose(0, 1)[..., ::2]
    outcome = [async_tp.all_gather_linear(strided, weight, axis=axis, dim=1) for axis in (plain, shared)]
    torch.testing.assert_close(*outcome)
    return emulation.calls[GATHER], emulation.calls[SCATTER]


@pytest.mark.distributed
def test_operands_that_do_not_suit() -> None:
    assert run_ranks(odd_operands, 2) == [(1, 0)] * 2


# --- whether ranks share memory ---------------------------------------------------------------------------------------


def answers(rank: int, size: int) -> dict[str, bool]:
    """What `usable` says where probes answer differently on this rank or on the others."""
    mesh = Mesh.create(("tp",), (size,))
    axis = mesh.tp

    def failing(axis: Axis, device: torch.device) -> bool:
        raise RuntimeError("not here")

    def fine(axis: Axis, device: torch.device) -> bool:
        return True

    def with_probes(**probes: Callable[..., bool]) -> bool:
        with ExitStack() as stack:
            for name in ("_has_operators", "_reaches_peers", "_has_workspace", "_multiplies"):
                stack.enter_context(patch.object(symmetric_memory, name, probes.get(name, fine)))
            return symmetric_memory.usable(axis, CPU)

    found = {"on a cpu": symmetric_memory.usable(axis, CPU), "all fine": with_probes()}
    found["one raises"] = with_probes(_has_workspace=failing if rank == 1 else fine)
    found["one says no"] = with_probes(_reaches_peers=lambda axis, device: rank != 0)
    entered: list[int] = []
    found["none goes on"] = with_probes(
        _reaches_peers=failing if rank == 1 else fine,
        _has_workspace=lambda axis, device: bool(entered.append(1)) or True,
    ) or bool(entered)
    for name, nodes, devices in (
        ("own GPUs", (7, 7), (0, 1)), ("one GPU", (7, 7), (0, 0)), ("two nodes", (7, 8), (0, 1)),
    ):  # fmt: skip
        with (
            patch.object(symmetric_memory, "_node", lambda nodes=nodes: nodes[rank]),
            patch("torch.cuda.current_device", lambda devices=devices: devices[rank]),
            patch("torch.cuda.can_device_access_peer", lambda own, peer: own == rank and peer == 1 - rank),
        ):
            found[name] = symmetric_memory._reaches_peers(axis, CPU)
    Emulation("decomposed")
    found["right numbers"] = symmetric_memory._multiplies(axis, CPU)

    def leave_zeros(_: Any, output: Tensor, *rest: Any) -> None:  # not memory that may hold the last, right result
        output.zero_()

    with patch.object(torch.distributed._symmetric_memory, "_pipelined_produce_and_all2all", leave_zeros):
        found["wrong numbers"] = symmetric_memory._multiplies(axis, CPU)
    with patch.object(symmetric_memory, "usable", fine):
        symmetric_memory.set_up(mesh, "tp")
    found["set up"] = mesh.tp.symmetric == mesh.axes[0].symmetric == axis.group.group_name != ""
    found["still the same axis"] = mesh.tp == axis and mesh.tp.unfinished is axis.unfinished
    return found


@pytest.mark.distributed
def test_all_ranks_have_one_answer() -> None:
    yes = {"all fine", "own GPUs", "right numbers", "set up", "still the same axis"}
    for found in run_ranks(answers, 2):
        assert {name for name, answer in found.items() if answer} == yes


def test_one_rank_is_not_asked() -> None:
    mesh = Mesh.create(("tp",), (1,))
    symmetric_memory.set_up(mesh, "tp")
    assert mesh.tp.symmetric == ""
