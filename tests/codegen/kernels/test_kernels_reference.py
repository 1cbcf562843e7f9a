"""The torch references, the choice between them and the kernels, and the folder as a copy beside a program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import codegen.kernels
from codegen.kernels import dispatch
from codegen.kernels.add_layer_norm import add_layer_norm
from codegen.kernels.add_rms_norm import add_rms_norm
from codegen.kernels.bias_gelu import bias_gelu
from codegen.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from codegen.kernels.dropout_add import dropout_add
from codegen.kernels.geglu import geglu
from codegen.kernels.layer_norm import layer_norm, layer_norm_reference
from codegen.kernels.layer_norm_add import layer_norm_add
from codegen.kernels.rms_norm import rms_norm, rms_norm_reference
from codegen.kernels.rms_norm_add import rms_norm_add
from codegen.kernels.rotary import rotary
from codegen.kernels.swiglu import swiglu, swiglu_reference
from codegen.kernels.tile import Tile
from codegen.runtime.dropout import dropout, dropout_key
from codegen.runtime.layout import whole

HUGGING_FACE = {
    "llama.LlamaRMSNorm": {},
    "t5.T5LayerNorm": {},
    "olmo2.Olmo2RMSNorm": {"rounds_once": True},
    "gemma3.Gemma3RMSNorm": {"rounds_once": True, "offset": 1.0},
}
"""RMS norms of transformers, and the keywords of ours that make them equal."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_rms_norm_reference_is_hugging_faces(name: str, dtype: torch.dtype) -> None:
    family, class_name = name.split(".")
    models = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    theirs = getattr(models, class_name)(65, eps=1e-5).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(65))
    x, dy = torch.randn(2, 3, 65, dtype=dtype, requires_grad=True), torch.randn(2, 3, 65, dtype=dtype)
    ours = rms_norm_reference(x, theirs.weight, 1e-5, **HUGGING_FACE[name])
    torch.testing.assert_close(ours, theirs(x), rtol=0, atol=0)
    grads = torch.autograd.grad(ours, (x, theirs.weight), dy)
    grads_theirs = torch.autograd.grad(theirs(x), (x, theirs.weight), dy)
    # T5 adds the two gradients of x in half precision.
    tolerance = torch.finfo(dtype).eps * 4 if family == "t5" else 0.0
    torch.testing.assert_close(grads, grads_theirs, rtol=tolerance, atol=tolerance)


def test_references_pass_gradcheck_in_fp64() -> None:
    torch.manual_seed(0)
    x, weight, other = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5,), (3, 5)))
    target = torch.tensor([4, -100, 0])
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-3, 1.0, True), (x, weight))
    assert torch.autograd.gradcheck(lambda a, b, c: rms_norm_add(a, b, c, 1e-3, 1.0), (x, other, weight))
    assert torch.autograd.gradcheck(swiglu, (x, other))
    assert torch.autograd.gradcheck(lambda a: cross_entropy(a, target), (x,))
    assert torch.autograd.gradcheck(lambda a, b, c: add_rms_norm(a, b, c, 1e-3), (x, other, weight))
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b, c: layer_norm(a, b, c, 1e-3), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda a, b, c: add_layer_norm(a, b, c, None, 1e-3), (x, other, weight))
    assert torch.autograd.gradcheck(lambda a, b, c: layer_norm_add(a, b, c, None, 1e-3), (x, other, weight))
    for approximate in ("none", "tanh"):
        assert torch.autograd.gradcheck(lambda a, b, how=approximate: geglu(a, b, how), (x, other))
        assert torch.autograd.gradcheck(lambda a, b, how=approximate: bias_gelu(a, b, how), (x, bias))
    grid = whole((3, 5)).grid(None, "cpu")
    assert torch.autograd.gradcheck(lambda a, b: dropout_add(a, b, 0.4, key=7, grid=grid), (x, other))
    q, k = (torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for interleaved in (False, True):
        cos, sin = torch.randn(2, 1, 3, 2 if interleaved else 4, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda a, b, c=cos, s=sin, i=interleaved: rotary(a, b, c, s, i), (q, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm_reference_is_torchs_module(dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.LayerNorm(65, eps=1e-5, bias=with_bias).to(dtype)
    parameters = list(theirs.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(65))
    x, dy = torch.randn(2, 3, 65, dtype=dtype, requires_grad=True), torch.randn(2, 3, 65, dtype=dtype)
    ours, wanted = layer_norm_reference(x, theirs.weight, theirs.bias, 1e-5), theirs(x)
    grads = torch.autograd.grad(ours, (x, *parameters), dy)
    grads_wanted = torch.autograd.grad(wanted, (x, *parameters), dy)
    # In norm: on CPU torch's own has other roundings, and in its backward pass mean and rstd in half precision.
    for a, w in zip((ours, *grads), (wanted, *grads_wanted), strict=True):
        assert a.dtype == w.dtype == dtype
        assert (a - w).norm() <= torch.finfo(dtype).eps * w.norm()


@pytest.mark.parametrize("key", [0, 1, (1 << 64) - 1, dropout_key(0, 0, 0), dropout_key(-1, 7, 3)])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 1 - 1e-9])
def test_dropout_add_has_the_mask_of_the_runtimes_dropout(key: int, p: float) -> None:
    """The generator is written down in both files. Rows that pair and rows that do not."""
    torch.manual_seed(0)
    for shape, batch_offset in (((4, 30), 0), ((3, 5, 7), 0), ((4, 30), 1 << 33)):
        x, residual = torch.randn(2, *shape).requires_grad_().unbind()
        layout = whole(shape)
        wanted = dropout(x, p, key=key, layout=layout, mesh=None, batch_offset=batch_offset) + residual
        row_offset = layout.row_offset(batch_offset)
        y = dropout_add(x, residual, p, key=key, grid=layout.grid(None, "cpu"), row_offset=row_offset)
        assert torch.equal(y, wanted)
        assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (y, wanted)))


def test_swiglu_reference_values() -> None:
    gate = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    up = torch.tensor([5.0, 2.0, 3.0], dtype=torch.float64)
    sigmoid_of_1 = 0.7310585786300049
    expected = torch.tensor([0.0, 2 * sigmoid_of_1, -3 * (1 - sigmoid_of_1)], dtype=torch.float64)
    torch.testing.assert_close(swiglu_reference(gate, up), expected)


def test_cross_entropy_reference_values() -> None:
    """Equal logits over V classes cost log(V); bf16 logits are summed in fp32; ignored rows cost nothing."""
    loss = cross_entropy_reference(torch.zeros(3, 1000, dtype=torch.bfloat16), torch.tensor([0, -100, 999]))
    log_1000 = 6.907755278982137
    torch.testing.assert_close(loss, torch.tensor([log_1000, 0.0, log_1000]))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("label", [-1, 5])
def test_cross_entropy_reference_refuses_targets_out_of_range(label: int) -> None:
    with pytest.raises(IndexError):
        cross_entropy(torch.zeros(1, 5), torch.tensor([label]))


def test_wrong_arguments_name_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"weight must have shape \(4,\).*got \(3,\)"):
        rms_norm(torch.zeros(2, 4), torch.ones(3), 1e-6)
    with pytest.raises(ValueError, match="agree in shape and dtype"):
        swiglu(torch.zeros(2, 4), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="agree in shape and dtype"):
        swiglu(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="int64"):
        cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\[N, V\]"):
        cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))


def test_dispatch_refuses_what_kernels_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton", object())
    monkeypatch.setattr(dispatch, "INTERPRETING", True)
    plain = torch.zeros(2, 3)
    assert dispatch.use_triton(plain, torch.nn.Parameter(plain))
    assert not dispatch.use_triton(plain, plain.double())
    assert not dispatch.use_triton(plain.to("meta"))
    assert not dispatch.use_triton(torch.zeros(0, 3))
    with FakeTensorMode() as mode:
        assert not dispatch.use_triton(mode.from_tensor(plain))
    monkeypatch.setattr(dispatch, "INTERPRETING", False)
    assert not dispatch.use_triton(plain)


@pytest.mark.parametrize("num_elements", [1, 2, 3, 512, 2047, 2048, 2049, 8192, 1 << 20])
def test_launch_shapes(num_elements: int) -> None:
    power = dispatch.power_of_2_at_least(num_elements)
    assert power >= num_elements and power.bit_count() == 1 and (power == 1 or power // 2 < num_elements)
    warps = Tile(4096).num_warps(num_elements)
    assert warps.bit_count() == 1 and 4 <= warps <= 32


def test_as_rows_copies_only_what_has_no_unit_stride() -> None:
    fused = torch.randn(2, 3, 10)
    half = fused.chunk(2, dim=-1)[1]
    rows = dispatch.as_rows(half)
    assert rows.data_ptr() == half.data_ptr() and rows.stride() == (10, 1)
    transposed = fused.transpose(1, 2)
    torch.testing.assert_close(dispatch.as_rows(transposed), transposed.reshape(-1, 3))
    assert dispatch.as_rows(transposed).stride() == (3, 1)


PROGRAM = """
import sys
sys.modules["triton"] = None  # as on a machine where it is not installed
import torch
from kernels.cross_entropy import cross_entropy
from kernels.dispatch import triton
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu
assert triton is None and "codegen" not in sys.modules and "autopar" not in sys.modules
x = torch.tensor([[3.0, 4.0]], requires_grad=True)
y = rms_norm(x, torch.ones(2), 0.0)
loss = cross_entropy(swiglu(y, y), torch.tensor([1]))
loss.sum().backward()
print(*(f"{value:.6f}" for value in [*y.flatten().tolist(), loss.item()]))
"""


@pytest.mark.slow
def test_copy_beside_a_program_runs_without_triton(tmp_path: Path) -> None:
    shutil.copytree(Path(codegen.kernels.__file__).parent, tmp_path / "kernels")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr[-3000:]
    y_0, y_1, loss = (float(word) for word in result.stdout.split())
    # rms of (3, 4) is sqrt(12.5); the logits are y * silu(y).
    assert (y_0, y_1) == pytest.approx((3 / 12.5**0.5, 4 / 12.5**0.5), abs=1e-6)
    logits = [y * y / (1 + 2.718281828459045**-y) for y in (y_0, y_1)]
    assert 2.718281828459045**-loss == pytest.approx(1 / (1 + 2.718281828459045 ** (logits[0] - logits[1])), abs=1e-5)
