"""Every reshard on real processes: whole values and whole gradients are preserved, whatever the placements.

A reshard changes how a tensor lies on the ranks and nothing else. So the whole tensor that the outputs stand for must
be the one that the inputs stand for, and the whole gradient likewise with the conjugate placements. What a placement
stands for is written here element by element, apart from the runtime's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from codegen.runtime.mesh import Axis, Mesh
from codegen.runtime.parameters import Param, shard, unshard
from tests.codegen.runtime.ranks import run_ranks

SHAPE = (24, 12, 24)
CONJUGATE = {"R": "R", "Rp": "P", "P": "R"}
StageMesh = str | tuple[int, int]  # a kind, or (dim, sections) of a shard
Case = tuple[str, StageMesh, StageMesh, Callable[[Tensor], Tensor]]


def positions(length: int, sections: int, size: int, rank: int) -> list[int]:
    """The elements of a sharded dim that a rank holds: part `rank` of each section, in order."""
    per_section, per_rank = length // sections, length // sections // size
    return [i for i in range(length) if i % per_section // per_rank == rank]


def whole_of(parts: list[Tensor], place: StageMesh) -> Tensor:
    """The tensor that the ranks' parts stand for."""
    if place == "P":
        return torch.stack(parts).sum(0)
    if isinstance(place, str):
        for part in parts:
            assert torch.equal(part, parts[0]), "replicas differ"
        return parts[0]
    dim, sections = place
    shape = list(parts[0].shape)
    shape[dim] *= len(parts)
    whole = torch.full(shape, float("nan"), dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        index = torch.tensor(positions(shape[dim], sections, len(parts), rank))
        whole.index_copy_(dim, index, part)
    return whole


def random_part(place: StageMesh, axis: Axis, seed: int, shape: tuple[int, ...]) -> Tensor:
    """A part of the right local shape: equal on all ranks if replicated, its own on each rank if not."""
    local = list(shape)
    if not isinstance(place, str):
        local[place[0]] //= axis.size
    own = axis.rank + 1 if place not in ("R", "Rp") else 0
    generator = torch.Generator().manual_seed(1000 * seed + own)
    # Not contiguous, as gradients and transposed activations are.
    return torch.randn(local[::-1], dtype=torch.float64, generator=generator).permute(2, 1, 0)


def conjugate(place: StageMesh) -> StageMesh:
    return CONJUGATE[place] if isinstance(place, str) else place


def cases(axis: Axis) -> Iterator[Case]:
    yield "for_use", "R", "Rp", axis.for_use
    yield "all_reduce", "P", "R", axis.all_reduce
    yield "all_reduce later", "P", "R", lambda x: reduced_later(axis, x)
    yield "all_reduce partial", "P", "Rp", lambda x: axis.all_reduce(x, grad="partial")
    yield "first_rank_only", "R", "P", axis.first_rank_only
    yield "first_rank_only partial", "Rp", "P", lambda x: axis.first_rank_only(x, grad="partial")
    yield "first_rank_grad", "Rp", "R", axis.first_rank_grad
    legal = [(d, k) for d in range(3) for k in (1, 2, 3, 6) if SHAPE[d] % (k * axis.size) == 0]
    for d, k in legal:
        yield f"all_gather {d}/{k}", (d, k), "Rp", lambda x, d=d, k=k: axis.all_gather(x, d, k)
        yield f"all_gather full {d}/{k}", (d, k), "R", lambda x, d=d, k=k: axis.all_gather(x, d - 3, k, grad="full")
        yield f"reduce_scatter {d}/{k}", "P", (d, k), lambda x, d=d, k=k: axis.reduce_scatter(x, d - 3, k)
        yield f"slice {d}/{k}", "R", (d, k), lambda x, d=d, k=k: axis.slice(x, d, k)
        yield f"slice partial {d}/{k}", "Rp", (d, k), lambda x, d=d, k=k: axis.slice(x, d, k, grad="partial")
        for e, j in legal:
            if e != d:
                yield (
                    f"all_to_all {d}/{k} to {e}/{j}",
                    (d, k),
                    (e, j),
                    lambda x, d=d, k=k, e=e, j=j: axis.all_to_all(x, e, d - 3, j, k),
                )


def reduced_later(axis: Axis, x: Tensor) -> Tensor:
    result = axis.all_reduce(x, wait=False)
    assert len(axis.unfinished) == (axis.size > 1)
    Mesh((axis,), axis, x.device).finish()
    assert not axis.unfinished
    return result


def gathered(x: Tensor, axis: Axis) -> list[Tensor]:
    parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(axis.size)]
    dist.all_gather(parts, x.detach().contiguous(), group=axis.group)
    return parts


def check_reshards(axis: Axis) -> int:
    count = 0
    for seed, (name, source, target, function) in enumerate(cases(axis)):
        x = random_part(source, axis, seed, SHAPE).requires_grad_()
        y = function(x)
        assert y.is_contiguous() or name in ("for_use", "first_rank_grad") or "first_rank_only" in name
        wanted = whole_of(gathered(x, axis), source)
        torch.testing.assert_close(whole_of(gathered(y, axis), target), wanted, msg=lambda m, n=name: f"{n}: {m}")
        grad = random_part(conjugate(target), axis, seed + 500, SHAPE)
        y.backward(grad)
        assert x.grad is not None
        wanted = whole_of(gathered(grad, axis), conjugate(target))
        found = whole_of(gathered(x.grad, axis), conjugate(source))
        torch.testing.assert_close(found, wanted, msg=lambda m, n=name: f"gradient of {n}: {m}")
        count += 1
    return count


def check_plain(axis: Axis) -> None:
    x = torch.arange(6.0).view(2, 3) + 10 * axis.rank
    everyone = torch.stack([torch.arange(6.0).view(2, 3) + 10 * r for r in range(axis.size)])
    torch.testing.assert_close(axis.sum_over(x), everyone.sum(0))
    later = axis.sum_over(x, wait=False)
    Mesh((axis,), axis, x.device).finish()
    torch.testing.assert_close(later, everyone.sum(0))
    torch.testing.assert_close(axis.max_over(x), everyone.amax(0))
    assert x[0, 0] == 10 * axis.rank, "the argument was changed"
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16):
        whole = (torch.arange(16 * axis.size).view(4, -1) % 3).to(dtype)
        part = axis.slice(whole, 1, grad="partial")
        assert part.shape == (4, 4)
        assert torch.equal(axis.all_gather(part, 1), whole)
        assert torch.equal(axis.all_gather(axis.all_to_all(axis.slice(whole.T, 1), 0, 1), 0), whole.T)
    with pytest.raises(ValueError, match="over"):
        axis.slice(torch.zeros(axis.size + 1), 0)


def check_shard(mesh: Mesh) -> None:
    """Two axes on one dim, with equal and with different sections: by position, and back."""
    whole = torch.arange(24 * 3).view(24, 3)
    dp, tp = mesh.dp, mesh.tp
    for coarse, fine in ((1, 1), (3, 3), (1, 6), (1, 2), (2, 12)):
        spec = Param((24, 3), dp=f"S(0/{coarse})", tp=f"S(0/{fine})")
        part = shard(whole, spec, mesh)
        held = [i for i in positions(24, coarse, dp.size, dp.rank)]
        if coarse == fine:
            held = [held[i] for i in positions(len(held), fine, tp.size, tp.rank)]
        else:
            held = [i for i in held if i in positions(24, fine, tp.size, tp.rank)]
        assert torch.equal(part, whole[held]), (coarse, fine)
        assert part.shape == spec.local_shape(mesh)
        assert torch.equal(unshard(part, spec, mesh), whole)
    partial = torch.full((3,), float(mesh.rank))
    assert torch.equal(unshard(partial, {"dp": "P", "tp": "P"}, mesh), torch.full((3,), 6.0))


def four_ranks(rank: int, world_size: int, axes: tuple[str, ...]) -> list[int]:
    """The numbers of cases over each of the axes."""
    mesh = Mesh.create(("dp", "cp", "tp"), (2, 1, 2))
    return [check_reshards(getattr(mesh, axis)) for axis in axes]


def four_ranks_once(rank: int, world_size: int) -> None:
    """What is not the reshards of one axis."""
    mesh = Mesh.create(("dp", "cp", "tp"), (2, 1, 2))
    assert (mesh.dp.rank, mesh.tp.rank, mesh.cp.size, mesh.ep.size) == (rank // 2, rank % 2, 1, 1)
    assert str(mesh) == "dp2 x cp1 x tp2"
    assert mesh.joint(("tp", "dp")).size == 4 and mesh.joint(("tp",)) is mesh.tp
    for axis in (mesh.tp, mesh.world):
        check_plain(axis)
    check_shard(mesh)
    cube = Mesh.create(("dp", "cp", "tp"), (2, 2, 1))
    assert torch.equal(cube.joint(("dp", "cp")).sum_over(torch.ones(1)), torch.full((1,), 4.0))
    with pytest.raises(ValueError, match="dp3 needs 3 processes, but 4 run"):
        Mesh.create(("dp",), (3,))
    with pytest.raises(AttributeError, match="no axis 'dq'"):
        _ = mesh.dq


def eight_ranks(rank: int, world_size: int) -> None:
    mesh = Mesh.create(("dp", "cp", "tp"), (2, 2, 2))
    outer = mesh.joint(("tp", "dp"))
    assert (outer.size, outer.rank) == (4, rank // 4 * 2 + rank % 2)
    held = outer.gather_parts(torch.tensor(rank))
    assert held.tolist() == [r for r in range(8) if r // 2 % 2 == rank // 2 % 2]


@pytest.mark.distributed
@pytest.mark.parametrize("axes", [("world",), pytest.param(("tp", "dp"), marks=pytest.mark.slow)])
def test_reshards_keep_whole_values_and_gradients(axes: tuple[str, ...]) -> None:
    counts = run_ranks(four_ranks, 4, axes)
    assert counts == [counts[0]] * 4 and min(counts[0]) > 100


@pytest.mark.distributed
def test_meshes_of_four_ranks() -> None:
    run_ranks(four_ranks_once, 4)


@pytest.mark.distributed
@pytest.mark.slow
def test_joint_axes_that_are_not_neighbors() -> None:
    run_ranks(eight_ranks, 8)


def test_one_rank_is_the_identity() -> None:
    mesh = Mesh.create(("dp", "tp"), (1, 1))
    x = torch.randn(4, 6).T
    assert all(function(x) is x for _, _, _, function in cases(mesh.tp))
    assert torch.equal(mesh.tp.sum_over(x), x)
    assert str(Mesh.create((), ())) == "single" and mesh.world_size == 1
