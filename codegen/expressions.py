"""How one call is written: a table from operator to Python expression.

An operator that no table names is written as `torch.ops.aten.<name>.<overload>(...)`, which is always right. Operands
are strings already; `Call.args` follow the operator's schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from codegen.program import Call, Raw, Var

INFIX: Mapping[str, str] = {
    "add.Tensor": "+", "add.Scalar": "+", "sub.Tensor": "-", "sub.Scalar": "-", "mul.Tensor": "*", "mul.Scalar": "*",
    "div.Tensor": "/", "div.Scalar": "/", "eq.Tensor": "==", "eq.Scalar": "==", "ne.Tensor": "!=", "ne.Scalar": "!=",
    "lt.Tensor": "<", "lt.Scalar": "<", "le.Tensor": "<=", "le.Scalar": "<=", "gt.Tensor": ">", "gt.Scalar": ">",
    "ge.Tensor": ">=", "ge.Scalar": ">=", "__and__.Tensor": "&", "__or__.Tensor": "|", "bitwise_and.Tensor": "&",
    "bitwise_or.Tensor": "|", "logical_and.default": "&", "matmul.default": "@", "mm.default": "@", "bmm.default": "@",
    "floor_divide.default": "//", "pow.Tensor_Scalar": "**", "pow.Tensor_Tensor": "**",
}  # fmt: skip

METHODS = frozenset(
    [
        "view",
        "reshape",
        "transpose.int",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "contiguous",
        "mean",
        "sum",
        "rsqrt",
        "sqrt",
        "tanh",
        "sigmoid",
        "neg",
        "cos",
        "sin",
        "exp",
        "log",
        "abs",
        "softmax.int",
        "log_softmax.int",
        "cumsum",
        "masked_fill",
        "clamp",
        "clamp_min",
        "clamp_max",
        "split",
        "split_with_sizes",
        "chunk",
        "flatten",
        "unflatten",
        "t",
        "clone",
        "detach",
        "amax",
        "amin",
        "argmax",
        "unbind",
        "repeat",
        "index_select",
        "gather",
        "movedim",
        "type_as",
        "repeat_interleave",
        "tril",
        "triu",
        "new_zeros",
        "new_ones",
        "new_full",
        "expand_as",
        "view_as",
        "var",
        "std",
        "bitwise_not",
        "logical_not",
    ]
)
"""`x.name(rest)`; with an overload where only that one is the method."""

FUNCTIONS: Mapping[str, str] = {
    "linear": "F.linear", "silu": "F.silu", "gelu": "F.gelu", "relu": "F.relu", "layer_norm": "F.layer_norm",
    "scaled_dot_product_attention": "F.scaled_dot_product_attention", "conv1d": "F.conv1d",
    "conv2d": "F.conv2d", "pad": "F.pad", "addmm": "torch.addmm", "baddbmm": "torch.baddbmm", "cat": "torch.cat",
    "stack": "torch.stack", "where": "torch.where", "einsum": "torch.einsum", "leaky_relu": "F.leaky_relu",
    "elu": "F.elu",
    "softplus": "F.softplus", "max_pool2d": "F.max_pool2d", "adaptive_avg_pool2d": "F.adaptive_avg_pool2d",
    "avg_pool2d": "F.avg_pool2d", "hardtanh": "F.hardtanh", "group_norm": "F.group_norm",
}  # fmt: skip

CREATION: Mapping[str, str] = {
    "arange": "torch.arange", "zeros": "torch.zeros", "ones": "torch.ones", "full": "torch.full",
    "empty": "torch.empty",
    "scalar_tensor": "torch.scalar_tensor", "eye": "torch.eye", "linspace": "torch.linspace",
}  # fmt: skip

KERNELS: Mapping[str, str] = {
    "rms_norm": "rms_norm", "layer_norm": "layer_norm", "add_rms_norm": "add_rms_norm",
    "add_layer_norm": "add_layer_norm", "rotary": "rotary", "swiglu": "swiglu", "geglu": "geglu",
    "bias_gelu": "bias_gelu", "dropout_add": "dropout_add", "cross_entropy": "token_losses",
    "linear_cross_entropy": "linear_cross_entropy",
}  # fmt: skip
"""Fused kernel -> its name in generated code; the runtime has a cross_entropy too."""

REDUCTIONS = ("none", "mean", "sum")


def expression(call: Call) -> str:
    """The right-hand side of a call."""
    if call.target == "self.dropout_attention":
        text = _attention(call, [literal(a) for a in call.args], dict(call.kwargs)) or ""
    elif call.target.startswith(("self.", "async_tp.", "deferred.", "fp8.", "overlapped.")):
        text = _function(call.target, [literal(a) for a in call.args], dict(call.kwargs))
    elif call.target.startswith("kernels."):
        text = _function(
            KERNELS[call.target.removeprefix("kernels.")], [literal(a) for a in call.args], dict(call.kwargs)
        )
    elif call.target.startswith("runtime."):
        text = _function(call.target.removeprefix("runtime."), [literal(a) for a in call.args], dict(call.kwargs))
    else:
        text = _operator(call)
    return f"{_atom(text)} / {call.divisor}" if call.divisor != 1 else text


def is_method(call: Call) -> bool:
    """Whether the expression starts with the first argument, so that it can follow it in a chain."""
    namespace, name, overload = (*call.target.split("."), "", "")[:3]
    chains = namespace == "aten" and (name in METHODS or f"{name}.{overload}" in METHODS or name == "to")
    return chains and call.divisor == 1 and name not in ("neg",)


def _operator(call: Call) -> str:
    namespace, name, overload = call.target.split(".")
    args, kwargs = [literal(a) for a in call.args], dict(call.kwargs)
    if namespace != "aten":
        return _function(f"torch.ops.{namespace}.{name}.{overload}", args, kwargs)
    special = SPECIAL.get(name)
    if special is not None:
        text = special(call, args, kwargs)
        if text is not None:
            return text
    infix = INFIX.get(f"{name}.{overload}")
    if infix and len(args) == 2 and not kwargs:
        return f"{_atom(args[0])} {infix} {_atom(args[1])}"
    if name in METHODS or f"{name}.{overload}" in METHODS:
        return _function(f"{_atom(args[0])}.{name}", args[1:], kwargs)
    if name in FUNCTIONS:
        return _function(FUNCTIONS[name], args, kwargs)
    if name in CREATION:
        return _function(CREATION[name], args, {**kwargs, "device": Raw("self.mesh.device")})
    if name.endswith("_like"):
        return _function(f"torch.{name}", args, kwargs)
    return _function(f"torch.ops.aten.{name}.{overload}", args, kwargs)


Special = Callable[[Call, list[str], dict[str, Any]], str | None]


def _to(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    dtypes = [a for a in (*call.args[1:], *kwargs.values()) if str(a).startswith("torch.") and not isinstance(a, Var)]
    return f"{_atom(args[0])}.to({literal(dtypes[0])})" if dtypes else None


def _slice(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    """`x[:, 1:]`; from the last dims `x[..., 4:]` is not known here, so colons count the dims."""
    dim, start, stop, step = (*call.args[1:], *(0, None, None, 1)[len(call.args) - 1 :])[:4]
    if not isinstance(dim, int) or dim < 0 or kwargs:
        return f"{_atom(args[0])}[..., {_bounds(start, stop, step)}]" if dim == -1 else None
    return f"{_atom(args[0])}[{':, ' * dim}{_bounds(start, stop, step)}]"


def _bounds(start: Any, stop: Any, step: Any) -> str:
    first = "" if start in (0, None) else str(start)
    last = "" if stop is None or stop >= 2**62 else str(stop)
    return f"{first}:{last}" + (f":{step}" if step not in (1, None) else "")


def _select(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    dim, index = call.args[1], call.args[2]
    return f"{_atom(args[0])}[{':, ' * dim}{index}]" if isinstance(dim, int) and dim >= 0 else None


def _embedding(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    padding = call.args[2] if len(call.args) > 2 else kwargs.get("padding_idx", -1)
    extra = {} if padding in (-1, None) else {"padding_idx": padding}
    return _function("F.embedding", [args[1], args[0]], extra)


def _attention(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    mask, dropout, causal = call.args[3:6]
    named: dict[str, Any] = {}
    if mask is not None:
        named["attn_mask"] = mask
    if dropout:
        named["dropout_p"] = dropout
    if causal:
        named["is_causal"] = True
    named |= {k: v for k, v in kwargs.items() if v is not None and v is not False}
    name = call.target if call.target.startswith("self.") else "F.scaled_dot_product_attention"
    return _function(name, args[:3], named)


def _layer_norm(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    return _function("F.layer_norm", args[:5], {})


def _gelu(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    approximate = kwargs.get("approximate", call.args[1] if len(call.args) > 1 else "none")
    return _function("F.gelu", args[:1], {} if approximate == "none" else {"approximate": approximate})


def _loss(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    name = call.target.split(".")[1]
    reduction = kwargs.get("reduction", call.args[2] if len(call.args) > 2 else 1)
    extra = {} if reduction == 1 else {"reduction": REDUCTIONS[reduction]}
    extra |= {k: v for k, v in kwargs.items() if k != "reduction"}
    return _function(f"F.{name}", args[:2], extra)


def _cross_entropy(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    given |= dict(zip(names, call.args[2:], strict=False)) | kwargs
    extra = {k: v for k, v in given.items() if v not in (None, -100, 0.0) and k != "reduction"}
    return _function("F.cross_entropy", args[:2], {**extra, "reduction": REDUCTIONS[int(given["reduction"] or 0)]})


def _pad(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    mode = call.args[2] if len(call.args) > 2 else kwargs.get("mode", "constant")
    value = call.args[3] if len(call.args) > 3 else kwargs.get("value")
    extra = ({} if mode == "constant" else {"mode": mode}) | ({} if value in (None, 0.0) else {"value": value})
    return _function("F.pad", args[:2], extra)


def _index(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    parts = [":" if index is None else literal(index) for index in call.args[1]]
    return f"{_atom(args[0])}[{', '.join(parts)}]"


def _cat(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    dims = {"dim": call.args[1]} if len(call.args) > 1 else {}
    items = ", ".join(literal(item) for item in call.args[0])
    return _function(f"torch.{call.target.split('.')[1]}", [f"[{items}]"], {**dims, **kwargs})


def _view(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    """Sizes without the tuple's brackets."""
    sizes = call.args[1] if len(call.args) > 1 else next(iter(kwargs.values()))
    if not isinstance(sizes, tuple):
        return None
    return f"{_atom(args[0])}.{call.target.split('.')[1]}({', '.join(map(str, sizes))})"


def _reduce(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    """`x.mean(-1, keepdim=True)`."""
    dims = call.args[1] if len(call.args) > 1 else None
    keeps = call.args[2] if len(call.args) > 2 else kwargs.pop("keepdim", False)
    if dims is None:
        return None
    single = dims[0] if isinstance(dims, tuple) and len(dims) == 1 else dims
    return _function(
        f"{_atom(args[0])}.{call.target.split('.')[1]}",
        [literal(single)],
        ({"keepdim": True} if keeps else {}) | kwargs,
    )


def _neg(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    return f"-{_atom(args[0])}"


def _squeeze(call: Call, args: list[str], kwargs: dict[str, Any]) -> str | None:
    dims = call.args[1] if len(call.args) > 1 else kwargs.get("dim")
    return f"{_atom(args[0])}.squeeze({'' if dims is None else literal(dims)})"


SPECIAL: Mapping[str, Special] = {
    "to": _to, "_to_copy": _to, "slice": _slice, "select": _select, "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _layer_norm, "gelu": _gelu, "mse_loss": _loss, "l1_loss": _loss, "smooth_l1_loss": _loss, "pad": _pad,
    "index": _index, "cat": _cat, "stack": _cat, "view": _view, "reshape": _view, "expand": _view, "permute": _view,
    "squeeze": _squeeze, "mean": _reduce, "sum": _reduce, "amax": _reduce, "amin": _reduce, "neg": _neg,
    "cross_entropy_loss": _cross_entropy,
}  # fmt: skip


def _function(name: str, args: list[str], kwargs: Mapping[str, Any]) -> str:
    return f"{name}({', '.join([*args, *(f'{k}={literal(v)}' for k, v in kwargs.items())])})"


def literal(value: Any) -> str:
    """A value as Python source."""
    if isinstance(value, Var):
        return value.name
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if isinstance(value, float) and value != value:
        return 'float("nan")'
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if str(value).startswith("torch.") else repr(value)


def is_atom(text: str) -> bool:
    """Whether an expression can be an operand as it stands: no space or leading minus outside of brackets."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and (char == " " or (char == "-" and position == 0)):
            return False
    return True


def _atom(text: str) -> str:
    return text if is_atom(text) else f"({text})"
