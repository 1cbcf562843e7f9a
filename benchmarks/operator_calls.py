"""Calls of every operator that has a rule: written by its schema, or by hand where a schema does not say enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.operators.schemas import find_op
from codegen.schemas import Argument, Schema, schema_of

Written = tuple[str, tuple[Any, ...], dict[str, Any]]
"""An overload with its arguments; tensors are `T`s."""


@dataclass(frozen=True)
class T:
    """A tensor argument; floating ones are differentiated unless `grad` is False."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    grad: bool = True

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(self.shape, self.dtype, self.grad and self.dtype.is_floating_point)


def ints(*shape: int) -> T:
    return T(shape, torch.int64)


def bools(*shape: int) -> T:
    return T(shape, torch.bool)


def f(*shape: int) -> T:
    return T(shape)


def make_node(op: str, *args: Any, **kwargs: Any) -> tuple[Node, tuple[TensorMeta, ...]]:
    """The node and its inputs' metas; the output metas come from running the operator on zeros."""
    metas: list[TensorMeta] = []
    numbers = itertools.count()

    def ref(value: Any) -> Any:
        if isinstance(value, T):
            metas.append(value.meta)
            return Ref(f"x{next(numbers)}")
        return tuple(ref(item) for item in value) if isinstance(value, list | tuple) else value

    def real(value: Any) -> Any:
        if isinstance(value, T):
            return torch.zeros(value.shape, dtype=value.dtype)
        return [real(item) for item in value] if isinstance(value, list | tuple) else value

    overload = find_op(op)
    assert overload is not None, op
    result = overload(*(real(a) for a in args), **{k: real(v) for k, v in kwargs.items()})
    results = tuple(result) if isinstance(result, tuple | list) else (result,)
    if not all(isinstance(r, torch.Tensor) for r in results):
        raise TypeError(f"{op} returns no tensor")
    node_args = tuple(ref(a) for a in args)
    node_kwargs = tuple((k, ref(v)) for k, v in kwargs.items())
    differentiable = any(meta.requires_grad for meta in metas)
    outputs = tuple(TensorMeta(tuple(r.shape), r.dtype, differentiable and r.dtype.is_floating_point) for r in results)
    return Node("call", op, node_args, node_kwargs, outputs), tuple(metas)


_PADS = ("reflection", "replication")
_FOURIER = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_GATES = [f(8, 3), f(8, 2), f(8), f(8)]
_UPSAMPLES: list[tuple[str, int, tuple[bool, ...]]] = [
    *((f"{kind}{n}d", n, ()) for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    *((f"upsample_{kind}", n, (False,)) for kind, n in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3))),
    *((name, 2, (False,)) for name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")),
]
"""(interpolation, dims of space, what is given before the scales)"""

BY_HAND: dict[str, list[tuple[Any, ...]]] = {
    "linear.default": [(f(4, 6, 12), f(6, 12))],
    "mm.default": [(f(4, 6), f(6, 12))],
    "bmm.default": [(f(6, 4, 6), f(6, 6, 12))],
    "mv.default": [(f(4, 6), f(6))],
    "dot.default": [(f(6), f(6))],
    "outer.default": [(f(6), f(4))],
    "matmul.default": [(f(4, 6, 12), f(12, 6)), (f(4, 6), f(6))],
    "addmm.default": [(f(4, 6), f(4, 12), f(12, 6)), (f(6), f(4, 12), f(12, 6))],
    "baddbmm.default": [(f(4, 6, 12), f(4, 6, 6), f(4, 6, 12))],
    "einsum.default": [("bhqd,bhkd->bhqk", [f(2, 4, 6, 6), f(2, 4, 6, 6)])],
    "conv1d.default": [(f(2, 4, 6), f(4, 4, 3))],
    "conv2d.default": [(f(2, 4, 4, 4), f(4, 4, 3, 3))],
    "conv3d.default": [(f(2, 2, 3, 3, 3), f(2, 2, 2, 2, 2))],
    **{f"{kind}_pool{n}d.default": [(f(2, 4, *([6] * n)), [2] * n)] for n in (1, 2, 3) for kind in ("max", "avg")},
    **{f"max_pool{n}d_with_indices.default": [(f(2, 4, *([6] * n)), [2] * n)] for n in (1, 2, 3)},
    **{f"adaptive_{k}_pool{n}d.default": [(f(2, 4, *([6] * n)), [3] * n)] for n in (1, 2, 3) for k in ("max", "avg")},
    "scaled_dot_product_attention.default": [(f(2, 4, 6, 4), f(2, 4, 6, 4), f(2, 4, 6, 4))],
    "layer_norm.default": [(f(4, 6, 12), [12])],
    "native_layer_norm.default": [(f(4, 6, 12), [12], f(12), f(12), 1e-5)],
    "rms_norm.default": [(f(4, 6, 12), [12])],
    "batch_norm.default": [
        (f(4, 6, 4), f(6), f(6), T((6,), grad=False), T((6,), grad=False), training, 0.1, 1e-5, False)
        for training in (True, False)
    ],
    "group_norm.default": [(f(4, 12, 3), 6)],
    "embedding.default": [(f(12, 6), ints(4, 6))],
    "gather.default": [(f(4, 6, 12), 2, ints(4, 6, 4))],
    "take_along_dim.default": [(f(4, 6), ints(4, 6), 1)],
    "index_select.default": [(f(4, 6), 1, ints(12))],
    "index.Tensor": [(f(6, 4, 12), [None, ints(6, 4)]), (f(4, 6, 12), [ints(4), None, ints(4)])],
    "one_hot.default": [(ints(4, 6), 12)],
    "cross_entropy_loss.default": [
        (f(12, 6), ints(12)),
        (f(4, 6, 12), ints(4, 12)),
        (f(6), ints()),
        (f(12, 6), f(12, 6)),
    ],
    "nll_loss.default": [(f(12, 6), ints(12))],
    "nll_loss_nd.default": [(f(12, 6), ints(12)), (f(4, 6, 12), ints(4, 12))],
    "nll_loss2d.default": [(f(4, 6, 4, 2), ints(4, 4, 2))],
    "multi_margin_loss.default": [(f(12, 6), ints(12)), (f(6), ints())],
    "multilabel_margin_loss.default": [(f(12, 6), ints(12, 6))],
    "view.default": [
        (f(4, 6, 12), [24, 12]),
        (
            f(
                1,
            ),
            [],
        ),
    ],
    "_unsafe_view.default": [(f(4, 6, 12), [24, 12])],
    "reshape.default": [
        (f(6, 12, 4), [4, 3, 24]),
        (
            f(
                1,
            ),
            [],
        ),
    ],
    "unflatten.int": [(f(4, 12), -1, [3, 4])],
    "permute.default": [(f(4, 6, 12), [2, 0, 1])],
    "diagonal_scatter.default": [(f(4, 4, 6), f(6, 4))],
    "expand.default": [(f(4, 1, 6), [4, 12, 6])],
    "broadcast_to.default": [(f(4, 1, 6), [4, 12, 6])],
    "expand_as.default": [(f(1, 6), f(4, 6))],
    "broadcast_tensors.default": [([f(4, 1, 6), f(12, 6)],)],
    "repeat.default": [(f(4, 6), [2, 4, 3])],
    "repeat_interleave.self_int": [(f(4, 6), 4, 1)],
    "transpose.int": [(f(4, 6, 12), 1, -1)],
    "swapaxes.default": [(f(4, 6, 12), 0, 2)],
    "swapdims.default": [(f(4, 6, 12), 0, 2)],
    "slice.Tensor": [(f(4, 12),)],
    "narrow.default": [(f(4, 12), 1, 6, 6)],
    "select.int": [(f(4, 6), 1, -1), (f(4, 6), -1, 2)],
    "split.Tensor": [(f(12, 24), 6)],
    "split.sizes": [(f(12, 24), [6, 6])],
    "split_with_sizes.default": [(f(12, 24), [6, 6])],
    "chunk.default": [(f(12, 24), 2)],
    "unbind.int": [(f(4, 6),)],
    "cat.default": [([f(4, 6), f(4, 6)],)],
    "stack.default": [([f(4, 6), f(4, 6)],)],
    "pad.default": [(f(4, 6, 6), [1, 2])],
    "constant_pad_nd.default": [(f(4, 6), [0, 2])],
    "tril.default": [(f(4, 6, 6),)],
    "triu.default": [(f(4, 6, 6),)],
    "roll.default": [(f(4, 6), [1], [1])],
    "flip.default": [(f(4, 6), [0])],
    "unsqueeze.default": [(f(4, 6), 1)],
    "squeeze.default": [(f(2, 1, 6),)],
    "squeeze.dim": [(f(2, 1, 6), 1)],
    "squeeze.dims": [(f(2, 1, 6, 1), [1, -1])],
    "t.default": [(f(4, 6),)],
    "numpy_T.default": [(f(4, 6),)],
    "flatten.using_ints": [(f(4, 6, 12),)],
    "topk.default": [(f(4, 6, 12), 3)],
    **{f"{name}.default": [(f(4, 6, 6),)] for name in ("_linalg_det", "_linalg_slogdet", "linalg_inv_ex")},
    "_linalg_eigh.default": [(f(4, 6, 6), "L", False)],
    "linalg_matrix_exp.default": [(f(4, 2, 4, 4),)],
    "_linalg_solve_ex.default": [(f(4, 6, 6), f(4, 6, 2))],
    "linalg_cross.default": [(f(4, 6, 3), f(1, 6, 3))],
    "bucketize.Tensor": [(T((4, 6), grad=False), T((6,), grad=False))],
    "channel_shuffle.default": [(f(4, 6, 6, 4), 2)],
    "instance_norm.default": [(f(4, 6, 4, 6), f(6), f(6), None, None, True, 0.1, 1e-5, False)],
    "scatter_reduce.two": [(f(4, 6), 1, ints(4, 6), f(4, 6), "amax")],
    "glu.default": [(f(4, 12),)],
    "where.self": [(bools(4, 6), f(4, 6), f(6))],
    "where.ScalarOther": [(bools(4, 6), f(4, 6), -1.0)],
    "where.ScalarSelf": [(bools(4, 6), 0.5, f(4, 6))],
    "where.Scalar": [(bools(4, 6), 0.5, 1.5)],
    "masked_fill.Scalar": [(f(4, 6), bools(6), 0.5)],
    "masked_fill.Tensor": [(f(4, 6), bools(4, 6), f())],
    "dropout.default": [(f(4, 6), 0.5, True), (f(4, 6), 0.0, True), (f(4, 6), 0.5, False)],
    "to.dtype": [(f(4, 6), torch.float64), (f(4, 6), torch.bfloat16), (ints(4, 6), torch.float32)],
    "_to_copy.default": [(f(4, 6),)],
    "type_as.default": [(ints(4, 6), f(4, 6))],
    "full.default": [([4, 6], 2.0), ([4, 6], 1)],
    **{f"{name}.default": [([4, 6],)] for name in ("zeros", "ones")},
    "copy.default": [(T((4, 6), grad=False), T((4, 6), grad=False))],
    "soft_margin_loss.default": [(f(4, 6), T((4, 6), grad=False))],
    "view.dtype": [],
    "where.default": [],
    "empty.memory_format": [],
    "new_empty.default": [],
    "empty_like.default": [],
    **{f"new_{name}.default": [(f(4, 6), [4, 6])] for name in ("zeros", "ones")},
    "new_full.default": [(f(4, 6), [4, 6], 2.0)],
    "full_like.default": [(f(4, 6), 3.0)],
    "scalar_tensor.default": [(2.5,)],
    "arange.default": [(12,), (12.0,)],
    "arange.start": [(2, 26), (2.0, 26)],
    "arange.start_step": [(2, 26), (2, 26, 2), (26, 2, -2), (0, 12, 1.0)],
    **{"softmax.int": [(f(4, 6, 12), -1)], "log_softmax.int": [(f(4, 6, 12), -1)]},
    **{f"_{name}.default": [(f(4, 6), 1, False)] for name in ("softmax", "log_softmax")},
    "logcumsumexp.default": [(f(4, 6), 1)],
    "logsumexp.default": [(f(4, 6), [1])],
    **{f"{name}.default": [(bools(4, 6), bools(4, 6))] for name in ("logical_or", "logical_xor")},
    "logical_and.default": [(bools(4, 6), bools(4, 6)), (ints(4, 6), ints(4, 6)), (f(4, 6), f(4, 6))],
    "scatter.src": [(f(4, 6), 1, ints(4, 2), f(4, 2))],
    "scatter.value": [(f(4, 6), 1, ints(4, 2), 0.0), (f(4, 6), 0, ints(2, 6), 1.5)],
    "scatter_add.default": [(f(4, 6), 1, ints(4, 12), f(4, 12))],
    "index_add.default": [(f(4, 6), 0, ints(12), f(12, 6))],
    "expert_linear.default": [(f(12, 6), f(4, 6, 12), ints(12)), (f(12, 6), f(4, 6, 12), ints(12), f(4, 12))],
    "pixel_shuffle.default": [(f(2, 24, 6, 6), 2)],
    "pixel_unshuffle.default": [(f(2, 6, 12, 12), 2)],
    "im2col.default": [(f(4, 6, 4, 4), [3, 3], [1, 1], [1, 1], [1, 1])],
    "col2im.default": [(f(4, 54, 16), [4, 4], [3, 3], [1, 1], [1, 1], [1, 1])],
    "grid_sampler.default": [(f(4, 6, 4, 4), f(4, 6, 6, 2), 0, 0, False)],
    "conv_transpose1d.default": [(f(4, 6, 4), f(6, 12, 3))],
    **{f"conv_transpose{n}d.input": [(f(2, 4, *([3] * n)), f(4, 4, *([2] * n)))] for n in (2, 3)},
    **{f"{k}_pad{n}d.default": [(f(4, 6, *([4] * n)), [1] * 2 * n)] for n in (1, 2, 3) for k in _PADS},
    **{f"{name}.default": [(f(4, 6, *([2] * n)), [4] * n, *more)] for name, n, more in _UPSAMPLES},
    **{f"{name}.vec": [(f(4, 6, *([2] * n)), [4] * n, *more, None)] for name, n, more in _UPSAMPLES},
    **{f"fft_{kind}{n}.default": [(f(4, 6, 6),)] for kind in _FOURIER for n in ("", "2", "n")},
    "view_as_complex.default": [(f(4, 6, 2),)],
    "imag.default": [(T((4, 6), torch.complex64, grad=False),)],
    "view_as_real.default": [(T((4, 6), torch.complex64, grad=False),)],
    "lstm.input": [(f(6, 4, 3), [f(1, 4, 2)] * 2, _GATES, True, 1, 0.0, True, False, first) for first in (False,)],
    **{f"{name}.data": [] for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "gru.input": [(f(4, 6, 3), f(1, 4, 2), [f(6, 3), f(6, 2)], False, 1, 0.0, True, False, True)],
    **{
        f"rnn_{name}.input": [(f(6, 4, 3), f(1, 4, 2), [f(2, 3), f(2, 2)], False, 1, 0.0, True, False, False)]
        for name in ("tanh", "relu")
    },
}
"""Arguments of an overload whose schema alone does not say what it takes; an empty list: nothing to compare."""

INTEGERS = ("bitwise_", "__and__", "__or__", "__xor__", "__iand__", "__ior__", "floor_divide", "logical_")
"""Prefixes of operators that are (also) called on integers."""

SPECIAL_VALUES: dict[str, tuple[Any, ...]] = {
    "dim": (0, 1), "ignore_index": (0, 2), "reduction": (0, 2), "padding_idx": (0, 3), "diagonal": (1, -1),
    "dtype": (torch.float64,), "approximate": ("tanh",), "rounding_mode": ("floor", "trunc"), "mode": ("reflect",),
    "groups": (2,), "stride": (2,), "padding": (1,), "dilation": (2,), "ceil_mode": (True,), "start": (2, -2),
    "end": (2, -2), "step": (2,), "decimals": (1,), "correction": (0, 2), "dims": (1,), "shifts": (2,),
    "start_dim": (1,), "memory_format": (), "layout": (), "device": (), "pin_memory": (),
    "generator": (), "path": (), "divisor_override": (3,), "eps": (0.1,), "ord": (1, 3), "p": (1, 3),
    "enable_gqa": (True,), "scale": (0.3,), "dropout_p": (0.5,), "is_causal": (True,), "nan": (0.5,),
    "scales": (2.0,), "scales_h": (2.0,), "scales_w": (2.0,), "scales_d": (2.0,),  # those of the sizes above
    "posinf": (1.0,), "neginf": (-1.0,), "min": (-0.5,), "max": (0.5,), "implicit": (), "copy": (),
    "scale_grad_by_freq": (), "sparse": (), "sparse_grad": (), "end_dim": (1, -2), "non_blocking": (),
}  # fmt: skip
"""Values of optional arguments by name. scale_grad_by_freq counts the whole batch's rows, and is refused in a trace;
gradients of programs are dense."""


def base_calls(packet: str) -> Iterator[Written]:
    """The plainest calls of an operator's overloads."""
    namespace, name = packet.split(".")[:2]
    for overload in getattr(getattr(torch.ops, namespace), name).overloads():
        key = f"{name}.{overload}"
        schema = schema_of(f"{namespace}.{key}")
        if schema is None or "out" in overload.split("_") or not _is_written_by_schema(schema) and key not in BY_HAND:
            continue
        if key in BY_HAND:
            yield from ((f"{namespace}.{key}", args, {}) for args in BY_HAND[key])
            continue
        kinds = (False, True) if name.startswith(INTEGERS) else (False,)
        for whole in kinds:
            args = [_required(a, whole) for a in schema if a.is_required and not a.is_keyword]
            named = {a.name: _required(a, whole) for a in schema if a.is_required and a.is_keyword}
            if not any(value is _unknown for value in (*args, *named.values())):
                yield f"{namespace}.{key}", tuple(args), named


def _is_written_by_schema(schema: Schema) -> bool:
    return not any(a.name == "out" or "Dimname" in a.type or (a.type == "str" and a.is_required) for a in schema)


_unknown = object()


def _required(argument: Argument, whole: bool) -> Any:
    if argument.name in ("min", "max") and "Tensor" in argument.type:
        return f(4, 6)
    table: dict[str, Any] = {
        "Tensor": ints(4, 6) if whole else f(4, 6), "Optional[Tensor]": ints(4, 6) if whole else f(4, 6),
        "number": 2, "int": 1, "float": 0.5, "bool": True, "List[int]": [1], "Optional[List[int]]": [1],
        "Optional[int]": 1, "Optional[number]": 2, "Optional[str]": "floor", "Optional[float]": 0.5,
        "List[Tensor]": [f(4, 6), f(4, 6)],
    }  # fmt: skip
    return table.get(argument.type, _unknown)


def varied(base: Written) -> Iterator[Written]:
    """The call with one optional argument at a time away from its default, by name."""
    op, args, kwargs = base
    schema = schema_of(op) or ()
    given = {a.name for a in schema[: len(args)]} | set(kwargs)
    for argument in schema:
        if argument.is_required or argument.name in given:
            continue
        for value in _values(argument, base):
            if not argument.is_default(tuple(value) if isinstance(value, list) else value):
                yield op, args, {**kwargs, argument.name: value}


def _values(argument: Argument, base: Written) -> tuple[Any, ...]:
    if argument.type in ("Optional[Tensor]", "Optional[List[Tensor]]"):
        return _tensors(argument.name, base)
    if argument.name in SPECIAL_VALUES:
        values = SPECIAL_VALUES[argument.name]
        if "List" in argument.type:
            return tuple([value] * max(1, _dims(base)) if argument.name != "dim" else [value] for value in values)
        return values
    if argument.type == "bool":
        return (not argument.default,)
    if "int" in argument.type:
        return (0, 2)
    if "float" in argument.type or "number" in argument.type:
        return (0.0, 0.5 + float(argument.default or 0))
    return ()


def _dims(base: Written) -> int:
    """How many spatial dims a convolution or a pool has."""
    name = base[0].split(".")[1]
    return next((int(c) for c in name if c.isdigit()), 1)


def _tensors(name: str, base: Written) -> tuple[Any, ...]:
    """Tensors that a call takes besides: affine parameters of a channel, weights of classes, masks."""
    op, args, _ = base
    packet, first = op.split(".")[1], args[0]
    shape = first.shape if isinstance(first, T) else ()
    if packet in ("linear", "conv1d", "conv2d", "conv3d"):
        return (f(args[1].shape[0]),)
    if packet in ("layer_norm", "rms_norm"):
        return (f(shape[-1]),)
    if packet == "group_norm":
        return (f(shape[1]),)
    if packet in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "multi_margin_loss"):
        return (T((shape[1] if len(shape) > 1 else shape[0],), grad=False),)
    if packet == "scaled_dot_product_attention":
        return (bools(2, 1, 6, 6), f(1, 4, 6, 6))
    return (T(shape, grad=False),)
