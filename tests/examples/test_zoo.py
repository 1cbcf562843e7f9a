"""Every model of the zoo trains on one device: its loss, and its gradient as the slope of that loss."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.zoo import in_fp64
from examples.zoo import ZOO

QUICK = ("switch", "dlrm", "two_tower", "mpt", "mistral", "deit")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
CHANCE = {"switch": 8, "unet": 4, "segformer": 4, "vit": 12, "transformer_encoder": 12} | dict.fromkeys(
    ("deit", "swin", "convnext", "resnet"), 12
)
"""The number of classes where it is not the vocabulary's."""
NO_CHANCE = ("mlp", "dlrm", "two_tower", "clip", "siglip", "wav2vec2")
"""Whose loss has another form than the cross-entropy of classes."""


def test_150_architectures_and_all_sorts() -> None:
    assert len(ZOO) >= 150
    sorts = {"decoder", "experts", "state space", "encoder", "encoder-decoder", "vision", "audio", "image and text"}
    assert sorts | {"by hand"} == {entry.family for entry in ZOO.values()}


@pytest.mark.parametrize("name", QUICK)
def test_untrained_loss_is_near_chance_and_the_gradient_is_its_slope(name: str) -> None:
    """Central difference along the gradient's direction, against the gradient's norm, in fp64."""
    example = ZOO[name].build()
    loss = example.loss()
    if name not in NO_CHANCE:
        assert loss.item() == pytest.approx(math.log(CHANCE.get(name, 96)), rel=0.25)
    example = in_fp64(example)
    torch.autograd.backward(example.loss())
    parameters = [p for p in example.model.parameters() if p.grad is not None]
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
    assert 0.0 < norm < math.inf
    losses = {}
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter += step * gradient / norm
            losses[step] = float(example.loss())
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= step * gradient / norm
    assert (losses[1e-3] - losses[-1e-3]) / 2e-3 == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_build_the_same_model_and_batch(name: str) -> None:
    torch.manual_seed(1)
    first = ZOO[name].build()
    torch.manual_seed(2)
    second = ZOO[name].build()
    assert all(torch.equal(value, second.inputs[key]) for key, value in first.inputs.items())
    assert torch.equal(first.loss(), second.loss())
