"""Rules of pointwise operators: every result dim is a factor, operands align right, broadcast dims have no factor.

One row per operator: the sets of arguments in which it is jointly linear (separated by commas).
"""

from __future__ import annotations

import typing
from typing import Any

import torch

from autopar.ir.draws import IN_TRAINING
from autopar.rules.call import Call, broadcast_groups, make_rule
from autopar.rules.rule import Lowering, Rule

LINEAR: dict[str, str] = {
    "add": "self other",
    "sub": "self other",
    "mul": "self, other",
    "div": "self",
    "neg": "self",
    "clone": "self",
    "contiguous": "self",
    "alias": "self",
    "detach": "self",
    "lift_fresh_copy": "self",
    "lift_fresh": "self",
    "positive": "self",
    "polar": "abs",
    "real": "self",
    "imag": "self",
    "complex": "real imag",
    "conj_physical": "self",
    "deg2rad": "self",
    "rad2deg": "self",
    "conj": "self",
    "copy": "src",
    "where": "self other",
    "masked_fill": "self value",
    "dropout": "input",
    "expand": "self",
    "expand_as": "self",
    "broadcast_to": "self",
    "broadcast_tensors": "tensors",
    "tanh_backward": "grad_output",
    "sigmoid_backward": "grad_output",
    "threshold_backward": "grad_output",
    "gelu_backward": "grad_output",
    "leaky_relu_backward": "grad_output",
    "elu_backward": "grad_output",
    "hardtanh_backward": "grad_output",
    "hardsigmoid_backward": "grad_output",
    "hardswish_backward": "grad_output",
    "softplus_backward": "grad_output",
    "softshrink_backward": "grad_output",
    "hardshrink_backward": "grad_out",
}
"""Operators that are linear in some arguments. div with a rounding mode is excluded by `pointwise`; the second tensor
of expand_as is sharded like the result."""

NONLINEAR = (
    "abs",
    "acos",
    "asin",
    "atan",
    "atan2",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "ceil",
    "celu",
    "clamp",
    "clamp_max",
    "clamp_min",
    "cos",
    "cosh",
    "elu",
    "eq",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "fill",
    "floor",
    "floor_divide",
    "fmod",
    "ge",
    "gelu",
    "gt",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "leaky_relu",
    "lerp",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_sigmoid",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logaddexp",
    "lt",
    "maximum",
    "minimum",
    "mish",
    "nan_to_num",
    "ne",
    "pow",
    "reciprocal",
    "relu",
    "relu6",
    "remainder",
    "round",
    "rsqrt",
    "rsub",
    "selu",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "softplus",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "threshold",
    "xlogy",
    "addcmul",
    "addcdiv",
    "__and__",
    "__or__",
    "__xor__",
    "__iand__",
    "__ior__",
    "acosh",
    "angle",
    "asinh",
    "atanh",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "clip",
    "copysign",
    "digamma",
    "erfinv",
    "fmax",
    "fmin",
    "frac",
    "hardshrink",
    "heaviside",
    "hypot",
    "i0",
    "isneginf",
    "isposinf",
    "ldexp",
    "lgamma",
    "logaddexp2",
    "logit",
    "mvlgamma",
    "nextafter",
    "polygamma",
    "_prelu_kernel",
    "sgn",
    "signbit",
    "sinc",
    "softshrink",
    "special_entr",
    "special_erfcx",
    "special_i0e",
    "special_i1",
    "special_i1e",
    "special_log_ndtr",
    "special_ndtri",
    "special_xlog1py",
    "special_zeta",
    "trunc",
)

CASTS = ("to", "_to_copy", "type_as")


def pointwise(call: Call) -> Rule:
    """Return the rule of an operator in LINEAR or NONLINEAR."""
    shape = call.outputs[0].shape
    factors = [f"d{i}" for i in range(len(shape))]
    sizes = dict(zip(factors, shape, strict=True))
    inputs = [broadcast_groups(meta.shape, factors, sizes) for meta in call.inputs]
    outputs = [[[f] for f in factors] for _ in call.outputs]
    specs = LINEAR.get(call.packet, "")
    if call.get("rounding_mode") is not None:
        specs = ""
    lowerings = {}
    if call.packet == "dropout" and call["train"] and call["p"] > 0:
        lowerings["*"] = Lowering("dropout")
    return make_rule(call, inputs, outputs, sizes, linear=specs.split(",") if specs else (), lowerings=lowerings)


def cast(call: Call) -> Rule:
    """dtype and device changes: linear unless precision is lost, because partial sums must not be rounded."""
    source, target = call.inputs[0].dtype, call.outputs[0].dtype
    shape = call.outputs[0].shape
    factors = [f"d{i}" for i in range(len(shape))]
    sizes = dict(zip(factors, shape, strict=True))
    dims = [[f] for f in factors]
    is_float = source.is_floating_point and source.itemsize > 1  # torch does not promote float8, which has no sums
    widening = is_float and torch.promote_types(source, target) == target
    # A second tensor only provides its dtype. It shares no factor with the result, so its own factors are blocked.
    lending: list[list[list[str]]] = []
    for number, meta in enumerate(call.inputs[1:]):
        names = [f"o{number}.{i}" for i in range(len(meta.shape))]
        sizes.update(zip(names, meta.shape, strict=True))
        lending.append([[name] for name in names])
    blocked = [name for name in sizes if name.startswith("o")]
    return make_rule(call, [dims, *lending], [dims], sizes, blocked=blocked, linear=("self",) if widening else ())


def glu(call: Call) -> Rule:
    """Gated linear unit: the gated dim is halved; its halves are sectioned alike."""
    x = call.tensor("self")
    dim = call["dim"] % len(x.shape)
    factors = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(factors, call.outputs[0].shape, strict=True)) | {"half": 2}
    wide = [["half", f] if i == dim else [f] for i, f in enumerate(factors)]
    return make_rule(call, [wide], [[[f] for f in factors]], sizes, blocked={"half"})


_LIBRARY: Any = typing.cast(Any, torch.library).Library("autopar", "FRAGMENT")
_LIBRARY.define("in_training(Tensor training, Tensor evaluation) -> Tensor")


def _in_training(training: torch.Tensor, evaluation: torch.Tensor) -> torch.Tensor:
    """Run the operator in proofs; a program calls a method of its module instead."""
    return torch.where(torch.ones_like(training, dtype=torch.bool), training, evaluation)


_LIBRARY.impl("in_training", _in_training, "CompositeImplicitAutograd")


def in_training(call: Call) -> Rule:
    """in_training: operands and result have one shape, and partial sums stay partial sums."""
    factors = [f"d{i}" for i in range(len(call.outputs[0].shape))]
    sizes = dict(zip(factors, call.outputs[0].shape, strict=True))
    dims = [[f] for f in factors]
    return make_rule(call, [dims, dims], [dims], sizes, linear=("training evaluation",))


TABLE = {
    IN_TRAINING.removesuffix(".default"): in_training,
    **{f"aten.{name}": pointwise for name in (*LINEAR, *NONLINEAR)},
    **{f"aten.{name}": cast for name in CASTS},
    "aten.glu": glu,
}
