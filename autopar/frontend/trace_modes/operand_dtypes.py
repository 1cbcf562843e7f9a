"""Cast operands where parameters are in half precision, by the rules of torch.autocast.

Inputs of the batch keep their own dtypes. Products round wider operands. Losses and operators that autocast computes in
fp32 (logs, exponentials, powers, running sums and products, distances) take their operands in fp32. Other operators of
several tensors take the widest. A loss function takes all of autocast's fp32 list in fp32. Within a model the rest of
that list stays in half precision, so that activations do not double. These are norms and softmax, whose kernels compute
in fp32 and round once, sums over some dims, and second and third powers, which are products.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.frontend.fakes import in_this_thread


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = _names(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv dot vdot inner addmm baddbmm addbmm addmv einsum "
    "tensordot multi_dot conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc lstm gru "
    "rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention grouped_mm "
    "multi_head_attention_forward"
)
"""Products of tensors, which are computed in half precision if one of the operands has it."""

NORMS = _names("layer_norm group_norm rms_norm batch_norm instance_norm")
"""Norms, whose statistics are fp32; their weights take the dtype of the normalized tensor."""

WIDE = _names(
    "binary_cross_entropy binary_cross_entropy_with_logits kl_div cosine_similarity pairwise_distance "
    "log log2 log10 log1p log_softmax logsumexp logcumsumexp exp expm1 reciprocal rsqrt softplus __rdiv__ "
    "__rtruediv__ cumsum cumprod prod norm vector_norm renorm normalize dist cdist pdist __rpow__ float_power "
    "erfinv acos asin arccos arcsin cosh sinh tan"
)
"""Operators that take fp32, besides all whose name ends in `_loss`."""

WIDE_IN_LOSSES = _names("softmax softmin sum mean square pow __pow__")
"""Further operators that take fp32 within a loss function."""

PROMOTED = _names(
    "addcdiv addcmul atan2 cross grid_sample index_put scatter scatter_add scatter_reduce index_add index_copy "
    "masked_scatter lerp prelu isclose polar complex"
)
"""Operators of equal dtypes, which take their widest operand's."""

WRITES = _names(
    "__setitem__ index_put_ scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ masked_scatter_ lerp_ "
    "addcmul_ addcdiv_"
)
"""Writes, which take the dtype of the written tensor."""

_OF_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce")


@contextlib.contextmanager
def operands_in(dtype: torch.dtype | None, is_loss: bool = False) -> Iterator[None]:
    """Context manager in which operators take the dtypes above. dtype: of floating-point parameters; None: nothing
    changes.
    """
    if dtype is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            original = kind.forward
            stack.enter_context(
                mock.patch.object(kind, "forward", in_this_thread(_rounding(original, dtype), original))
            )
        stack.enter_context(_OperandDtypes(dtype, is_loss))
        yield


def _rounding(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Return a recurrent module's forward on rounded operands: torch compares their dtype with the weights' first."""

    def rounded(module: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
        return forward(module, *args, **kwargs)

    return rounded


class _OperandDtypes(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype, is_loss: bool) -> None:
        super().__init__()
        self.dtype = dtype
        self.is_loss = is_loss

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = self.target(name, args, kwargs)
        if target is not None:
            args, kwargs = (tree_map(lambda value: _cast(value, target), operands) for operands in (args, kwargs))
        return func(*args, **kwargs)

    def target(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        """Return the dtype that all floating-point operands of a call are cast to; None: no cast."""
        dtypes = {value.dtype for value in tree_leaves((args, kwargs)) if _is_real(value)}
        if self.dtype not in dtypes or (dtypes == {self.dtype} and name in PRODUCTS):
            return None
        widest: torch.dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
        first = args[0].dtype if args and _is_real(args[0]) else None
        if name in PRODUCTS:
            return self.dtype
        if name in WRITES:
            return first
        if name in NORMS:
            return first if first == widest else None
        if name in PROMOTED:
            return widest
        return torch.promote_types(widest, torch.float32) if self.is_wide(name, args, kwargs) else None

    def is_wide(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call takes fp32."""
        if self.is_loss and name in WIDE_IN_LOSSES:
            return True
        if name == "sum":  # of all elements, unless there is one
            return len(args) == 1 and not kwargs and math.prod(args[0].shape) > 1
        if name in ("pow", "__pow__"):
            return args[-1] not in (2, 3)
        if name == "cross_entropy":
            return not _is_plain(args, kwargs)
        return name in WIDE or name.endswith("_loss")


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a program runs the cross-entropy as a kernel that takes half precision and computes in fp32."""
    arguments = dict(zip(_OF_CROSS_ENTROPY, args, strict=False)) | kwargs
    by_class = isinstance(arguments.get("target"), Tensor) and not arguments["target"].is_floating_point()
    return by_class and arguments.get("weight") is None and arguments.get("reduction", "mean") in ("mean", "sum")


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _is_real(value) and value.dtype != dtype else value
