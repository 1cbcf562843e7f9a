"""What ZeRO units hold when, on two real processes; recomputation, frozen layers, a layer called twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from codegen.runtime.dropout import dropout, dropout_key
from codegen.runtime.dropout_module import DropoutModule
from codegen.runtime.layout import Layout
from codegen.runtime.mesh import Mesh
from codegen.runtime.parameters import Module, Param
from codegen.runtime.sharded_units import ShardedUnits
from codegen.runtime.step import Step
from tests.codegen.runtime.ranks import run_ranks

WIDTH, ROWS, NUM_LAYERS = 16, 8, 5


def make_program(zero: int, recompute: bool = False, is_frozen: bool = False, twice: bool = False) -> type[Module]:
    """Residual layers of two classes; `gathered` records how many layers' parameters exist when one runs, both ways."""
    trainable = Param((WIDTH, WIDTH), zero=zero, dtype="float64", dp="Rp")
    fixed = Param((WIDTH, WIDTH), zero=zero, dtype="float64", dp="Rp", requires_grad=not is_frozen)

    class Layer(DropoutModule):
        PARAMETERS = {"up.weight": fixed, "down.weight": trainable}
        dropout_base, dropout_calls = 10, 3

        def forward(self, x: Tensor) -> Tensor:
            log.append(num_gathered())
            if x.requires_grad:
                x.register_hook(lambda _: log.append(num_gathered()))
            return x + F.linear(torch.tanh(F.linear(x, self.up.weight)), self.down.weight)

    class Other(Layer):
        PARAMETERS = {"up.weight": fixed, "down.weight": fixed}
        dropout_base = (100, 200)

    class Root(DropoutModule):
        PARAMETERS = {"head.weight": trainable}
        LAYERS = {
            Layer: tuple(f"layers.{i}" for i in range(NUM_LAYERS)),
            Other: ("others.0", "others.1"),
        }
        INPUTS = {"x": Param((ROWS, WIDTH), dp="S(0)", dtype="float64")}

        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            root.append(self)

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers_of(Layer), *self.layers_of(Other)):
                for _ in range(2 if twice else 1):
                    x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            return self.mesh.dp.all_reduce(F.linear(x, self.head.weight).square().sum() / ROWS)

    def num_gathered() -> int:
        return sum(layer.up.weight.untyped_storage().size() > 0 for layer in root[0].layers_of(Layer))

    log: list[int] = []
    root: list[Root] = []
    Root.gathered = log
    return Root


def make_step(program: type[Module], mesh: Mesh) -> Step:
    step = Step(
        program, mesh, optimizer_factory=lambda parameters: torch.optim.SGD(parameters, lr=0.1), units=ShardedUnits
    )
    generator = torch.Generator().manual_seed(3)
    # One request per name, in an order that all programs share.
    step.load(lambda name: torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) / WIDTH)
    return step


def num_bytes_held(step: Step) -> int:
    """Of parameters, masters and gradients on this rank; each storage once."""
    storages = {}
    for bucket in step.zero.buckets:
        kept = [bucket.flat, bucket.master, getattr(bucket, "gradient", None), bucket.whole_gradient]
        for tensor in kept:
            if tensor is not None:
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def two_ranks(rank: int, world_size: int) -> None:
    mesh = Mesh.create(("dp",), (2,))
    batch = {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    whole = (2 * NUM_LAYERS + 4 + 1) * WIDTH * WIDTH * 8
    held = {}
    for options in ({}, {"recompute": True}, {"is_frozen": True}, {"twice": True}, {"is_frozen": True, "twice": True}):
        expected = {}
        for zero in (0, 1, 2, 3):
            program = make_program(zero, **options)
            step = make_step(program, mesh)
            if zero == 3:
                assert num_bytes_held(step) <= whole, f"{options}: parameters are whole after loading"
            for _ in range(2):
                loss = step.forward_backward(step.local_batch(batch))
                found = {"loss": loss, **step.gradients()}
                step.update()
            held.setdefault(zero, num_bytes_held(step))
            expected = expected or found
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{name} {zero} {options}")
            if zero == 3:
                # The layer that runs and the next.
                most = max(program.gathered)
                assert most <= 2, f"{options}: {most} layers were whole at once"
            else:
                assert min(program.gathered) == NUM_LAYERS
    # Parameters and gradients: whole each; whole and half; half and half.
    assert held == {0: 2 * whole, 1: 3 * whole // 2, 2: 3 * whole // 2, 3: whole}


@pytest.mark.slow
@pytest.mark.distributed
def test_stages_agree_and_hold_what_they_should() -> None:
    run_ranks(two_ranks, 2)


def test_dropout_calls_are_numbered_through_the_layers() -> None:
    step = make_step(make_program(0), Mesh.create((), ()))
    layers, others = (step.model.layers_of(cls) for cls in step.model.LAYERS)
    step.rng.seed, step.rng.step = 7, 4
    assert [layer.dropout_key(1) for layer in layers] == [dropout_key(7, 4, 10 + 3 * i + 1) for i in range(NUM_LAYERS)]
    assert [layer.dropout_key(1) for layer in others] == [dropout_key(7, 4, 101), dropout_key(7, 4, 201)]
    assert step.model.dropout_key(2) == dropout_key(7, 4, 2)
    # The fourth micro-batch draws what the rows 48 to 64 of one big batch would.
    step.rng.micro_batch = 3
    whole = dropout(torch.ones(64, 4), 0.5, key=dropout_key(7, 4, 14), layout=Layout((64, 4)), mesh=None)
    part = layers[1].same_dropout(torch.ones(16, 4), 0.5, call=1, layout=Layout((16, 4)))
    assert torch.equal(part, whole[48:])
    assert step.model.layers_of(type(layers[0]), 1, 3) == layers[1:3]


def test_names_are_the_users() -> None:
    model = make_step(make_program(3), Mesh.create((), ())).model
    expected = {f"layers.{i}.{w}.weight" for i in range(NUM_LAYERS) for w in ("up", "down")} | {"head.weight"}
    expected |= {f"others.{i}.{w}.weight" for i in range(2) for w in ("up", "down")}
    assert {name for name, _ in model.named_parameters()} == expected == set(model.state_dict())


def test_errors_say_what_is_wrong() -> None:
    step = make_step(make_program(0), Mesh.create((), ()))
    with pytest.raises(KeyError, match="no value for head.weight"):
        step.load({})
    with pytest.raises(ValueError, match=r"head.weight has shape \(3,\), the program needs \(16, 16\)"):
        step.load(lambda name: torch.zeros(3))
    with pytest.raises(ValueError, match="by name, got a tuple; program.local_batch"):
        step.local_batch((torch.zeros(8, 16),))
    with pytest.raises(ValueError, match="the batch lacks x"):
        step({})
    with pytest.raises(ValueError, match=r"x has shape \(9, 16\); .* made for \(8, 16\)"):
        step({"x": torch.zeros(9, 16, dtype=torch.float64)})
    with pytest.raises(ValueError, match="over an Rp axis only, dp has S"):
        Param((4, 4), zero=1, dp="S(0)")
    with pytest.raises(ValueError, match="not a placement: 'S'"):
        Param((4, 4), dp="S")
