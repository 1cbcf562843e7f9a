"""Compressed gathers and reductions on real gloo processes: error bounds, equal bits, bytes sent, what stays exact."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.runtime import collectives, zero
from codegen.runtime.compressed import Compression
from codegen.runtime.flat import Bucket
from codegen.runtime.mesh import Axis, Mesh
from codegen.runtime.sharded_units import ShardedBucket
from codegen.runtime.step import Step
from tests.codegen.runtime import transformer_program
from tests.codegen.runtime.features import features
from tests.codegen.runtime.ranks import run_ranks

B = 256
ROUNDING = 2.0**-16
"""Of fp32 arithmetic, in units of a block's scale."""
BOTH = {"gather": "int8", "reduce": "int8"}
SMALLEST = 2.0**-100


def scales(line: Tensor, largest: float = 127.0) -> Tensor:
    """The scale of every element of a line, from the definition."""
    amax = line.double().view(-1, B).abs().amax(1).clamp(min=SMALLEST)
    return (amax / largest).repeat_interleave(B)


def gather_bound(line: Tensor, code: str) -> Tensor:
    if code == "int8":
        return (0.5 + ROUNDING) * scales(line)
    return torch.maximum((2**-4 + ROUNDING) * line.double().abs(), 2**-10 * scales(line, 448.0))


def inputs(rank: int, numel: int) -> dict[str, Tensor]:
    """Lines of one rank."""
    generator = torch.Generator().manual_seed(rank)
    normal = torch.randn(numel, generator=generator)
    exponents = torch.randint(-90, 90, (numel,), generator=generator)
    return {
        "random": normal,
        "constant": torch.full((numel,), 0.1 * (rank + 1)),
        "huge range": normal * torch.exp2(exponents.float()),
        "largest": torch.full((numel,), torch.finfo(torch.float32).max / 8) * normal.sign(),
        "tiny": normal * 2.0**-120,
        "zero": torch.zeros(numel),
    }


def assert_equal_bits(value: Tensor, axis: Axis, what: str) -> None:
    """On all ranks of the axis."""
    bits = value.detach().contiguous().view(torch.uint8)
    assert axis.size == 1 or (axis.gather_parts(bits) == bits).all(), f"{what}: ranks differ"


# The collectives ------------------------------------------------------------------------------------------------------


def check_collectives(rank: int, world_size: int) -> None:
    axis, numel = Mesh.create(("dp",), (world_size,)).dp, 3 * B
    for code, (name, part) in itertools.product(("int8", "fp8"), inputs(rank, numel).items()):
        case = f"{name} to {code} on {world_size} ranks"
        exact = axis.gather_parts(part).view(-1)
        found = torch.empty_like(exact)
        Compression({"gather": code}).start_gather(found, part, axis).wait()
        assert_equal_bits(found, axis, case)
        error = (found.double() - exact.double()).abs()
        assert (error <= gather_bound(exact, code)).all(), f"{case}: {error.max()}"
        assert name != "random" or error.max() > 0.8 * gather_bound(exact, code).min(), f"{case}: it is exact"
        assert name != "zero" or not found.any()
        # What is gathered in bf16 is rounded once more: by half of the last of its eight bits.
        low = torch.empty_like(exact, dtype=torch.bfloat16)
        Compression({"gather": code}).start_gather(low, part, axis).wait()
        assert torch.equal(low, found.to(torch.bfloat16)), case
    for name, line in inputs(rank, world_size * numel).items():
        lines_NE = axis.gather_parts(line)
        own = slice(rank * numel, (rank + 1) * numel)
        exact = lines_NE.double().sum(0)[own]
        bound = sum(scales(each)[own] for each in lines_NE) * (0.5 + ROUNDING) + exact.abs() * 2**-20
        found = torch.empty(numel)
        Compression({"reduce": "int8"}).start_reduce(found, line.clone(), axis).wait()
        error = (found.double() - exact).abs()
        assert (error <= bound).all(), f"{name}: {(error - bound).max()}"
        assert name != "random" or error.max() > 0.1 * bound.min()
        again = torch.empty(numel)
        Compression({"reduce": "int8"}).start_reduce(again, line.clone(), axis).wait()
        assert torch.equal(found, again), name


def check_not_finite(rank: int, world_size: int) -> None:
    """Blocks with a value that is not finite arrive as NaN, on every rank, and only they."""
    axis, numel = Mesh.create(("dp",), (world_size,)).dp, 4 * B
    for value, code in itertools.product((torch.nan, torch.inf, -torch.inf), ("int8", "fp8")):
        part = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        part[B + rank] = value
        found = torch.empty(world_size * numel)
        Compression({"gather": code}).start_gather(found, part, axis).wait()
        blocks = found.view(world_size, 4, B)
        assert blocks[:, 1].isnan().all() and blocks[:, [0, 2, 3]].isfinite().all(), f"{value} to {code}"
        if code == "fp8":
            continue
        line = torch.randn(world_size * numel)
        if rank == 1:
            line[2 * B + 7] = value
            line[numel + B] = value
        total = torch.empty(numel)
        Compression({"reduce": code}).start_reduce(total, line, axis).wait()
        struck = {0: 2, 1: 1}.get(rank)
        for block, values in enumerate(total.view(4, B)):
            assert values.isnan().all() if block == struck else values.isfinite().all(), f"{value}, block {block}"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_errors_are_within_the_bounds_and_ranks_agree(world_size: int) -> None:
    run_ranks(check_collectives, world_size)


@pytest.mark.distributed
def test_what_is_not_finite_is_not_lost() -> None:
    run_ranks(check_not_finite, 2)


def test_unknown_codes_are_refused() -> None:
    for names in ({"gather": "int4"}, {"reduce": "fp8"}, {"scatter": "int8"}):
        with pytest.raises(ValueError, match="gather: int8 or fp8; reduce: int8"):
            Compression(names)


# Training -------------------------------------------------------------------------------------------------------------

ROWS, NUM_LAYERS = 8, 2


def make_step(mesh: Mesh, stage: int, micro: int = 1, **options: Any) -> Step:
    program = transformer_program.make_program(ROWS // micro, NUM_LAYERS, stage, "float32", p=0.0)
    factory = options.pop("optimizer_factory", partial(torch.optim.SGD, lr=0.05))
    step = Step(program, mesh, optimizer_factory=factory, num_micro_batches=micro, **features(mesh, **options))
    step.load(transformer_program.whole_state(NUM_LAYERS))
    return step


def line_of(bucket: Bucket, local: Tensor) -> Tensor:
    """Everyone's range (of masters), padding included."""
    return bucket.axis.gather_parts(local.to(bucket.flat.device)).view(-1)


def whole_flat(bucket: Bucket) -> Tensor:
    bucket.finish_gather()
    values = bucket.flat.clone()
    bucket.release()
    return values


def check_parameters(step: Step, case: str) -> None:
    """Everyone computes with equal bits, within the bound of the masters."""
    rounded = False
    for bucket in step.buckets:
        if bucket.axis.size == 1:
            continue
        found, exact = whole_flat(bucket), line_of(bucket, bucket.master)
        assert_equal_bits(found, step.mesh.dp, case)
        assert_equal_bits(found, step.mesh.ddp, case)
        sent = exact.to(found.dtype)
        low = torch.finfo(found.dtype).eps / 2 * found.double().abs()
        assert ((found.double() - sent.double()).abs() <= gather_bound(sent, "int8") + low).all(), case
        rounded = rounded or not torch.equal(found, sent)
    assert rounded, f"{case}: the parameters are exact"


def check_training(mesh: Mesh, stage: int, micro: int, precision: Any) -> None:
    """Gradients against exact reductions from equal parameters, parameters against exact masters."""
    case = f"{mesh}, ZeRO-{stage}, {micro} micro-batches, {precision}"
    exact = make_step(mesh, stage, micro, precision=precision, compression={"gather": "int8"})
    step = make_step(mesh, stage, micro, precision=precision, compression=BOTH)
    again = make_step(mesh, stage, micro, precision=precision, compression=BOTH)
    sums: dict[int, Tensor] = {}
    start = ShardedBucket.start_reduce

    def recording(bucket: ShardedBucket, target: Tensor, line: Tensor) -> Any:
        # Of every rank's line, as it is before it is quantised.
        lines_NE = bucket.axis.gather_parts(line)
        own = slice(bucket.offset, bucket.offset + bucket.shard_numel)
        sums[id(bucket)] = sums.get(id(bucket), 0.0) + sum(scales(each)[own] for each in lines_NE)
        return start(bucket, target, line)

    batch = transformer_program.whole_batch(ROWS, seed=0)
    expected_loss = exact.forward_backward(exact.local_batch(batch))
    ShardedBucket.start_reduce = recording
    try:
        loss = step.forward_backward(step.local_batch(batch))
    finally:
        ShardedBucket.start_reduce = start
    assert torch.equal(loss, again.forward_backward(again.local_batch(batch))), case
    assert torch.equal(loss, expected_loss), f"{case}: the loss depends on the gradients"
    rounded = False
    for bucket, other, repeated in zip(step.buckets, exact.buckets, again.buckets, strict=True):
        assert torch.equal(bucket.gradient, repeated.gradient), f"{case}: not deterministic"
        # The others' sums are added to this one's.
        bound = sums[id(bucket)].float().contiguous()
        if bucket.others.size > 1:
            collectives.all_reduce(bound, bucket.others.group)
        error = (bucket.gradient.double() - other.gradient.double()).abs()
        limit = (0.5 + ROUNDING) * bound.double() + 2**-20 * other.gradient.double().abs() + 1e-7 * bound.max()
        assert (error <= limit).all(), f"{case}: {(error / limit).max()}"
        rounded = rounded or bool(error.any())
    assert rounded, f"{case}: the gradients are exact"
    before, gradients = step.full_state_dict(), step.gradients()
    check_parameters(step, case)
    step.update()
    check_parameters(step, case)
    for name, value in step.full_state_dict().items():
        # What SGD makes of the exact masters.
        assert torch.equal(value, before[name].add(gradients[name], alpha=-0.05)), f"{case}: {name}"


def two_ranks(rank: int, world_size: int) -> None:
    mesh = Mesh.create(("dp",), (2,))
    for stage, micro, precision in itertools.product((1, 2, 3), (1, 2), ("fp32", "bf16")):
        check_training(mesh, stage, micro, precision)
    # Several buckets to a stage; this process ends with the test.
    zero.BUCKET_BYTES = 300
    check_training(mesh, 1, 2, "fp32")
    check_training(mesh, 2, 2, "bf16")


def four_ranks(rank: int, world_size: int) -> None:
    for axes, sizes in ((("dp",), (4,)), (("ddp", "dp"), (2, 2)), (("dp", "tp"), (2, 2))):
        mesh = Mesh.create(axes, sizes)
        for stage, micro, precision in ((1, 2, "fp32"), (2, 1, "bf16"), (3, 2, "fp32")):
            check_training(mesh, stage, micro, precision)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_train_within_the_bounds() -> None:
    run_ranks(two_ranks, 2)


@pytest.mark.slow
@pytest.mark.distributed
def test_four_ranks_train_within_the_bounds() -> None:
    run_ranks(four_ranks, 4)


def gradients_that_overflow(rank: int, world_size: int) -> None:
    """An infinite loss on one rank's rows reaches everyone's gradient norm."""
    mesh = Mesh.create(("dp",), (2,))
    for stage in (1, 2, 3):
        step = make_step(mesh, stage, max_grad_norm=float("inf"), compression=BOTH)
        step.forward_backward(step.local_batch(transformer_program.whole_batch(ROWS, seed=0)))
        for value in (torch.inf, torch.nan):
            if rank == 0:
                entry = step.buckets[-1].entries[0]
                line = torch.zeros(2 * step.buckets[-1].shard_numel)
                line[entry.start] = value
            else:
                line = torch.zeros(2 * step.buckets[-1].shard_numel)
            work = step.buckets[-1].start_reduce(step.buckets[-1].gradient, line)
            assert work is not None
            work.wait()
            assert step._update.global_norm().isnan(), f"ZeRO-{stage}: {value}"


@pytest.mark.distributed
def test_the_gradient_norm_tells_of_overflow() -> None:
    run_ranks(gradients_that_overflow, 2)


# Bytes ----------------------------------------------------------------------------------------------------------------


def bytes_sent(rank: int, world_size: int) -> dict[tuple[int, str], dict[str, int]]:
    """Bytes that this rank hands to ZeRO's collectives in one step of two micro-batches, by what moves and how."""
    mesh, counted = Mesh.create(("dp",), (world_size,)), {}
    own = {name: getattr(collectives, name) for name in ("all_gather", "reduce_scatter", "all_to_all")}

    def counting(name: str) -> Any:
        def call(output: Tensor, part: Tensor, *args: Any, **options: Any) -> Any:
            numel = max(output.numel(), part.numel())
            counted[key][name] = counted[key].get(name, 0) + numel * part.element_size()
            return own[name](output, part, *args, **options)

        return call

    for name in own:
        setattr(collectives, name, counting(name))
    for stage, given in itertools.product((1, 2, 3), (None, {"gather": "int8"}, {"reduce": "int8"}, BOTH)):
        key = (stage, "+".join(given or ()))
        counted[key] = {}
        step = make_step(mesh, stage, 2, precision="bf16", compression=given)
        counted[key] = {}
        step(step.local_batch(transformer_program.whole_batch(ROWS, seed=0)))
    return counted


def line_bytes(numel: int, names: str, collective: str, width: int) -> int:
    """Of one bucket over two ranks. Compressed: a byte per element of whole blocks, and their scales, in sixteens."""
    block = B if names else 8
    shard = math.ceil(numel / (2 * block)) * block
    scales = math.ceil(shard / B * 4 / 16) * 16
    return 2 * (shard + scales if collective in names else shard * width)


@pytest.mark.distributed
def test_messages_have_the_bytes_that_they_should() -> None:
    layer, root = (
        sum(math.prod(shape) for shape in shapes.values())
        for shapes in (transformer_program.LAYER_SHAPES, transformer_program.ROOT_SHAPES)
    )
    (counted, _) = run_ranks(bytes_sent, 2)
    for (stage, names), found in counted.items():
        case = f"ZeRO-{stage}, {names}: {found}"
        buckets = (layer, layer, root) if stage == 3 else (2 * layer + root,)
        gathers = [line_bytes(numel, names, "gather", 2) for numel in buckets]
        reductions = [line_bytes(numel, names, "reduce", 4) for numel in buckets]
        # Under stage 3 the first layer is gathered for its forward and for its backward, the last for both together.
        expected = 2 * sum((*gathers, gathers[0])) if stage == 3 else sum(gathers)
        summed = "all_to_all" if "reduce" in names else "reduce_scatter"
        assert found == {"all_gather": expected, summed: (1 if stage == 1 else 2) * sum(reductions)}, case
