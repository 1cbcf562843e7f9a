"""Names of generated code, and what a user's names become where they would hide one of them."""

from __future__ import annotations

from .mesh import AXIS_NAMES

ARGUMENTS = frozenset(
    {
        *("self", "torch", "F", "nn", *AXIS_NAMES, "layer", "mesh"),
        *("num_targets", "sums"),
        *(
            "dropout",
            "context_attention",
            "vocab_embedding",
            "embedding_bag",
            "batch_norm",
            "group_norm",
            "halo_convolution",
            "cross_entropy",
            "count_valid",
            "arange",
            "expert_linear",
        ),
        *("window_attention", "sink_attention"),
        *("deferred", "overlapped", "async_tp", "fp8", "grouped", "token_losses", "Layout", "Module", "Param"),
        *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rotary", "swiglu", "geglu", "bias_gelu"),
        *("dropout_add", "linear_cross_entropy", "gelu_tanh", "next_tokens"),
        *("slice", "sum", "min", "max", "abs", "pow", "type", "range", "len", "tuple", "float", "int", "bool"),
    }
)
"""What generated code uses itself, and so no argument of a generated forward is called."""


def argument(name: str) -> str:
    """Return the name of the input `name` of the batch in generated code."""
    return f"{name}_" if name in ARGUMENTS or name.startswith("__") else name
