"""Offload moves bytes and changes no number: activations, optimiser state and parameter shards."""

from __future__ import annotations

import math
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codegen.runtime import checkpoint, offload
from codegen.runtime.mesh import Mesh
from codegen.runtime.parameters import Module, Param
from codegen.runtime.recompute import MemorySaving
from codegen.runtime.step import Step
from tests.codegen.runtime.features import features
from tests.codegen.runtime.ranks import run_ranks
from tests.codegen.runtime.transformer_program import (
    HEADS,
    LAYER_SHAPES,
    LENGTH,
    ROOT_SHAPES,
    WIDTH,
    make_program,
    whole_batch,
    whole_state,
)

ROWS, NUM_LAYERS = 8, 3
LAYER_NUMEL = sum(math.prod(shape) for shape in LAYER_SHAPES.values())
ROOT_NUMEL = sum(math.prod(shape) for shape in ROOT_SHAPES.values())
NUMEL = NUM_LAYERS * LAYER_NUMEL + ROOT_NUMEL


def make_optimizer(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def make_step(mesh: Mesh, zero: int = 0, micro: int = 1, kind: str = "adamw", **options: Any) -> Step:
    tables = {name: options.pop(name) for name in ("recompute", "offload") if name in options}
    program = make_program(ROWS // micro, NUM_LAYERS, zero, options.pop("dtype", "float64"), **tables)
    factory = options.pop("optimizer_factory", partial(make_optimizer, kind))
    step = Step(program, mesh, optimizer_factory=factory, num_micro_batches=micro, **features(mesh, **options))
    step.load(whole_state(NUM_LAYERS))
    return step


def train(step: Step, steps: range = range(3)) -> dict[str, Tensor]:
    """The losses of the steps, and the parameters after them."""
    losses = {f"loss {i}": step(step.local_batch(whole_batch(ROWS, seed=i))) for i in steps}
    return {**losses, **step.full_state_dict()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{case}: {name} differs by {(found[name] - value).abs().max():.1e}"


# The optimiser --------------------------------------------------------------------------------------------------------


def two_ranks(rank: int, world_size: int, folder: str) -> None:
    # This process ends with the test.
    offload.MIN_BYTES = 1
    mesh, across, case = Mesh.create(("dp",), (2,)), Mesh.create(("tp",), (2,)), 0
    for zero in (0, 1, 2, 3):
        for options in (
            {"micro": 2, "max_grad_norm": 0.05},
            {"kind": "sgd", "dtype": "float32"},
            {"dtype": "float32", "precision": "bf16"},
        ):
            expected = train(make_step(mesh, zero, **options))
            places: list[dict[str, Any]] = [
                {"offload_optimizer": "host"},
                {"offload_optimizer": f"nvme:{folder}/{case}"},
                {"offload_optimizer": "host", "offload_parameters": True},
                {"offload_optimizer": "host", "recompute": ["full"] * 3, "offload": [True] * 3},
                {"offload": [True] * 3},
            ]
            for place in places:
                step = make_step(mesh, zero, **options, **place)
                assert_equal(train(step), expected, f"zero {zero}, {options}, {place}")
                check_traffic(step, zero, options, place)
            case += 1
    expected = train(make_step(across, micro=2))
    for table in ({"offload": [True] * 3}, {"offload": [True] * 3, "recompute": ["selective", "full", "none"]}):
        assert_equal(train(make_step(across, micro=2, offload_optimizer="host", **table)), expected, f"tp2 {table}")
    check_continuation(mesh, folder)


def check_traffic(step: Step, zero: int, options: dict[str, Any], place: dict[str, Any]) -> None:
    """Of the last step: a rank's range of the gradients out and of the parameters in, in their own dtypes."""
    parts = 2 if zero else 1
    master, compute = {"fp32": (8, 8), "bf16": (4, 2)}[options.get("precision", "fp32")]
    if options.get("dtype") == "float32" and compute == 8:
        master = compute = 4
    found, micro = step.offload.traffic, options.get("micro", 1)
    hidden = ROWS // 2 * LENGTH * WIDTH * compute
    if "recompute" in place:
        assert found.activations_out == found.activations_in == NUM_LAYERS * hidden
    elif "offload" in place:
        # See `bytes_moved`; in bf16 the normalisation saves fp32 values too.
        tokens = ROWS // 2 * LENGTH
        others = 2 * tokens * WIDTH + (2 + HEADS) * tokens * compute
        least = NUM_LAYERS * (13 * hidden + (others if compute > 2 else 0))
        assert found.activations_out == found.activations_in >= least
        assert compute == 2 or found.activations_out == least
    if not place.get("offload_optimizer"):
        assert found.bytes_out == found.activations_out
        return
    assert found.gradients_out == NUMEL // parts * master
    if place.get("offload_parameters") and zero == 3:
        # A layer for forward and for backward, the last only once for both, as the root.
        gathered = ((2 * NUM_LAYERS - 1) * LAYER_NUMEL + ROOT_NUMEL) * micro
        assert (found.parameters_in, found.masters_in) == (gathered // 2 * compute, 0)
    else:
        assert (found.parameters_in, found.masters_in) == (0, NUMEL // parts * compute)
    assert found.bytes_out == found.gradients_out + found.activations_out


def check_continuation(mesh: Mesh, folder: str) -> None:
    """A checkpoint made with offload continues without, and the reverse; in files too."""
    places = ["", "host", f"nvme:{folder}/checkpoint"]
    for zero in (1, 3):
        expected = train(make_step(mesh, zero), range(4))
        for place in places:
            step = make_step(mesh, zero, offload_optimizer=place)
            train(step, range(2))
            checkpoint.save(step, f"{folder}/saved")
            step.close()
            for other in places:
                step = make_step(mesh, 4 - zero, offload_optimizer=other)
                checkpoint.load(step, f"{folder}/saved")
                found = train(step, range(2, 4))
                for name, value in found.items():
                    torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=f"{place} {other}")
                step.close()


@pytest.mark.slow
@pytest.mark.distributed
def test_update_on_the_host_is_the_same(tmp_path: Path) -> None:
    run_ranks(two_ranks, 2, str(tmp_path))
    assert not list(tmp_path.glob("*/rank_*")), "folders of ended processes are left"


def test_state_in_files(tmp_path: Path) -> None:
    place = {"offload_optimizer": f"nvme:{tmp_path}"}
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "00000.left_by_a_killed_process").write_bytes(b"x")
    step = make_step(Mesh.create((), ()), **place)
    with pytest.raises(ValueError, match="is used by another step or process"):
        make_step(Mesh.create((), ()), **place)
    train(step)
    files = {path.name.split(".")[1]: path for path in (tmp_path / "rank_0").iterdir() if path.name != "in_use"}
    assert files.keys() == {"master", "exp_avg", "exp_avg_sq"}
    expected = make_step(Mesh.create((), ()))
    state = train(expected)
    for kind, path in files.items():
        assert path.stat().st_size == NUMEL * 8
        # Read as any other process would.
        values = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float64)
        start = 0
        for entry in step.zero.buckets[0].entries:
            if kind == "master":
                value = state[entry.slot.name]
            else:
                value = expected.optimizer.state[expected.stored_parameters()[entry.slot.name]][kind]
            assert torch.equal(values[start : start + entry.numel], value.flatten()), f"{kind} of {entry.slot.name}"
            start += entry.numel
    step.close()
    assert not (tmp_path / "rank_0").exists()


def test_files_are_moved_on_from_a_loaded_checkpoint(tmp_path: Path) -> None:
    """State that the loader put in plain memory is in the files again after a step."""
    step = make_step(Mesh.create((), ()), kind="sgd", offload_optimizer=f"nvme:{tmp_path}/state")
    train(step, range(2))
    checkpoint.save(step, tmp_path / "saved")
    files = sorted((tmp_path / "state" / "rank_0").glob("*.momentum_buffer"))
    before = files[0].read_bytes()
    train(step, range(2, 4))
    checkpoint.load(step, tmp_path / "saved")
    assert files[0].read_bytes() != before
    step.optimizer.param_groups[0].update(lr=0.0, momentum=1.0, dampening=1.0)
    train(step, range(2, 3))
    assert files[0].read_bytes() == before, "such a step leaves the loaded state as it is"
    assert sorted((tmp_path / "state" / "rank_0").glob("*.momentum_buffer")) == files


class CountingSGD(torch.optim.SGD):
    """An optimiser of the user's, with state per group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_foreign_optimizers_are_called_once() -> None:
    results = []
    for place in ("", "host"):
        step = make_step(
            Mesh.create((), ()),
            optimizer_factory=lambda parameters: CountingSGD(
                [{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.3}], lr=0.1
            ),
            offload_optimizer=place,
        )
        results.append(train(step))
        assert [group["count"] for group in step.optimizer.param_groups] == [3, 3]
    assert_equal(*results, "user's optimiser")


def test_refuses_what_it_cannot_do() -> None:
    mesh = Mesh.create((), ())
    for place in ("disk", "nvme:", "hosts"):
        with pytest.raises(ValueError, match="the optimizer is offloaded to"):
            make_step(mesh, offload_optimizer=place)
    with pytest.raises(ValueError, match="the step needs offload"):
        step = Step(make_sharing(4, []), mesh, optimizer_factory=partial(make_optimizer, "sgd"))
        step.model(x=torch.ones(4, 4))


# Activations ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_offloaded_activations_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    for micro in (1, 4):
        expected = train(make_step(Mesh.create((), ()), micro=micro))
        tables: list[dict[str, Any]] = [
            {"offload": [True, True, True]},
            {"offload": [True, False, True]},
            {"offload": [True, True, False], "recompute": ["full", "none", "full"]},
            {"offload": [True, True, True], "recompute": ["selective"] * 3},
        ]
        for table in tables:
            step = make_step(Mesh.create((), ()), micro=micro, **table)
            assert_equal(train(step), expected, f"{micro} micro-batches, {table}")
            assert step.offload.traffic.activations_out == bytes_moved(table, micro)
            assert step.offload.traffic.activations_in == bytes_moved(table, micro)


def bytes_moved(table: dict[str, Any], micro: int) -> int:
    """In a step: of a layer with recomputation its argument, of another all that backward reads (test_recompute.py).

    The argument of a layer is moved once, also where the layer before saved it: none does, its last operator adds.
    """
    hidden = ROWS * LENGTH * WIDTH * 8
    others = 2 * hidden // 8 + 2 * hidden // WIDTH + ROWS * HEADS * LENGTH * 8
    modes = table.get("recompute", ["none"] * NUM_LAYERS)
    each = [13 * hidden + others if mode == "none" else hidden for mode in modes]
    return sum(size for size, moves in zip(each, table["offload"], strict=True) if moves)


def make_sharing(size: int, log: list[Any]) -> type[Module]:
    """Layers that save one table, their argument three times, and a view of it; the last one is not offloaded."""

    class Layer(MemorySaving):
        PARAMETERS = {"weight": Param((size, size))}

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            log.append(weakref.ref(x.untyped_storage()))
            if x.requires_grad:
                x.register_hook(lambda _: log.append(self.offload.traffic.activations_in))
            h = F.linear(x, self.weight) + x.t()[:1] * table[0] * x.t()[0]
            return h * table

    class Root(Module):
        PARAMETERS = {"weight": Param((size, size))}
        LAYERS = {Layer: ("layers.0", "layers.1", "layers.2", "layers.3")}
        OFFLOAD = {Layer: (True, True, True, False)}
        INPUTS = {"x": Param((size, size))}

        def forward(self, x: Tensor) -> Tensor:
            hidden, table = x @ self.weight, torch.cos(torch.arange(size * size, dtype=torch.float32)).view(size, size)
            for layer in self.layers_of(Layer):
                hidden = layer(hidden, table)
            return hidden.sum()

    return Root


def test_storages_move_once_are_freed_and_come_back_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    size, log = 128, []
    monkeypatch.setattr(offload, "MIN_BYTES", size * size * 4)
    mesh = Mesh.create((), ())
    step = Step(make_sharing(size, log), mesh, optimizer_factory=partial(make_optimizer, "sgd"), **features(mesh))
    step.load(lambda _: torch.eye(size))
    # A layer saves x (whole, and as views), x[0] * table[0] (small), the sum, and the table, which is saved once.
    loss = step.model(x=torch.ones(size, size))
    storage = size * size * 4
    assert step.offload.traffic.activations_out == 3 * storage + storage
    assert step.offload.traffic.activations_in == 0
    alive = [reference() is not None for reference in log]
    assert alive == [False, False, False, True], "arguments of offloaded layers are not on the device after forward"
    log.clear()
    loss.backward()
    # When layer 3's argument has its gradient nothing was needed yet. Layer 2 brings its two storages and layer 1's;
    # layer 1 brings layer 0's (the table is there).
    assert log == [0, 3 * storage, 4 * storage, 4 * storage]


def test_small_storages_and_parameters_stay() -> None:
    step = make_step(Mesh.create((), ()), offload=[True] * 3)
    train(step)
    assert step.offload.traffic.activations_out == 0, "all activations here are small"
    assert max(math.prod(shape) * 8 for shape in LAYER_SHAPES.values()) < offload.MIN_BYTES
    # The flat buffer of all parameters is not.
    assert step.zero.buckets[0].flat.untyped_storage().nbytes() > offload.MIN_BYTES
