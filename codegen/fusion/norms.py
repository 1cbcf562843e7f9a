"""Normalisations, with the addition to the residual stream before or after them where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from codegen.fusion.template import (
    FLOATS,
    Bindings,
    Either,
    Is,
    Leaf,
    Op,
    Pattern,
    Result,
    Template,
    Value,
    fused,
    is_dtype,
)
from codegen.program import Call, TensorType

SUM: Final = Op("aten.add.Tensor", (Leaf("x"), Leaf("residual")), name="sum")
_HALVES: Final = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class _Form:
    """A way to write a norm: its calls on x, one template for each call that may be the last, and whether they are for
    given tensors what the kernel computes.

    rounds_once: the keyword of an RMS norm that is rounded after the weight only.
    """

    templates: Callable[[Template], tuple[Op, ...]]
    fits: Callable[[Bindings], bool]
    rounds_once: bool = False


def _parameter(name: str) -> Either:
    """A parameter, or its copy in another dtype. The kernels need no copy: they widen a parameter as they read it."""
    return Either((Op("aten.to.dtype", (Leaf(name), Value(f"{name} dtype"))), Leaf(name)))


def _is_read_as(name: str, x: TensorType, bound: Bindings) -> bool:
    """Whether a parameter has the length of x's last dim, and it or its copy x's dtype."""
    parameter, copy = bound[name].type, bound.get(f"{name} dtype")
    is_widened = copy is not None and is_dtype(copy, x.dtype) and parameter.dtype in _HALVES
    return parameter.shape == x.shape[-1:] and (parameter.dtype == x.dtype if copy is None else is_widened)


# --- RMS norm ---------------------------------------------------------------------------------------------------------


def _wide(x: Template) -> Op:
    return Op("aten.to.dtype", (x, Value("wide")))


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
    shifted = Op("aten.add.Tensor", (mean, Value("eps")), commutes=True)
    inverse = Op("aten.rsqrt.default", (shifted,)), Op("aten.pow.Tensor_Scalar", (shifted, Is(-0.5)))
    return Op("aten.mul.Tensor", (x, Either(inverse)), commutes=True)


def _rounded_before_weight(x: Template) -> tuple[Op, ...]:
    """RMSNorm as most models write it. In half precision they widen x first and round before the weight (Hugging
    Face's, and Meta's own with type_as). T5 widens x for the mean only; the product is as wide.

    Models that do all in half precision match too; the kernel's arithmetic is fp32, so the result is a better one.
    """
    wide = _wide(x)
    same_dtype = normalised(x, _squares(x))
    either = Either((normalised(wide, _squares(wide)), normalised(x, _squares(wide)), same_dtype))
    narrowed = Op("aten.to.dtype", (either, Value("narrow"))), Op("aten.type_as.default", (either, x))
    return (Op("aten.mul.Tensor", (_parameter("weight"), Either((*narrowed, same_dtype))), commutes=True),)


def _normalizes_last_dim(bound: Bindings) -> bool:
    """Whether the mean is over the last dim, in fp32 where x is widened, and a cast after it is back to x's dtype."""
    x, dims, eps = bound["x"].type, bound["dims"].value, bound["eps"].value
    if not isinstance(eps, float) or not isinstance(dims, tuple):
        return False
    is_last = dims in ((-1,), (len(x.shape) - 1,))
    widens = "wide" not in bound or is_dtype(bound["wide"], "float32")
    narrows = "narrow" not in bound or is_dtype(bound["narrow"], x.dtype)
    return is_last and widens and narrows


def _rms_norm_fits(bound: Bindings) -> bool:
    """The last dim, a weight of its length, and a result in x's dtype, which is what the kernel returns."""
    return _normalizes_last_dim(bound) and _is_read_as("weight", bound["x"].type, bound)


def _rounded(product: Op, x: Template) -> tuple[Op, Op]:
    """The ways to round a product to x's dtype."""
    return Op("aten.type_as.default", (product, x)), Op("aten.to.dtype", (product, Value("narrow")))


def _offset_weight() -> Op:
    return Op("aten.add.Tensor", (_parameter("weight"), Value("offset")), commutes=True)


def _rounded_once(x: Template) -> tuple[Op, ...]:
    """RMSNorm that is rounded after the weight (OLMo 2), whose difference from 1 may be what is stored (Gemma)."""
    wide, weight = _wide(x), Either((_offset_weight(), _parameter("weight")))
    product = Op("aten.mul.Tensor", (normalised(wide, _squares(wide)), weight), commutes=True)
    return _rounded(product, x)


def _offset_in_fp32(x: Template) -> tuple[Op, ...]:
    """The same in fp32, where nothing is rounded."""
    return (Op("aten.mul.Tensor", (normalised(x, _squares(x)), _offset_weight()), commutes=True),)


def _rounded_once_fits(bound: Bindings) -> bool:
    """The last dim, a weight of its length, an offset added in fp32, and a result in x's dtype."""
    x, weight, copy = bound["x"].type, bound["weight"].type, bound.get("weight dtype")
    is_wide = copy is not None and is_dtype(copy, "float32")
    if weight.shape != x.shape[-1:] or weight.dtype not in FLOATS or not (copy is None or is_wide):
        return False
    if "offset" in bound and not (isinstance(bound["offset"].value, (int, float)) and is_wide | _is_fp32(weight)):
        return False
    return _normalizes_last_dim(bound)


def _in_fp32(bound: Bindings) -> bool:
    """All in fp32, so that no rounding is left out."""
    return _is_fp32(bound["x"].type) and _rounded_once_fits(bound)


def _is_fp32(tensor: TensorType) -> bool:
    return tensor.dtype == "float32"


def _weightless(x: Template) -> tuple[Op, ...]:
    """RMSNorm without a weight."""
    wide = _wide(x)
    return (*_rounded(normalised(wide, _squares(wide)), x), normalised(x, _squares(x)))


def _weightless_fits(bound: Bindings) -> bool:
    """All in fp32, or in fp32 between."""
    return ("wide" in bound or _is_fp32(bound["x"].type)) and _normalizes_last_dim(bound)


def _torch_rms_norm(x: Template) -> tuple[Op, ...]:
    """torch's call."""
    weight = Either((_parameter("weight"), Is(None)))
    return (Op("aten.rms_norm.default", (x, Value("dims"), weight, Value("eps"))),)


# --- layer norm -------------------------------------------------------------------------------------------------------


def _torch_layer_norm(x: Template) -> tuple[Op, ...]:
    """torch's call; its sixth argument chooses among implementations of long ago."""
    weight, bias = (Either((_parameter(name), Is(None))) for name in ("weight", "bias"))
    args = (x, Value("dims"), weight, bias, Value("eps"))
    return (Op("aten.layer_norm.default", (*args, Value("cudnn"))),)


def _weighted_difference(x: Template) -> Op:
    """weight * (x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)."""
    difference = Op("aten.sub.Tensor", (x, Op("aten.mean.dim", (x, Value("dims"), Is(True)))))
    return Op("aten.mul.Tensor", (_parameter("weight"), normalised(difference, _squares(difference))), commutes=True)


def _written_layer_norm(x: Template) -> tuple[Op, ...]:
    """Cohere's, call by call: no bias, and rounded after the weight."""
    return _rounded(_weighted_difference(_wide(x)), x)


def _written_layer_norm_in_fp32(x: Template) -> tuple[Op, ...]:
    return (_weighted_difference(x),)


def _torch_norm_fits(bound: Bindings) -> bool:
    """The last dim, and parameters of its length in x's dtype."""
    x, dims = bound["x"].type, bound["dims"].value
    fit = all(_is_read_as(name, x, bound) for name in ("weight", "bias") if name in bound)
    return fit and dims == x.shape[-1:] and isinstance(bound["eps"].value, float)


# --- forms ------------------------------------------------------------------------------------------------------------

_RMS_NORMS: Final = (
    # Those that round once come first, as what they begin with is a norm of x's wide copy.
    _Form(_rounded_once, _rounded_once_fits, rounds_once=True),
    _Form(_offset_in_fp32, _in_fp32, rounds_once=True),
    _Form(_rounded_before_weight, _rms_norm_fits),
    _Form(_torch_rms_norm, _torch_norm_fits, rounds_once=True),
)
_LAYER_NORMS: Final = (
    _Form(_torch_layer_norm, _torch_norm_fits),
    _Form(_written_layer_norm, _rounded_once_fits),
    _Form(_written_layer_norm_in_fp32, _in_fp32),
)


def _agrees(fits: Callable[[Bindings], bool], bound: Bindings) -> bool:
    """`fits`, where the addition neither broadcasts nor promotes."""
    return bound["x"].type.is_alike(bound["residual"].type) and fits(bound)


def _norm(names: tuple[str, ...], rounds_once: bool, pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    """A call on `names`; "weight" and "bias" are None where there is none, and a sum is a second result."""
    call = fused(pattern.target, bound, tuple(name for name in names if name in bound), last)
    tensors = (bound[name].value if name in bound else None for name in names)
    sums = bound["sum"].value.results if "sum" in bound else ()
    kwargs: list[tuple[str, Any]] = [("offset", float(bound["offset"].value))] if "offset" in bound else []
    kwargs += [("rounds_once", True)] if rounds_once else []
    args = (*tensors, bound["eps"].value)
    return (replace(call, args=args, kwargs=tuple(kwargs), results=(*last.results, *sums)),)


def _alone(record: Pattern, parameters: tuple[str, ...], form: _Form) -> tuple[Pattern, ...]:
    """A form of a norm of x."""
    build = partial(_norm, ("x", *parameters), form.rounds_once)
    templates = form.templates(Leaf("x"))
    return tuple(replace(record, template=template, fits=form.fits, build=build) for template in templates)


def _of_sum(record: Pattern, parameters: tuple[str, ...], form: _Form) -> tuple[Pattern, ...]:
    """A form of a norm of x + residual: the sum is a result too."""
    of_sum = replace(
        record,
        name=f"sum and {record.name}",
        target=record.target.replace("kernels.", "kernels.add_"),
        leaves=("sum", *parameters),
        fits=partial(_agrees, form.fits),
        build=partial(_norm, ("x", "residual", *parameters), form.rounds_once),
        results=(Result("sum", ("x", "residual"), is_call=True),),
        saves=("sum", "weight"),
        no_gradient=("residual",),
    )
    return tuple(replace(of_sum, template=template) for template in form.templates(SUM))


def _with_sum(record: Pattern, parameters: tuple[str, ...], form: _Form) -> tuple[Pattern, ...]:
    """A form of a norm of x that is added to the residual."""
    with_sum = replace(
        record,
        name=f"{record.name} and sum",
        target=f"{record.target}_add",
        leaves=("x", "residual", *parameters),
        fits=partial(_agrees, form.fits),
        build=partial(_norm, ("x", "residual", *parameters), form.rounds_once),
        no_gradient=("residual",),
    )
    sums = (Op("aten.add.Tensor", (Leaf("residual"), norm), commutes=True) for norm in form.templates(Leaf("x")))
    return tuple(replace(with_sum, template=template) for template in sums)


RMS_NORM: Final = Pattern(
    name="RMSNorm",
    target="kernels.rms_norm",
    leaves=("x", "weight"),
    template=_rounded_before_weight(Leaf("x"))[0],
    fits=_rms_norm_fits,
    saves=("x", "weight"),
    row_bytes=4,  # rstd
    launches=(1, 2),
    needs_whole=True,
)
_LAYER_NORM: Final = Pattern(
    name="LayerNorm",
    target="kernels.layer_norm",
    leaves=("x", "weight", "bias"),
    template=_torch_layer_norm(Leaf("x"))[0],
    fits=_torch_norm_fits,
    saves=("x", "weight"),
    row_bytes=8,  # mean and rstd
    launches=(1, 2),
    needs_whole=True,
)

PATTERNS: Final[tuple[Pattern, ...]] = tuple(
    pattern
    for place in (_with_sum, _of_sum, _alone)
    for record, parameters, forms in (
        (RMS_NORM, ("weight",), _RMS_NORMS),
        (_LAYER_NORM, ("weight", "bias"), _LAYER_NORMS),
        # Last, as norms with a weight have the same calls.
        (replace(RMS_NORM, name="RMSNorm without a weight"), ("weight",), (_Form(_weightless, _weightless_fits),)),
    )
    for form in forms
    for pattern in place(record, parameters, form)
)
"""A norm goes with the sum after it rather than with the one before: between two norms of one sum, the first has it,
which then is written once and read once; and a sum may be the next layer's."""
