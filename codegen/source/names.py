"""A user's names as attributes, arguments and classes of generated source."""

from __future__ import annotations

import hashlib
import keyword
import unicodedata
from collections.abc import Collection

from codegen.fusion import KERNELS
from codegen.runtime.buffer_updates import UPDATING_ATTRIBUTES, UpdatingModule
from codegen.runtime.draw_module import DrawModule
from codegen.runtime.evaluation import LOGITS_ATTRIBUTES, LogitsModule
from codegen.runtime.mesh import AXIS_NAMES
from codegen.runtime.parameters import Module
from codegen.runtime.whole_sums import SUMMING_ATTRIBUTES, SummingModule
from codegen.source.expressions import kernel_name
from codegen.source.idioms import IDIOMS
from codegen.source.text import quoted

MOST_CHARACTERS = 64
"""Of a name that generated source defines."""

RUNTIME_HOME = {
    "vocab_embedding": "embedding",
    "embedding_bag": "embedding",
    "batch_norm": "batch_norm",
    "group_norm": "batch_norm",
    "halo_convolution": "halo",
    "cross_entropy": "cross_entropy",
    "count_valid": "cross_entropy",
    "context_attention": "context_attention",
    "window_attention": "windows",
    "sink_attention": "sink_attention",
    "arange": "layout",
    **dict.fromkeys(("Routes", "combine", "dispatch", "expert_linear"), "experts"),
    **dict.fromkeys(("NodeRoutes", "combine_by_node", "dispatch_by_node"), "experts_by_node"),
}
"""Functions and classes of the run time that generated code imports, with their modules."""
RUNTIME_MODULES = frozenset({"async_tp", "deferred", "fp8", "grouped", "overlapped"})
"""Modules of the run time whose functions are called by the module's name and theirs."""

GENERATED_NAMES = frozenset(
    {
        *("self", "torch", "F", "nn", *AXIS_NAMES, "layer", "mesh"),
        *("num_targets", "sums"),
        *("dropout", "Layout", "Module", "Param"),
        *RUNTIME_HOME,
        *RUNTIME_MODULES,
        *(kernel_name(target.removeprefix("kernels.")) for target in KERNELS),
        *(idiom.target.removeprefix("idioms.") for idiom in IDIOMS),
        *("slice", "sum", "min", "max", "abs", "pow", "type", "range", "len", "tuple", "float", "int", "bool"),
    }
)
"""Names that generated code uses itself, and built-ins that its arguments and variables must not hide."""

_BASES = (DrawModule, SummingModule, LogitsModule, UpdatingModule)
_OWN = frozenset(
    (
        *(name for base in _BASES for name in dir(base)),
        *(*Module.__init__.__code__.co_names, *SUMMING_ATTRIBUTES, *LOGITS_ATTRIBUTES, *UPDATING_ATTRIBUTES),
    )
)
"""Attributes of generated modules that are not the user's."""

_CLASSES = GENERATED_NAMES | {
    *("Container", "Tensor", "Step", "Mesh", "Stage", "Pipeline", "PIPELINE", "INPUTS", "SCHEDULE"),
    *("DrawModule", "DropoutModule", "LogitsModule", "MemorySaving", "SummingModule", "UpdatingModule"),
    "PipelineExecutor",
    "NUM_MICRO_BATCHES",
}


def argument(name: str) -> str:
    """Return the argument of a generated forward for the input `name` of the batch.

    A reserved name gets an underscore, and so does a reserved name with underscores: no two inputs share an argument.
    """
    return f"{name}_" if name.rstrip("_") in GENERATED_NAMES or name.startswith("__") else name


def attribute_path(name: str) -> str:
    """`linears.0.weight` -> `self.linears[0].weight`; `my-list.mesh` -> `self["my-list"]["mesh"]`."""
    text = "self"
    for part in name.split("."):
        if part.isascii() and part.isdigit() and part == str(int(part)):
            text += f"[{part}]"
        elif is_plain_name(part) and part not in _OWN and not part.startswith("__"):
            text += f".{part}"
        else:
            text += f"[{quoted(part)}]"
    return text


def is_plain_name(name: str) -> bool:
    """Whether Python reads `name` as that very name: it may change what is no ASCII."""
    return name.isidentifier() and not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name


def shortened(name: str) -> str:
    """The name where it is short; else its beginning, and digits that follow from all of it."""
    if len(name) <= MOST_CHARACTERS:
        return name
    digits = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MOST_CHARACTERS - 9].rstrip('_')}_{digits}"


def class_name(wish: str, taken: Collection[str] = ()) -> str:
    """An identifier like `wish` that is neither in `taken` nor what generated files use themselves."""
    name = "".join(char if f"_{char}".isidentifier() else "_" for char in unicodedata.normalize("NFKC", wish))
    name = shortened(name if is_plain_name(name) and not name.startswith("__") else f"Class{name}")
    is_numbered = name == "Stage" or name[-1:].isdigit()  # Stage2 is a class of pipelines.
    base, count = f"{name}_" if is_numbered else name, 2
    while name in taken or name in _CLASSES or (name.startswith("Stage") and name[5:].isdigit()):
        name, count = f"{base}{count}", count + 1
    return name
