"""Which tensors autograd keeps for the backward of each operator.

Source: torch's `derivatives.yaml`. A tensor that several operators keep is one allocation, and so is a view and its
base; `saved_tensors` names each allocation once, at the first node that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.ir.graph import ATTENTION, CONVOLUTIONS, VIEWS, Node, Ref, TensorMeta, base_name, has_dropout

PARTS = frozenset(["slice", "select", "split", "split_with_sizes", "chunk", "narrow", "unbind"])
"""Views of a part of their input. Each is counted by itself, and together they are the allocation (q, k, v of a fused
projection); not where the whole is counted already."""

KEEPS_INPUTS: Mapping[str, tuple[int, ...] | None] = {
    "linear": (0, 1), "addmm": (1, 2), "mm": None, "bmm": None, "matmul": None, "baddbmm": (1, 2),
    **dict.fromkeys(CONVOLUTIONS, (0, 1)),
    "einsum": None, "mul": None, "div": None, "pow": (0,), "layer_norm": (0, 1), "gelu": (0,), "silu": (0,),
    "scaled_dot_product_attention": (0, 1, 2, 3), "cross_entropy_loss": (0, 1), "embedding": (1,), "where": (0,),
    "masked_fill": (1,), "sin": (0,), "cos": (0,), "mse_loss": (0, 1), "abs": (0,), "log": (0,), "gather": (1,),
    "cumsum": (), "smooth_l1_loss": (0, 1), "l1_loss": (0, 1), "batch_norm": (0, 1), "max_pool2d": (0,),
    "log_sigmoid": (0,),
    "clamp": (0,), "leaky_relu": (0,), "index": (1,), "var": (0,), "std": (0,), "rms_norm": (0, 1),
    "swiglu": (0, 1), "cross_entropy": (0, 1), "add_rms_norm": (0, 1), "add_layer_norm": (0, 1), "rotary": (1, 2),
    "window_attention": (0, 1, 2), "sink_attention": (0, 1, 2, 3), "expert_linear": (0, 1, 2), "geglu": (0, 1),
    "bias_gelu": (0, 1), "dropout_add": (), "embedding_bag": (0,),
}  # fmt: skip
"""Input positions kept; None keeps every input that another differentiable input needs. The last lines: fused kernels;
of a sum and its norm, the sum is the norm's input."""

KEEPS_OUTPUT = frozenset(["softmax", "log_softmax", "tanh", "sigmoid", "rsqrt", "sqrt", "exp", "relu", *ATTENTION])


Copy = tuple[Ref, object]
"""An allocation: the tensor that it was made for, and as what it was copied since (None: it is the first)."""


def _is_first(node: Node, ref: Ref) -> object:
    return None


def saved_tensors(
    nodes: tuple[Node, ...],
    metas: Mapping[Ref, TensorMeta],
    parameters: frozenset[str],
    copied: Callable[[Node, Ref], object] = _is_first,
) -> dict[str, tuple[Ref, ...]]:
    """For each node, the tensors that it is first to keep: Refs of its inputs, or of its own outputs.

    copied: as what a node gets an input that is copied for it (how a resharded one lies); None if it is not. By default
    nothing is, so that what is kept does not depend on how tensors lie.
    """
    base: dict[Ref, Copy] = {}
    whole: dict[Copy, Copy] = {}
    counted: set[Copy] = set()
    found: dict[str, tuple[Ref, ...]] = {}

    def allocation(node: Node, ref: Ref) -> Copy:
        first = base.get(ref, (ref, None))
        copy = copied(node, ref) if ref.node != node.name else None
        return first if copy is None else (ref, copy)

    for node in nodes:
        if base_name(node.op) in VIEWS and node.inputs:
            root = allocation(node, node.inputs[0])
            views = [Ref(node.name, i) for i in range(len(node.outputs))]
            base |= {view: (view, None) if base_name(node.op) in PARTS else root for view in views}
            whole |= {(view, None): root for view in views if base_name(node.op) in PARTS}
        if not any(meta.requires_grad for meta in node.outputs):
            continue
        kept = []
        for ref in _kept(node, metas):
            root = allocation(node, ref)
            origin = root
            while origin in whole and origin not in counted:
                origin = whole[origin]
            if origin not in counted and origin[0].node not in parameters:
                counted.add(root)
                kept.append(ref)
        found[node.name] = tuple(kept)
    return found


def _kept(node: Node, metas: Mapping[Ref, TensorMeta]) -> list[Ref]:
    name = base_name(node.op)
    refs: list[Ref] = []
    if name in KEEPS_INPUTS:
        positions = KEEPS_INPUTS[name]
        if positions is None:
            grads = [metas[ref].requires_grad for ref in node.inputs]
            refs += [ref for i, ref in enumerate(node.inputs) if any(g for j, g in enumerate(grads) if j != i)]
            if len(node.inputs) == 1 and name != "mul" and name != "div":
                refs += list(node.inputs)
        else:
            refs += [node.inputs[i] for i in positions if i < len(node.inputs)]
    if name in KEEPS_OUTPUT:
        refs.append(Ref(node.name))
    return refs


def extra_saved_bytes(node: Node, inputs: tuple[TensorMeta, ...], num_local: int) -> int:
    """Bytes kept that are neither inputs nor outputs; num_local: elements of this rank's result.

    dropout: its mask, one byte an element. Attention with dropout is computed in mathematical form
    (codegen/runtime/attention.py): probabilities before and after dropout, and the mask.
    """
    name = base_name(node.op)
    if name == "dropout":
        return num_local
    if name == "scaled_dot_product_attention" and has_dropout(node):
        query, key = inputs[0], inputs[1]
        probabilities = num_local // query.shape[-1] * key.shape[-2]
        return probabilities * (2 * query.dtype.itemsize + 1)
    return 0
