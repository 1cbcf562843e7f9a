"""Normalisations, with the addition to the residual stream before them where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from codegen.fusion.template import Bindings, Either, Is, Leaf, Op, Pattern, Result, Template, Value, fused, is_dtype
from codegen.program import Call, TensorType

SUM: Final = Op("aten.add.Tensor", (Leaf("x"), Leaf("residual")), name="sum")
_HALVES: Final = ("bfloat16", "float16")


def _parameter(name: str) -> Either:
    """A parameter, or its copy in x's wider dtype. The kernels need no copy: they widen a parameter as they read it."""
    return Either((Op("aten.to.dtype", (Leaf(name), Value(f"{name} dtype"))), Leaf(name)))


def _is_read_as(name: str, x: TensorType, bound: Bindings) -> bool:
    """Whether a parameter has the length of x's last dim, and it or its copy x's dtype."""
    parameter, copy = bound[name].type, bound.get(f"{name} dtype")
    is_widened = copy is not None and is_dtype(copy, x.dtype) and parameter.dtype in _HALVES
    return parameter.shape == x.shape[-1:] and (parameter.dtype == x.dtype if copy is None else is_widened)


# --- RMS norm ---------------------------------------------------------------------------------------------------------


def _squares(x: Template) -> tuple[Op, ...]:
    """The ways to write x ** 2."""
    return (
        Op("aten.pow.Tensor_Scalar", (x, Is(2))),
        Op("aten.mul.Tensor", (x, x)),
        Op("aten.square.default", (x,)),
    )


def normalised(x: Template, squares: tuple[Op, ...]) -> Op:
    """x / sqrt(mean(x ** 2) + eps), the squares written in one of these ways."""
    mean = Op("aten.mean.dim", (Either(squares), Value("dims"), Is(True)))
    rsqrt = Op("aten.rsqrt.default", (Op("aten.add.Tensor", (mean, Value("eps")), commutes=True),))
    return Op("aten.mul.Tensor", (x, rsqrt), commutes=True)


def _rms_norm_template(x: Template) -> Op:
    """RMSNorm as models write it. In half precision they widen x first and round before the weight (Hugging Face's, and
    Meta's own with type_as).

    Models that do all in half precision match too; the kernel's arithmetic is fp32, so the result is a better one.
    """
    wide = Op("aten.to.dtype", (x, Value("wide")))
    same_dtype = normalised(x, _squares(x))
    either = Either((normalised(wide, _squares(wide)), same_dtype))
    narrowed = Op("aten.to.dtype", (either, Value("narrow"))), Op("aten.type_as.default", (either, x))
    return Op("aten.mul.Tensor", (_parameter("weight"), Either((*narrowed, same_dtype))), commutes=True)


def _rms_norm_fits(bound: Bindings) -> bool:
    """The last dim, a weight of its length, and a result in x's dtype, which is what the kernel returns."""
    x, dims, eps = bound["x"].type, bound["dims"].value, bound["eps"].value
    if not isinstance(eps, float) or not isinstance(dims, tuple):
        return False
    is_last = dims in ((-1,), (len(x.shape) - 1,))
    widens = "wide" not in bound or is_dtype(bound["wide"], "float32")
    narrows = "narrow" not in bound or is_dtype(bound["narrow"], x.dtype)
    return is_last and widens and narrows and _is_read_as("weight", x, bound)


def _torch_rms_norm_template(x: Template) -> Op:
    """torch's call."""
    return Op("aten.rms_norm.default", (x, Value("dims"), _parameter("weight"), Value("eps")))


# --- layer norm -------------------------------------------------------------------------------------------------------


def _layer_norm_template(x: Template) -> Op:
    """torch's call; its sixth argument chooses among implementations of long ago."""
    args = (x, Value("dims"), _parameter("weight"), Either((_parameter("bias"), Is(None))), Value("eps"))
    return Op("aten.layer_norm.default", (*args, Value("cudnn")))


def _torch_norm_fits(bound: Bindings) -> bool:
    """The last dim, and parameters of its length in x's dtype."""
    x, dims = bound["x"].type, bound["dims"].value
    fit = all(_is_read_as(name, x, bound) for name in ("weight", "bias") if name in bound)
    return fit and dims == x.shape[-1:] and isinstance(bound["eps"].value, float)


# --- calls ------------------------------------------------------------------------------------------------------------


def _agrees(fits: Callable[[Bindings], bool], bound: Bindings) -> bool:
    """`fits`, where the addition neither broadcasts nor promotes."""
    return bound["x"].type.is_alike(bound["residual"].type) and fits(bound)


def _norm(names: tuple[str, ...], pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    """A call on `names`; "bias" is None where there is none, and a sum is a second result."""
    call = fused(pattern.target, bound, tuple(name for name in names if name in bound), last)
    tensors = (bound[name].value if name in bound else None for name in names)
    sums = bound["sum"].value.results if "sum" in bound else ()
    return (replace(call, args=(*tensors, bound["eps"].value), results=(*last.results, *sums)),)


_SUM_AND_RMS_NORM: Final = Pattern(
    name="sum and RMSNorm",
    target="kernels.add_rms_norm",
    leaves=("sum", "weight"),
    template=_rms_norm_template(SUM),
    fits=partial(_agrees, _rms_norm_fits),
    build=partial(_norm, ("x", "residual", "weight")),
    results=(Result("sum", ("x", "residual"), is_call=True),),
    saves=("sum", "weight"),
    row_bytes=4,  # rstd
    launches=(1, 2),
    needs_whole=True,
    no_gradient=("residual",),
)
RMS_NORM: Final = Pattern(
    name="RMSNorm",
    target="kernels.rms_norm",
    leaves=("x", "weight"),
    template=_rms_norm_template(Leaf("x")),
    fits=_rms_norm_fits,
    build=partial(_norm, ("x", "weight")),
    saves=("x", "weight"),
    row_bytes=4,
    launches=(1, 2),
    needs_whole=True,
)

PATTERNS: Final[tuple[Pattern, ...]] = (
    _SUM_AND_RMS_NORM,
    replace(
        _SUM_AND_RMS_NORM,
        template=_torch_rms_norm_template(SUM),
        fits=partial(_agrees, _torch_norm_fits),
    ),
    Pattern(
        name="sum and LayerNorm",
        target="kernels.add_layer_norm",
        leaves=("sum", "weight", "bias"),
        template=_layer_norm_template(SUM),
        fits=partial(_agrees, _torch_norm_fits),
        build=partial(_norm, ("x", "residual", "weight", "bias")),
        results=(Result("sum", ("x", "residual"), is_call=True),),
        saves=("sum", "weight"),
        row_bytes=8,  # mean and rstd
        launches=(1, 3),
        needs_whole=True,
        no_gradient=("residual",),
    ),
    RMS_NORM,
    replace(RMS_NORM, template=_torch_rms_norm_template(Leaf("x")), fits=_torch_norm_fits),
    Pattern(
        name="LayerNorm",
        target="kernels.layer_norm",
        leaves=("x", "weight", "bias"),
        template=_layer_norm_template(Leaf("x")),
        fits=_torch_norm_fits,
        build=partial(_norm, ("x", "weight", "bias")),
        saves=("x", "weight"),
        row_bytes=8,
        launches=(1, 3),
        needs_whole=True,
    ),
)
