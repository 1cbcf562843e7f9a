"""Cross entropy, of logits and with the layer that makes them."""

from __future__ import annotations

import functools

import torch

from benchmarks.gpu.cases.case import BOTH, FORWARD, Case, Kernel, liger, random, targets


def _cross_entropy(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.cross_entropy import cross_entropy, cross_entropy_reference

    # Forward reads the logits; backward reads them again and writes their gradient.
    size = torch.Size(shape).numel() * dtype.itemsize
    inputs = (random(shape, dtype, device), targets(*shape, device))
    moved = {FORWARD: size, BOTH: 3 * size}
    # Its gradient takes the place of the logits.
    others = liger("liger_cross_entropy", lambda f: lambda logits, target: f(logits, target, reduction="sum"))
    return Case("cross_entropy", shape, dtype, inputs, cross_entropy, cross_entropy_reference, moved, others=others)


def _linear_cross_entropy(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

    # Three products of N x H x V. The fused forward pass, ours as liger's, already does all three.
    num_rows, hidden, num_classes = shape
    x, weight = random((num_rows, hidden), dtype, device), random((num_classes, hidden), dtype, device)
    with torch.no_grad():
        weight.mul_(hidden**-0.5)
    size, product = (x.numel() + weight.numel()) * dtype.itemsize, 2 * num_rows * hidden * num_classes
    return Case(
        "linear_cross_entropy",
        shape,
        dtype,
        (x, weight, targets(num_rows, num_classes, device)),
        # Sums: in fp16 the gradients of a mean over thousands of rows are below what is rounded as usual.
        functools.partial(linear_cross_entropy, num_targets=1),
        functools.partial(linear_cross_entropy_reference, num_targets=1),
        {FORWARD: size, BOTH: 2 * size},
        {FORWARD: product, BOTH: 3 * product},
        others=liger("liger_fused_linear_cross_entropy", lambda f: f),
    )


# Timed: Llama 3 8B's (tokens, vocabulary); its output layer, whole and one rank's of 8.
KERNELS = {
    "cross_entropy": Kernel(
        _cross_entropy,
        checked=((4, 2), (3, 7), (70, 1000), (33, 50257)),
        interpreted=((3, 7), (5, 65)),
        timed=((4096, 128256),),
    ),
    "linear_cross_entropy": Kernel(
        _linear_cross_entropy,
        checked=((70, 48, 1000), (3000, 256, 50257), (5000, 64, 128256)),
        interpreted=((6, 16, 65),),
        timed=((4096, 4096, 128256), (8192, 4096, 16032)),
    ),
}
