"""The records of torch's operators, and of autopar's own that stand beside them in a graph.

An operator without traits needs no record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from autopar.operators.record import Creation, Finite, Layout, Loss, Operator, Product
from codegen.runtime.random_operators import RECURRENT

_QUERY_KEY_VALUE = ("query", "key", "value")


def _moving() -> Iterator[Operator]:
    """Yield operators that move elements and compute nothing."""
    same, reshaped, permuted = Layout.SAME, Layout.RESHAPED, Layout.PERMUTED
    part, repeated, joined = Layout.PART, Layout.REPEATED, Layout.JOINED

    yield Operator(name="alias", layout=same, is_view=True)
    yield Operator(name="detach", layout=same, is_view=True, is_constant=True)
    yield Operator(name="lift_fresh", layout=same, is_view=True)
    yield Operator(name="lift_fresh_copy", layout=same)
    yield Operator(name="clone", layout=same)
    yield Operator(name="contiguous", layout=same)  # the operand itself, if it is contiguous
    yield Operator(name="to", layout=same)  # the operand itself, if it has that dtype
    yield Operator(name="to_copy", layout=same)

    yield Operator(name="view", layout=reshaped, is_view=True, shape="size")
    yield Operator(name="unsafe_view", layout=reshaped, shape="size")
    yield Operator(name="reshape", layout=reshaped, is_view=True, shape="shape")
    yield Operator(name="flatten", layout=reshaped, is_view=True)
    yield Operator(name="unflatten", layout=reshaped, is_view=True, sizes="sizes")
    yield Operator(name="squeeze", layout=reshaped, is_view=True)
    yield Operator(name="unsqueeze", layout=reshaped, is_view=True)
    yield Operator(name="view_as", layout=reshaped, is_view=True)

    yield Operator(name="transpose", layout=permuted, is_view=True)
    yield Operator(name="permute", layout=permuted, is_view=True)
    yield Operator(name="t", layout=permuted, is_view=True)
    yield Operator(name="numpy_T", layout=permuted, is_view=True)
    yield Operator(name="swapaxes", layout=permuted, is_view=True)
    yield Operator(name="swapdims", layout=permuted, is_view=True)
    yield Operator(name="movedim", layout=permuted, is_view=True)

    yield Operator(name="slice", layout=part, is_view=True, sizes="end", short_name="sliced")
    yield Operator(name="select", layout=part, is_view=True)
    yield Operator(name="narrow", layout=part, is_view=True, sizes="length")
    yield Operator(name="split", layout=part, is_view=True)
    yield Operator(name="split_with_sizes", layout=part, is_view=True)
    yield Operator(name="unsafe_split", layout=part)
    yield Operator(name="chunk", layout=part, is_view=True)
    yield Operator(name="unbind", layout=part, is_view=True)
    yield Operator(name="diagonal", layout=part, is_view=True)

    yield Operator(name="expand", layout=repeated, is_view=True, shape="size")
    yield Operator(name="expand_as", layout=repeated, is_view=True)
    yield Operator(name="broadcast_to", layout=repeated, is_view=True, shape="size")
    yield Operator(name="repeat", layout=repeated, sizes="repeats")
    yield Operator(name="repeat_interleave", layout=repeated)

    yield Operator(name="cat", layout=joined, short_name="joined")
    yield Operator(name="stack", layout=joined)


def _products() -> Iterator[Operator]:
    """Yield operators that multiply and sum."""
    yield Operator(name="linear", product=Product.MATRICES, added="bias", weight=1)
    yield Operator(name="addmm", product=Product.MATRICES, added="self", weight=2, short_name="linear")
    yield Operator(name="mm", product=Product.MATRICES)
    yield Operator(name="matmul", product=Product.BATCHED)
    yield Operator(name="bmm", product=Product.BATCHED)
    yield Operator(name="baddbmm", product=Product.BATCHED, added="self")
    yield Operator(name="einsum", product=Product.EINSUM)
    yield Operator(name="mv", product=Product.VECTORS)
    yield Operator(name="addmv", product=Product.VECTORS, added="self")
    yield Operator(name="dot", product=Product.VECTORS)
    for kind in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        yield Operator(name=kind, product=Product.CONVOLUTION, added="bias")
    yield Operator(name="convolution", product=Product.CONVOLUTION, added="bias")
    yield Operator(name="grouped_mm", product=Product.EXPERTS)
    yield Operator(name="expert_linear", product=Product.EXPERTS)
    yield Operator(
        name="scaled_dot_product_attention",
        is_attention=True,
        is_drawn=True,
        is_chosen_by_device=True,
        short_name="attention",
        roles=_QUERY_KEY_VALUE,
    )
    yield Operator(name="window_attention", is_attention=True, short_name="attention", roles=_QUERY_KEY_VALUE)
    yield Operator(name="sink_attention", is_attention=True, short_name="attention", roles=(*_QUERY_KEY_VALUE, "sinks"))


def _creating() -> Iterator[Operator]:
    """Yield operators that create tensors, and those that draw them."""
    fills: Mapping[str, float | str | None] = {"zeros": 0.0, "ones": 1.0, "full": "fill_value", "empty": None}
    for kind, fill in fills.items():
        yield Operator(name=kind, creation=Creation.SIZES, shape="size", fill=fill)
        yield Operator(name=f"new_{kind}", creation=Creation.NEW, shape="size", fill=fill)
        yield Operator(name=f"{kind}_like", creation=Creation.LIKE, fill=fill)
    yield Operator(name="scalar_tensor", creation=Creation.SIZES, fill="s")
    yield Operator(name="update_buffer", is_constant=True)
    yield Operator(name="arange", short_name="positions")
    yield Operator(name="draw", is_drawn=True, shape="size")
    yield Operator(name="dropout", is_drawn=True, finite=Finite.AT_ZERO, short_name="dropped")


def _pointwise() -> Iterator[Operator]:
    """Yield operators that compute each element by itself."""
    everywhere, at_zero = Finite.EVERYWHERE, Finite.AT_ZERO
    for name in ("rsub", "neg", "square", "where", "masked_fill", "relu", "softplus"):
        yield Operator(name=name, finite=everywhere)
    yield Operator(name="add", finite=everywhere, short_name="summed")
    yield Operator(name="sub", finite=everywhere, short_name="difference")
    yield Operator(name="mul", finite=everywhere, short_name="product")
    yield Operator(name="div", short_name="quotient")
    yield Operator(name="sin", finite=everywhere, specials=(1.3, 1.3), roles=("angles",))
    yield Operator(name="cos", finite=everywhere, specials=(1.3, 1.3), roles=("angles",))
    yield Operator(name="erf", finite=everywhere, specials=(1.3, 0.6))
    yield Operator(name="sigmoid", finite=everywhere, specials=(0.7, 0.0))
    yield Operator(name="tanh", finite=everywhere, specials=(2.4, 0.0))
    yield Operator(name="silu", finite=everywhere, specials=(0.8, 1.0))
    yield Operator(name="gelu", finite=everywhere, specials=(1.0, 2.0))
    for name in ("leaky_relu", "elu", "log_sigmoid", "hardtanh", "clamp", "maximum", "minimum", "fill", "copy"):
        yield Operator(name=name, finite=at_zero)
    for name in ("ge", "gt", "le", "lt", "eq", "ne", "and", "or", "bitwise_and", "bitwise_or", "bitwise_not"):
        yield Operator(name=name, finite=at_zero)
    for name in ("logical_and", "logical_or", "logical_not", "type_as", "broadcast_tensors", "pad"):
        yield Operator(name=name, finite=at_zero)
    yield Operator(name="abs", finite=at_zero, short_name="magnitude")
    yield Operator(name="exp", specials=(0.6, 0.0))
    yield Operator(name="log", specials=(1.6, 0.0))
    yield Operator(name="sqrt", specials=(0.6, 0.0))
    yield Operator(name="rsqrt", specials=(0.3, 0.0))
    yield Operator(name="reciprocal", specials=(0.3, 0.0))
    yield Operator(name="pow", specials=(6.0, 6.0), short_name="power")


def _reducing() -> Iterator[Operator]:
    """Yield operators that compute along dims: sums, norms, lookups, losses, recurrent layers."""
    finite = Finite.AT_ZERO
    yield Operator(name="sum", finite=finite, short_name="total")
    yield Operator(name="max", finite=finite, short_name="largest", indices=1)
    yield Operator(name="min", finite=finite, indices=1)
    yield Operator(name="argmax", finite=finite, indices=0)
    yield Operator(name="argmin", indices=0)
    yield Operator(name="argsort", indices=0)
    yield Operator(name="sort", indices=1)
    yield Operator(name="topk", indices=1)
    for name in ("mean", "cumsum", "amax", "amin"):
        yield Operator(name=name, finite=finite)
    yield Operator(name="softmax", finite=finite, specials=(1.0, 0.3))
    yield Operator(name="log_softmax", finite=finite, specials=(1.0, 0.6))
    yield Operator(name="layer_norm", finite=finite, specials=(1.0, 1.0), short_name="norm")
    yield Operator(name="rms_norm", specials=(1.0, 1.0))
    yield Operator(name="batch_norm", is_chosen_by_device=True)
    for name in ("embedding", "index", "index_select", "gather", "masked_select"):
        yield Operator(name=name, finite=finite, is_gather=True)
    yield Operator(name="take_along_dim", is_gather=True)
    for name in ("nonzero", "nonzero_numpy"):
        yield Operator(name=name, finite=finite)
    for name in ("index_put", "index_add", "index_copy", "scatter_add", "scatter_reduce"):
        yield Operator(name=name, finite=finite)
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"):
        yield Operator(name=name, loss=Loss.ELEMENTS, finite=finite)
    yield Operator(name="binary_cross_entropy", loss=Loss.ELEMENTS)
    yield Operator(
        name="cross_entropy_loss",
        loss=Loss.CLASSES,
        finite=finite,
        specials=(1.0, 0.6),
        short_name="loss",
        roles=("logits", "targets"),
    )
    for name in ("nll_loss", "nll_loss_nd", "nll_loss2d"):
        yield Operator(name=name, loss=Loss.CLASSES)
    for name in RECURRENT:
        yield Operator(name=name, is_recurrent=True, is_chosen_by_device=True)


def _by_name() -> Mapping[str, Operator]:
    """Return the records by name. Raises ValueError for two of one name."""
    records: dict[str, Operator] = {}
    for record in (*_moving(), *_products(), *_creating(), *_pointwise(), *_reducing()):
        if record.name in records:
            raise ValueError(f"two records of {record.name}")
        records[record.name] = record
    return MappingProxyType(records)


RECORDS = _by_name()
"""By base name (`base_name` of ir/graph.py)."""
