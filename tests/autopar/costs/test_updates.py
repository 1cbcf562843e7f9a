"""What an optimiser's update moves, against the operators of its formula counted by hand."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.costs.parameter_prices import ParameterPrices
from autopar.costs.rates import Rates, Training
from autopar.costs.updates import adamw, training_of
from autopar.ir.compression import Compression
from autopar.ir.graph import TensorMeta
from autopar.ir.mesh import Mesh
from autopar.ir.placement import R, Rp, S, Stored
from codegen.kernels import adamw as kernel
from codegen.runtime import mesh as runtime_mesh
from codegen.runtime.optimizer_probe import Needs
from codegen.runtime.optimizers import GlobalParameter
from codegen.runtime.step import Step
from codegen.runtime.whole_updates import ROUND_BYTES
from cost_models.machine import Cluster
from tests.autopar.optimizer_factories import Lamb, muon_by_name
from tests.codegen.runtime.mlp_program import make_program, whole_batch, whole_state

GPUS = Cluster.parse("4 a100-80g")
META = TensorMeta((1024, 1024), torch.bfloat16, True)


@pytest.mark.parametrize(
    ("factory", "traffic"),
    [
        # Read weight, gradient and two moments; write all but the gradient.
        (adamw, 4 * 4 + 3 * 4),
        # Decay 8, lerp 12, beta 8, addcmul 12, square root 8, correction 8, epsilon 8, addcdiv 16.
        (torch.optim.AdamW, 80),
        # Momentum: scaled 8, gradient added 12, weight updated 12.
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 32),
        (partial(torch.optim.SGD, lr=0.1), 12),
    ],
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_traffic_is_that_of_the_operators(factory: Any, traffic: float, on_gpu: bool) -> None:
    assert training_of(factory, "fp32", on_gpu).update_traffic == pytest.approx(traffic, abs=0.1)


@pytest.mark.parametrize(("zero", "per_element"), [(0, 4 + 4 + 0.75 * 4), (3, 4 + 4 + 0.75 * 3 * 4 / 4)])
def test_gradients_are_moved_and_added_up(zero: int, per_element: float) -> None:
    """Of four micro-batches three add to what is there, under ZeRO-3 to a quarter of it."""
    cluster, mesh = Cluster.parse("4 a100-80g"), Mesh(("dp",), (4,))
    prices = ParameterPrices(Rates(mesh, cluster, Training(num_micro_batches=4)))
    meta = TensorMeta((1024, 1024), torch.float32, True)
    rate = cluster.device.memory_bytes_per_second * cluster.device.memory_efficiency
    found = prices.accumulation_seconds(meta, Stored((Rp,), zero))
    assert found == pytest.approx(meta.numel * per_element / rate)
    assert prices.accumulation_seconds(TensorMeta((8,), torch.float32, False), Stored((R,), 0)) == 0.0


class Moved(TorchDispatchMode):
    """Bytes that a fused update reads and writes, and that copies into `targets` (addresses) do."""

    def __init__(self, targets: set[int]) -> None:
        super().__init__()
        self.targets, self.update, self.copies = targets, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._fused_adamw_.default:
            masters, gradients, first, second = args[:4]
            changed = sum(t.nbytes for t in (*masters, *first, *second))
            self.update += 2 * changed + sum(t.nbytes for t in gradients)
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() in self.targets:
            self.copies += args[0].nbytes + args[1].nbytes
        return func(*args, **(kwargs or {}))


def moved_without_kernels(precision: str) -> float:
    """Bytes per element of one update of a program on one rank."""
    program = make_program(0, 4, dtype="float32")
    step = Step(program, runtime_mesh.Mesh.create((), ()), optimizer_factory=adamw, precision=precision)
    step.load(whole_state())
    step(step.local_batch(whole_batch(4, 0)))
    buckets = [bucket for part in step.parts for bucket in part.trainable()]
    step.forward_backward(step.local_batch(whole_batch(4, 1)))
    with Moved({bucket.own_copy.data_ptr() for bucket in buckets if bucket.own_copy is not None}) as moved:
        step.update()
    updated = sum(entry.numel for bucket in buckets for entry in bucket.entries)
    return moved.update / updated + moved.copies / sum(bucket.shard_numel for bucket in buckets)


def moved_by_kernel(copy_bytes: int) -> float:
    """Bytes per element of the kernel, by its loads and stores."""
    functions = ast.parse(inspect.getsource(kernel)).body
    tile = next(n for n in functions if isinstance(n, ast.FunctionDef) and n.name == "_adamw_tile")
    calls = [n for n in ast.walk(tile) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    names = [(call.func.id, ast.unparse(call.args[0])) for call in calls]
    width = {"copy_ptr + index": copy_bytes}
    return sum(width.get(where, 4) for name, where in names if name in ("load_tile", "store_tile"))


def update_bytes(training: Training, zero: int = 0, has_kernels: bool = False, cluster: Cluster = GPUS) -> float:
    """Priced, per element that a rank stores."""
    rates, stored = Rates(Mesh(("dp",), (4,)), cluster, training), Stored((Rp,), zero)
    prices = ParameterPrices(rates, has_kernels)
    rate = cluster.device.memory_bytes_per_second * cluster.device.memory_efficiency
    return prices.optimizer_seconds(META, stored) * rate / (META.numel / prices.zero_size(stored))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_masters_are_copied_where_the_model_computes_with_others(precision: str) -> None:
    training = training_of(adamw, precision, on_gpu=True)
    assert update_bytes(training) == pytest.approx(moved_without_kernels(precision), abs=0.1)


def test_the_fused_update_writes_the_copies() -> None:
    training = training_of(adamw, "bf16", on_gpu=True)
    for zero in (0, 1, 2):
        assert update_bytes(training, zero, has_kernels=True) == pytest.approx(moved_by_kernel(copy_bytes=2), abs=0.1)
    # Gathers of ZeRO-3 read the masters themselves.
    assert update_bytes(training, 3, has_kernels=True) == pytest.approx(moved_by_kernel(copy_bytes=0), abs=0.1)
    assert update_bytes(training_of(adamw, "fp32", on_gpu=True), has_kernels=True) == pytest.approx(28, abs=0.1)


def test_masters_are_rounded_for_every_gather_of_zero_3() -> None:
    """Four bytes read and two written of a quarter of the parameter, in forward and in backward."""
    low, full = (training_of(adamw, precision, on_gpu=True) for precision in ("bf16", "fp32"))
    rate = GPUS.device.memory_bytes_per_second * GPUS.device.memory_efficiency

    def found(training: Training, zero: int) -> float:
        prices = ParameterPrices(Rates(Mesh(("dp",), (4,)), GPUS, training))
        return prices.rounding_seconds(META, Stored((Rp,), zero)) * rate

    assert found(low, 3) == pytest.approx(2 * (4 + 2) * META.numel / 4)
    assert found(low, 2) == found(full, 3) == found(replace(low, offload="optimizer"), 3) == 0.0


def test_rounded_copies_lie_beside_fp32_masters() -> None:
    """With compressed gathers, all but ZeRO-3 compute with what was rounded."""
    training = replace(training_of(adamw, "fp32", on_gpu=True), compression=Compression(gather="int8"))
    meta = replace(META, dtype=torch.float32)
    prices = ParameterPrices(Rates(Mesh(("dp",), (4,)), GPUS, training))
    traffic = {zero: prices.copy_traffic(meta, Stored((Rp,), zero)) for zero in range(4)}
    assert traffic == {0: 0.0, 1: 8.0, 2: 8.0, 3: 0.0}


def test_optimisers_of_ones_own_are_followed_by_a_copy() -> None:
    own = training_of(partial(torch.optim.AdamW, fused=True), "bf16", on_gpu=True)
    assert update_bytes(own, has_kernels=True) == update_bytes(own) == pytest.approx(28 + 4 + 2, abs=0.1)


MATRIX, TABLE = GlobalParameter("layer.weight", (64, 256)), GlobalParameter("embed.weight", (512, 32))
NEEDS = Needs(frozenset({"layer.weight"}))


def test_products_of_whole_updates_are_counted() -> None:
    """Five times three products of Newton-Schulz, of a matrix that counts as square: 30 m multiplications and additions
    per element; momentum of half of the elements, two moments of the others."""
    training = training_of(muon_by_name, "fp32", parameters=(MATRIX, TABLE), needs=NEEDS)
    assert training.whole_share == 0.5
    assert training.update_flops == pytest.approx(30 * 64) and training.update_dtype == "fp32"
    assert training.state_bytes == (4 + 8) / 2
    assert training_of(torch.optim.Muon, "fp32", parameters=(MATRIX,), needs=NEEDS).update_dtype == "bf16"
    assert training_of(muon_by_name, "fp32", parameters=(MATRIX, TABLE)).whole_share == 0.0


class Watchful(torch.optim.SGD):
    """Notes which hooks of all modules there are while it is tried: another thread's models would run them."""

    seen: ClassVar[list[str]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen += [name for name in _HOOK_TABLES if getattr(torch_module, name)]
        return super().step(closure)


_HOOK_TABLES = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


def test_other_threads_are_not_disturbed_while_an_update_is_counted() -> None:
    training_of(partial(Watchful, lr=0.1), "fp32")
    assert not Watchful.seen


@pytest.mark.parametrize(
    ("axes", "stored", "elements"),
    [
        (("dp",), Stored((Rp,), 0), 1.0),
        (("dp",), Stored((Rp,), 1), 1 / 4),
        (("tp",), Stored((S(0),), 0), 1 / 4),
        (("tp",), Stored((R,), 0), 1.0),
    ],
)
def test_owners_share_state_and_updates_evenly(axes: tuple[str, ...], stored: Stored, elements: float) -> None:
    """A quarter of the state, whatever is stored; parts are sent there and back, and copies handed out."""
    training = replace(training_of(Lamb, "fp32", parameters=(MATRIX,), needs=NEEDS), update_flops=0.0)
    rates, meta = Rates(Mesh(axes, (4,)), GPUS, training), TensorMeta((1024, 1024), torch.float32, True)

    def prices_of(training: Training) -> ParameterPrices:
        return ParameterPrices(replace(rates, training=training))

    prices, plain = prices_of(training), prices_of(replace(training, whole_share=0.0))
    assert prices.parameter_bytes(meta, stored)[2] == 8 * meta.numel / 4
    assert plain.parameter_bytes(meta, stored)[2] == 8 * meta.numel * elements
    taken = 0.0 if elements == 1.0 else 2 * 4 * meta.numel / 4
    assert prices.taken_bytes(meta, stored) == taken
    seconds = rates.joint_seconds("all_to_all", (0,), ROUND_BYTES) * 1.5 * taken / ROUND_BYTES
    if elements == 1.0:
        seconds = rates.joint_seconds("broadcast", (0,), ROUND_BYTES) * 4 * meta.numel / ROUND_BYTES
    moved = training.update_traffic * meta.numel / 4
    rate = GPUS.device.memory_bytes_per_second * GPUS.device.memory_efficiency
    assert prices.optimizer_seconds(meta, stored) == pytest.approx(seconds + moved / rate)
    assert prices_of(replace(training, offload="optimizer")).whole_update_seconds(meta, stored) == 0
