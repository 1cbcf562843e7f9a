"""Every candidate tile of every kernel in Triton's interpreter: right on odd shapes, and what it must not change.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import codegen.kernels
from benchmarks.gpu.cases.every import KERNELS, make_case
from benchmarks.gpu.kernels import _outputs, relative_error
from codegen.kernels import tuning

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.usefixtures("exact_e4m3", "exact_bf16")]
MODULES = [importlib.import_module(f"codegen.kernels.{m.name}") for m in pkgutil.iter_modules(codegen.kernels.__path__)]
NUM_CANDIDATES = max(len(getattr(m, name)) for m in MODULES for name in dir(m) if name.endswith("TILES"))

# Short rows that share a tile, and rows longer than some candidates' tiles, or all: the first candidates of norms have
# 16384 elements forward and 8192 backward.
SHAPES = {
    "rms_norm": [(37, 65), (3, 9001)],
    "add_rms_norm": [(37, 65), (2, 17001)],
    "layer_norm": [(37, 65), (2, 17001)],
    "add_layer_norm": [(37, 65), (3, 9001)],
    "rms_norm_add": [(37, 65), (2, 17001)],
    "layer_norm_add": [(37, 65), (3, 9001)],
    "rotary": [(1, 2, 40, 8, 128, 128), (2, 1, 70, 3, 96, 24)],
    "rotary_interleaved": [(1, 2, 16, 16, 256, 64)],
    "swiglu": [(3, 5001)],
    "geglu": [(3, 5001)],
    "geglu_tanh": [(3, 5001)],
    "bias_gelu": [(37, 65), (11, 5001)],
    "bias_gelu_tanh": [(11, 5001)],
    "dropout_add": [(37, 65), (3, 5001), (3, 9002)],
    "cross_entropy": [(4, 20001)],
    "linear_cross_entropy": [(6, 16, 20001)],
    "grouped_linear": [(3, 50, 33, 70)],
    "adamw": [(2, 33001)],
    "grad_norm": [(2, 33001)],
    "fp8_quantize": [(3, 17001)],
    "quantize_int8": [(3, 5001)],
    "dequantize_sum": [(3, 5001)],
}
# Sums over a row or over rows; all other kernels promise equal bits.
SUMS = {"rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "bias_gelu", "bias_gelu_tanh", "cross_entropy"}
SUMS |= {"rms_norm_add", "layer_norm_add", "linear_cross_entropy", "grouped_linear", "grad_norm"}


def set_candidate(monkeypatch, index):
    """All kernels launch with their candidate `index`, or their last."""
    for module in MODULES:
        for name in dir(module):
            if name.endswith("TILES"):
                monkeypatch.setattr(module, name, (getattr(module, name)[index:] or getattr(module, name)[-1:])[:1])


def results(kernel, shape):
    """Outputs and gradients of random inputs that are always the same."""
    torch.manual_seed(0)
    case = make_case(kernel, shape, torch.bfloat16, "cpu")
    outputs = _outputs(case.fused(*case.inputs))
    if not case.differentiable:
        return outputs
    return *outputs, *torch.autograd.grad(outputs, case.differentiable, [torch.randn_like(o) for o in outputs])


def assert_equal_bits(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        assert torch.equal(a.reshape(-1).view(torch.uint8), e.reshape(-1).view(torch.uint8))


def test_every_kernel_is_here():
    """fp8_linear has the kernel of fp8_quantize, and torch's product."""
    assert set(SHAPES) == set(KERNELS) - {"fp8_linear"} and set(SUMS) < set(KERNELS) and NUM_CANDIDATES >= 5


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SHAPES)
@pytest.mark.parametrize("index", range(NUM_CANDIDATES))
def test_is_right(kernel, index, monkeypatch):
    plain = [] if kernel in SUMS else results(kernel, SHAPES[kernel][-1])
    set_candidate(monkeypatch, index)
    for shape in SHAPES[kernel]:
        relative_error(make_case(kernel, shape, torch.float32, "cpu"))
    if kernel not in SUMS:
        assert_equal_bits(results(kernel, SHAPES[kernel][-1]), plain)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(name, marks=[] if name in ("adamw", "linear_cross_entropy") else pytest.mark.slow)
        for name in SHAPES
    ],
)
def test_measuring_changes_nothing(kernel, monkeypatch):
    """As on a GPU that meets the case for the first time: all candidates run, some twice, before the launch."""
    shape = SHAPES[kernel][0]
    plain, measured = results(kernel, shape), []

    def measure(name, tiles, run_tile, *_, **__):
        for tile in (*tiles, tiles[0]):
            run_tile(tile)
        measured.append(name)
        return tiles[0]

    for module in MODULES:
        if getattr(module, "choose", None) is tuning.choose or module is tuning:
            monkeypatch.setattr(module, "choose", measure)
    assert_equal_bits(results(kernel, shape), plain)
    assert measured, "the kernel did not ask for a tile"
