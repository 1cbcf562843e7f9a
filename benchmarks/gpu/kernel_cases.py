"""What kernels.py measures: each kernel at a shape, the same formula by others, and the least work that it takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Operation = Callable[..., Any]  # of tensors, to one or to a tuple of them
# Relative error in norm against fp64: a few roundings of the storage dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# An e4m3 number is off by 2.6 % in the mean square, a product of two by 1.4 times that.
_TOLERANCE_E4M3 = 0.05
_QUANTIZE_BLOCK = 256
_NUM_PARTS = 8
FORWARD, BOTH = "forward", "forward+backward"


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape.

    num_bytes_moved maps the directions that are timed to the fewest bytes that device memory must move; vectors
    (weight, target, loss) are left out. num_flops is likewise, of matrix products, where these are what takes time.
    exact_error: a relative error that is found in another way than by running `eager` in fp64; tolerance: in place of
    the dtype's. others: further implementations by name, timed last, since they may overwrite their inputs.
    """

    kernel: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[torch.Tensor, ...]
    fused: Operation
    eager: Operation
    num_bytes_moved: dict[str, int]
    num_flops: dict[str, int] = field(default_factory=dict)
    exact_error: Callable[[], float] | None = None
    tolerance: float | None = None
    others: dict[str, Operation] = field(default_factory=dict)

    @property
    def differentiable(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in self.inputs if tensor.requires_grad)


def make_case(kernel: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """Fresh random inputs of `kernel` at `shape`."""
    if kernel not in MAKERS:
        raise ValueError(f"no kernel {kernel!r}; there are {', '.join(MAKERS)}")
    return MAKERS[kernel](shape, dtype, device)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def _targets(num_rows: int, num_classes: int, device: str) -> torch.Tensor:
    target = torch.randint(num_classes, (num_rows,), device=device)
    target[::7] = -100
    return target


def _liger(name: str, adapt: Callable[[Operation], Operation]) -> dict[str, Operation]:
    """liger-kernel's function of that name with our arguments, where it is installed and there is a GPU."""
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        return {}
    functional = importlib.import_module("liger_kernel.transformers.functional")
    return {"liger": adapt(getattr(functional, name))}


def _rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.rms_norm import rms_norm, rms_norm_reference

    # Forward reads x, writes y; backward reads x and dy, writes dx.
    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "rms_norm",
        shape,
        dtype,
        (_random(shape, dtype, device), _random(shape[-1:], dtype, device)),
        lambda x, weight: rms_norm(x, weight, 1e-6),
        lambda x, weight: rms_norm_reference(x, weight, 1e-6),
        {FORWARD: 2 * size, BOTH: 5 * size},
        others=_liger("liger_rms_norm", lambda f: lambda x, weight: f(x, weight, 1e-6, 0.0, "llama", False)),
    )


def _add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference

    # Forward reads two, writes two; backward reads the sum and two gradients, writes one.
    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "add_rms_norm",
        shape,
        dtype,
        (_random(shape, dtype, device), _random(shape, dtype, device), _random(shape[-1:], dtype, device)),
        lambda x, residual, weight: add_rms_norm(x, residual, weight, 1e-6),
        lambda x, residual, weight: add_rms_norm_reference(x, residual, weight, 1e-6),
        {FORWARD: 4 * size, BOTH: 8 * size},
        others=_liger("liger_fused_add_rms_norm", lambda f: lambda x, r, w: f(x, r, w, 1e-6, 0.0, "llama", False)),
    )


def _layer_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.layer_norm import layer_norm

    size = torch.Size(shape).numel() * dtype.itemsize
    parameters = (_random(shape[-1:], dtype, device), _random(shape[-1:], dtype, device))

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    return Case(
        "layer_norm",
        shape,
        dtype,
        (_random(shape, dtype, device), *parameters),
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
        eager,
        {FORWARD: 2 * size, BOTH: 5 * size},
        others=_liger("liger_layer_norm", lambda f: lambda x, weight, bias: f(x, weight, bias, 1e-5)),
    )


def _add_layer_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.add_layer_norm import add_layer_norm

    size = torch.Size(shape).numel() * dtype.itemsize
    parameters = (_random(shape[-1:], dtype, device), _random(shape[-1:], dtype, device))

    def eager(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return torch.nn.functional.layer_norm(total, x.shape[-1:], weight, bias, 1e-5), total

    return Case(
        "add_layer_norm",
        shape,
        dtype,
        (_random(shape, dtype, device), _random(shape, dtype, device), *parameters),
        lambda x, residual, weight, bias: add_layer_norm(x, residual, weight, bias, 1e-5),
        eager,
        {FORWARD: 4 * size, BOTH: 8 * size},
    )


def _rotary(shape: tuple[int, ...], dtype: torch.dtype, device: str, interleaved: bool = False) -> Case:
    """shape: (batch, tokens, query heads, key heads, components, rotated ones); heads lie after tokens."""
    from codegen.kernels.rotary import rotary, rotary_reference

    batch, num_tokens, num_q_heads, num_k_heads, num_components, num_rotated = shape
    heads_dim = 2 if interleaved else 1
    q, k = (
        torch.randn(batch, num_tokens, heads, num_components, dtype=dtype, device=device).transpose(1, 3 - heads_dim)
        for heads in (num_q_heads, num_k_heads)
    )
    position = torch.arange(num_tokens, device=device)[None, :, None]
    angle = position * 1e4 ** -(torch.arange(num_rotated // 2, device=device) / (num_rotated // 2))
    angle = angle if interleaved else torch.cat((angle, angle), -1)
    inputs = (q.requires_grad_(), k.requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype))
    size = (q.numel() + k.numel()) * dtype.itemsize
    return Case(
        "rotary_interleaved" if interleaved else "rotary",
        shape,
        dtype,
        inputs,
        lambda q, k, cos, sin: rotary(q, k, cos, sin, interleaved, heads_dim),
        lambda q, k, cos, sin: rotary_reference(q, k, cos, sin, interleaved, heads_dim),
        {FORWARD: 2 * size, BOTH: 4 * size},
        # Its results, and later its gradients, take the place of the inputs.
        others={} if interleaved or num_rotated < num_components else _liger("liger_rope", lambda f: f),
    )


def _rotary_interleaved(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    return _rotary(shape, dtype, device, interleaved=True)


def _geglu(shape: tuple[int, ...], dtype: torch.dtype, device: str, approximate: str = "none") -> Case:
    from codegen.kernels.geglu import geglu, geglu_reference

    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "geglu" if approximate == "none" else "geglu_tanh",
        shape,
        dtype,
        (_random(shape, dtype, device), _random(shape, dtype, device)),
        lambda gate, up: geglu(gate, up, approximate),
        lambda gate, up: geglu_reference(gate, up, approximate),
        {FORWARD: 3 * size, BOTH: 8 * size},
        # Only with tanh.
        others={} if approximate == "none" else _liger("liger_geglu", lambda f: f),
    )


def _geglu_tanh(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    return _geglu(shape, dtype, device, "tanh")


def _bias_gelu(shape: tuple[int, ...], dtype: torch.dtype, device: str, approximate: str = "none") -> Case:
    from codegen.kernels.bias_gelu import bias_gelu, bias_gelu_reference

    # Forward reads one, writes one; backward reads two, writes one.
    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "bias_gelu" if approximate == "none" else "bias_gelu_tanh",
        shape,
        dtype,
        (_random(shape, dtype, device), _random(shape[-1:], dtype, device)),
        lambda x, bias: bias_gelu(x, bias, approximate),
        lambda x, bias: bias_gelu_reference(x, bias, approximate),
        {FORWARD: 2 * size, BOTH: 5 * size},
    )


def _bias_gelu_tanh(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    return _bias_gelu(shape, dtype, device, "tanh")


def _dropout_add(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.dropout_add import dropout_add, dropout_add_reference
    from codegen.runtime.dropout import dropout, dropout_key
    from codegen.runtime.layout import whole

    # Forward reads two, writes one; backward reads one, writes one. The mask comes from the element's index.
    size = torch.Size(shape).numel() * dtype.itemsize
    key, layout, p = dropout_key(1, 2, 3), whole(shape), 0.1
    options: dict[str, Any] = {"key": key, "grid": layout.grid(None, device)}
    return Case(
        "dropout_add",
        shape,
        dtype,
        (_random(shape, dtype, device), _random(shape, dtype, device)),
        lambda x, residual: dropout_add(x, residual, p, **options),
        lambda x, residual: dropout_add_reference(x, residual, p, **options),
        {FORWARD: 3 * size, BOTH: 5 * size},
        others={
            "runtime-dropout": lambda x, residual: dropout(x, p, key=key, layout=layout, mesh=None) + residual,
            "torch-dropout": lambda x, residual: torch.nn.functional.dropout(x, p) + residual,
        },
    )


def _swiglu(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.swiglu import swiglu, swiglu_reference

    # Forward reads two, writes one; backward reads three, writes two.
    size = torch.Size(shape).numel() * dtype.itemsize
    inputs = (_random(shape, dtype, device), _random(shape, dtype, device))
    moved = {FORWARD: 3 * size, BOTH: 8 * size}
    others = _liger("liger_swiglu", lambda f: f)
    return Case("swiglu", shape, dtype, inputs, swiglu, swiglu_reference, moved, others=others)


def _cross_entropy(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.cross_entropy import cross_entropy, cross_entropy_reference

    # Forward reads the logits; backward reads them again and writes their gradient.
    size = torch.Size(shape).numel() * dtype.itemsize
    inputs = (_random(shape, dtype, device), _targets(*shape, device))
    moved = {FORWARD: size, BOTH: 3 * size}
    # Its gradient takes the place of the logits.
    others = _liger("liger_cross_entropy", lambda f: lambda logits, target: f(logits, target, reduction="sum"))
    return Case("cross_entropy", shape, dtype, inputs, cross_entropy, cross_entropy_reference, moved, others=others)


def _linear_cross_entropy(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

    # Three products of N x H x V. The fused forward pass, ours as liger's, already does all three.
    num_rows, hidden, num_classes = shape
    x, weight = _random((num_rows, hidden), dtype, device), _random((num_classes, hidden), dtype, device)
    with torch.no_grad():
        weight.mul_(hidden**-0.5)
    size, product = (x.numel() + weight.numel()) * dtype.itemsize, 2 * num_rows * hidden * num_classes
    return Case(
        "linear_cross_entropy",
        shape,
        dtype,
        (x, weight, _targets(num_rows, num_classes, device)),
        linear_cross_entropy,
        linear_cross_entropy_reference,
        {FORWARD: size, BOTH: 2 * size},
        {FORWARD: product, BOTH: 3 * product},
        others=_liger("liger_fused_linear_cross_entropy", lambda f: f),
    )


def _adamw(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """shape: (tensors, elements of each); dtype: of gradients and copies."""
    from codegen.kernels.adamw import adamw_, adamw_table

    num_tensors, numel = shape
    numel_all = num_tensors * numel
    columns = {name: torch.zeros(shape, device=device).unbind() for name in ("parameter", "exp_avg", "exp_avg_sq")}
    for parameter in columns["parameter"]:
        parameter.normal_()
    gradients = torch.randn(shape, dtype=dtype, device=device).unbind()
    copies = torch.zeros(shape, dtype=dtype, device=device).unbind()
    table = adamw_table(columns["parameter"], gradients, columns["exp_avg"], columns["exp_avg_sq"], copies)
    step, lr = torch.zeros((), device=device), 1e-3

    def ours() -> torch.Tensor:
        adamw_(table, step, lr)
        return copies[0]

    def torchs(**options: bool) -> Operation:
        leaves = [parameter.clone().requires_grad_() for parameter in columns["parameter"]]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        optimizer = torch.optim.AdamW(leaves, lr=lr, **options)

        def run() -> torch.Tensor:
            torch._foreach_copy_([leaf.grad for leaf in leaves], list(gradients))
            optimizer.step()
            torch._foreach_copy_(list(copies), [leaf.detach() for leaf in leaves])
            return copies[0]

        return run

    def error() -> float:
        leaf = columns["parameter"][-1].double().requires_grad_()
        leaf.grad = gradients[-1].double()
        before = leaf.detach().clone()
        torch.optim.AdamW([leaf], lr=lr).step()
        ours()
        change = leaf.detach() - before
        return ((columns["parameter"][-1].double() - leaf.detach()).norm() / change.norm()).item()

    moved = {FORWARD: numel_all * (24 + 2 * dtype.itemsize)}
    # Of the change, which is some thousandths of the parameters that it is added to in fp32.
    others = {"torch-fused": torchs(fused=True)}
    return Case(
        "adamw", shape, dtype, (), ours, torchs(foreach=True), moved, exact_error=error, tolerance=2e-4, others=others
    )


def _grad_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """shape: (tensors, elements of each)."""
    from codegen.kernels.chunk_table import chunk_table
    from codegen.kernels.grad_norm import squared_norm

    gradients = torch.randn(shape, dtype=dtype, device=device).unbind()
    table = chunk_table(gradients)

    def ours() -> torch.Tensor:
        return squared_norm(table).sqrt()

    def eager() -> torch.Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def error() -> float:
        exact = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
        return (abs(ours().double() - exact) / exact).item()

    moved = {FORWARD: torch.Size(shape).numel() * dtype.itemsize}
    return Case("grad_norm", shape, dtype, (), ours, eager, moved, exact_error=error, tolerance=1e-5)


def _fp8_quantize(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.fp8 import dequantize_rows, quantize_rows, quantize_rows_reference

    x = torch.randn(shape, dtype=dtype, device=device)

    def error() -> float:
        exact = x.double()
        return ((dequantize_rows(*quantize_rows(x), torch.float32).double() - exact).norm() / exact.norm()).item()

    return Case(
        "fp8_quantize",
        shape,
        dtype,
        (x,),
        lambda x: quantize_rows(x)[0],
        lambda x: quantize_rows_reference(x)[0],
        {FORWARD: x.numel() * (dtype.itemsize + 1)},
        exact_error=error,
        tolerance=_TOLERANCE_E4M3,
    )


def _fp8_linear(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """shape: (rows, inputs, outputs); the weight's gradient in fp8 too."""
    from codegen.kernels.fp8 import fp8_linear

    num_rows, num_inputs, num_outputs = shape
    inputs = (_random((num_rows, num_inputs), dtype, device), _random((num_outputs, num_inputs), dtype, device))
    size = (sum(t.numel() for t in inputs) + num_rows * num_outputs) * dtype.itemsize
    product = 2 * num_rows * num_inputs * num_outputs
    return Case(
        "fp8_linear",
        shape,
        dtype,
        inputs,
        lambda x, weight: fp8_linear(x, weight, fp8_grad_weight=True),
        torch.nn.functional.linear,
        {FORWARD: size, BOTH: 3 * size},
        {FORWARD: product, BOTH: 3 * product},
        tolerance=_TOLERANCE_E4M3,
        others={"fast-accumulation": lambda x, weight: fp8_linear(x, weight, None, True, True)},
    )


def _quantize(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.quantize import dequantize_blocks, quantize_blocks, quantize_blocks_reference

    x = torch.randn(shape, dtype=dtype, device=device)

    def error() -> float:
        back = dequantize_blocks(*quantize_blocks(x, _QUANTIZE_BLOCK), x.shape, torch.float32)
        return ((back.double() - x.double()).norm() / x.double().norm()).item()

    return Case(
        "quantize_int8",
        shape,
        dtype,
        (x,),
        lambda x: quantize_blocks(x, _QUANTIZE_BLOCK)[0],
        lambda x: quantize_blocks_reference(x, _QUANTIZE_BLOCK)[0],
        {FORWARD: x.numel() * (dtype.itemsize + 1)},
        exact_error=error,
        # Normal numbers: a step of 1 / 127 of the largest of 256, some 2.8, and 0.29 steps in the mean square.
        tolerance=0.012,
        others={"stochastic": lambda x: quantize_blocks(x, _QUANTIZE_BLOCK, seed=1)[0]},
    )


def _dequantize_sum(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.quantize import dequantize_sum, dequantize_sum_reference, quantize_blocks

    parts = [quantize_blocks(torch.randn(shape, device=device), _QUANTIZE_BLOCK) for _ in range(_NUM_PARTS)]
    codes, scales = (torch.stack(tensors) for tensors in zip(*parts, strict=True))

    def error() -> float:
        exact = (codes.double() * scales.double()[..., None]).sum(0).flatten()[: torch.Size(shape).numel()].view(shape)
        return ((dequantize_sum(codes, scales, shape, dtype).double() - exact).norm() / exact.norm()).item()

    return Case(
        "dequantize_sum",
        shape,
        dtype,
        (codes, scales),
        lambda codes, scales: dequantize_sum(codes, scales, shape, dtype),
        lambda codes, scales: dequantize_sum_reference(codes, scales, shape, dtype),
        {FORWARD: torch.Size(shape).numel() * (_NUM_PARTS + dtype.itemsize)},
        exact_error=error,
    )


MAKERS: dict[str, Callable[[tuple[int, ...], torch.dtype, str], Case]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "add_layer_norm": _add_layer_norm,
    "rotary": _rotary,
    "rotary_interleaved": _rotary_interleaved,
    "geglu": _geglu,
    "geglu_tanh": _geglu_tanh,
    "bias_gelu": _bias_gelu,
    "bias_gelu_tanh": _bias_gelu_tanh,
    "dropout_add": _dropout_add,
    "swiglu": _swiglu,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "adamw": _adamw,
    "grad_norm": _grad_norm,
    "fp8_quantize": _fp8_quantize,
    "fp8_linear": _fp8_linear,
    "quantize_int8": _quantize,
    "dequantize_sum": _dequantize_sum,
}

# Checked, not timed: odd sizes, rows shared by a tile, rows longer than the largest tile. No shape whose exact gradient
# is 0: the error is relative.
ODD_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rms_norm": [(1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)],
    "add_rms_norm": [(1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)],
    "layer_norm": [(1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)],
    "add_layer_norm": [(1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)],
    "rotary": [(2, 5, 3, 1, 6, 6), (2, 130, 40, 8, 128, 128), (1, 70, 64, 64, 96, 24)],
    "rotary_interleaved": [(2, 5, 3, 1, 6, 4), (2, 130, 16, 16, 256, 64), (1, 70, 70, 2, 128, 128)],
    "geglu": [(1, 1), (3, 7), (2, 3, 65), (130, 5001)],
    "geglu_tanh": [(1, 1), (3, 7), (2, 3, 65), (130, 5001)],
    "bias_gelu": [(3, 7), (2, 3, 65), (1000, 128), (1300, 5001)],
    "bias_gelu_tanh": [(3, 7), (2, 3, 65), (1000, 128), (1300, 5001)],
    "dropout_add": [(3, 7), (2, 3, 65), (1000, 128), (130, 5001), (130, 20002)],
    "swiglu": [(1, 1), (3, 7), (2, 3, 65), (130, 5001)],
    "cross_entropy": [(4, 2), (3, 7), (70, 1000), (33, 50257)],
    "linear_cross_entropy": [(70, 48, 1000), (3000, 256, 50257), (5000, 64, 128256)],
    "adamw": [(3, 7), (5, 33000), (2, 65536)],
    "grad_norm": [(3, 7), (5, 33000), (2, 65536)],
    "fp8_quantize": [(70, 1000), (33, 20001)],
    "fp8_linear": [(64, 128, 48), (70, 100, 50)],
    "quantize_int8": [(70, 1000), (100003,)],
    "dequantize_sum": [(70, 1000), (100003,)],
}
# The conversion to e4m3 is not among them: Triton's interpreter drops a carry in it.
SMOKE_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rms_norm": [(3, 7), (2, 3, 65)],
    "add_rms_norm": [(3, 7)],
    "layer_norm": [(3, 7)],
    "add_layer_norm": [(3, 7)],
    "rotary": [(2, 5, 3, 1, 6, 6)],
    "rotary_interleaved": [(2, 5, 3, 1, 6, 4)],
    "geglu": [(3, 7)],
    "geglu_tanh": [(3, 7)],
    "bias_gelu": [(3, 7)],
    "bias_gelu_tanh": [(3, 7)],
    "dropout_add": [(3, 7), (5, 6)],
    "swiglu": [(3, 7), (2, 3, 65)],
    "cross_entropy": [(3, 7), (5, 65)],
    "linear_cross_entropy": [(6, 16, 65)],
    "adamw": [(3, 70)],
    "grad_norm": [(3, 70)],
    "quantize_int8": [(3, 301)],
    "dequantize_sum": [(3, 301)],
}
# Llama 3 8B's (tokens, hidden), (tokens, intermediate), (tokens, vocabulary), heads, its output layer, whole and one
# rank's of 8, and its second MLP layer; a query-key norm; 405B's hidden; GPT-2's and GPT-3's in layer norms; GPT-NeoX
# 20B's and GPT-J's heads; a GELU after four times Llama's hidden; 256 M parameters; 128 M elements of a message.
TIMED_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rms_norm": [(8192, 4096), (8192 * 32, 128), (8192, 16384)],
    "add_rms_norm": [(8192, 4096), (8192, 16384)],
    "layer_norm": [(8192, 4096), (8192, 768), (8192, 12288)],
    "add_layer_norm": [(8192, 4096), (8192, 768), (8192, 12288)],
    "rotary": [(1, 8192, 32, 8, 128, 128), (4, 2048, 64, 64, 96, 24)],
    "rotary_interleaved": [(4, 2048, 16, 16, 256, 64)],
    "geglu": [(8192, 14336)],
    "geglu_tanh": [(8192, 14336)],
    "bias_gelu": [(8192, 16384)],
    "bias_gelu_tanh": [(8192, 16384)],
    "dropout_add": [(8192, 4096)],
    "swiglu": [(8192, 14336)],
    "cross_entropy": [(4096, 128256)],
    "linear_cross_entropy": [(4096, 4096, 128256), (8192, 4096, 16032)],
    "adamw": [(16, 1 << 24)],
    "grad_norm": [(16, 1 << 24)],
    "fp8_quantize": [(8192, 4096)],
    "fp8_linear": [(8192, 4096, 14336)],
    "quantize_int8": [(1 << 27,)],
    "dequantize_sum": [(1 << 27,)],
}
