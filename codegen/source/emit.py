"""Program -> the source of `model.py` and `main.py`.

One class per layer class, statements in order, a comment with each reshard. Single-use method calls are chained to
the statement before them where the line stays short.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from codegen.functions import function_of, is_custom
from codegen.logits import with_logits
from codegen.program import Call, Layout, ModuleClass, Program, Reshard, Spec, Statement, Var, reads
from codegen.source.columns import COLUMNS, documented, fitted
from codegen.source.expressions import kernel_name, literal
from codegen.source.idioms import with_idioms
from codegen.source.names import RUNTIME_HOME, RUNTIME_MODULES, argument
from codegen.source.reshard_words import Dims
from codegen.source.rotary_names import with_rotary_names
from codegen.source.sizes import needed, with_sizes
from codegen.source.statements import Aside, axes, indented, joint_axes, returning, source_lines
from codegen.source.text import is_path, plain, quoted

_BASE_HOME = {
    "Module": "parameters",
    "DrawModule": "draw_module",
    "DropoutModule": "dropout_module",
    "MemorySaving": "recompute",
    "SummingModule": "whole_sums",
    "LogitsModule": "evaluation",
    "UpdatingModule": "buffer_updates",
}
_DIFFERENTIABLE = ("float", "bfloat", "complex")
"""How the names of dtypes begin that can have gradients."""
_LOGITS = "LogitsModule"
"""The base of a root class whose forward can give the model's logits."""
_DRAW_MASKS = frozenset({"self.same_dropout", "self.dropout_attention", "kernels.dropout_add"})
"""Calls that draw the mask of a dropout."""
_DRAW = frozenset({"self.draw", "self.in_training"})
_NUMBERED = frozenset({"DrawModule", "DropoutModule"})
"""Bases of classes whose draws are numbered."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a file besides its program. title: its first line, without the end of the sentence. boundaries:
    comments on received and sent tensors. elsewhere: layer classes that come from layers.py. saving: those of which
    instances recompute or offload, here or in another stage. sizes: the line that defines each name of a size."""

    title: str
    boundaries: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    saving: frozenset[str] = frozenset()
    sizes: Mapping[str, str] = field(default_factory=dict)


def emit_model(program: Program) -> str:
    """The text of model.py."""
    title = f"{program.name} for {program.mesh_text}: {batch_text(program)}"
    return emit_classes(with_idioms(program), Words(title, saving=saving_layers(program)))


def emit_classes(program: Program, words: Words) -> str:
    """One file: imports, sizes, layouts, the layer classes and the root class."""
    program, sizes = with_sizes(with_rotary_names(with_logits(program)))
    layers = tuple(layer for layer in program.layers if layer.name not in words.elsewhere)
    classes = [layer_class(program, layer, words) for layer in layers] + [_root_class(program, words)]
    statements = [s for cls in (*layers, program.root) for s in cls.body] + [
        *program.count_targets,
        *program.whole_sums,
    ]
    statements += program.giving_logits
    homes = {".layers": sorted(words.elsewhere)} if words.elsewhere else {}
    return _file(replace(words, sizes=sizes), (*layers, program.root), classes, statements, homes)


def emit_layers(layers: Mapping[str, tuple[Program, ModuleClass]], words: Words) -> str:
    """layers.py: classes that several stages have, with a program that each is of."""
    named = {name: with_sizes(with_rotary_names(program)) for name, (program, _) in layers.items()}
    sizes = {key: line for _, lines in named.values() for key, line in lines.items()}
    if any(lines[key] != sizes[key] for _, lines in named.values() for key in lines):
        named, sizes = {name: (program, {}) for name, (program, _) in layers.items()}, {}  # of unequal meshes
    bodies = {
        name: next(cls.body for cls in program.layers if cls.name == name) for name, (program, _) in named.items()
    }
    emitted = tuple(replace(layer, body=bodies[name]) for name, (_, layer) in layers.items())
    classes = [layer_class(program, layer, words) for (program, _), layer in zip(layers.values(), emitted, strict=True)]
    statements = [statement for layer in emitted for statement in layer.body]
    return _file(replace(words, sizes=sizes), emitted, classes, statements, {})


def _file(
    words: Words,
    emitted: tuple[ModuleClass, ...],
    classes: list[str],
    statements: list[Statement],
    homes: dict[str, list[str]],
) -> str:
    calls = [statement for statement in statements if isinstance(statement, Call)]
    layouts = "\n".join(_layout(layout) for cls in emitted for layout in cls.layouts)
    body = "\n\n\n".join(classes)
    bases = re.findall(r"^class \w+\((.*)\):$", body, re.MULTILINE)
    for base in sorted({base for names in bases for base in names.split(", ")}):
        homes.setdefault(f".runtime.{_BASE_HOME[base]}", []).append(base)
    if "Param(" in body:
        homes.setdefault(".runtime.parameters", []).append("Param")
    if layouts:
        homes.setdefault(".runtime.layout", []).append("Layout")
    head = "\n".join((*_docstring(words.title, _custom(calls)), *_imports(calls, body, homes)))
    sizes = "\n".join(needed(words.sizes, body))
    return fitted("\n\n".join(filter(None, (head, sizes, layouts))) + f"\n\n\n{body}\n")


def saving_layers(program: Program) -> frozenset[str]:
    """Layer classes of which instances recompute in backward, or offload their activations."""
    tables = (*program.recompute.items(), *program.offload.items())
    return frozenset(name for name, modes in tables if any(mode not in ("none", "") for mode, _ in modes))


def batch_text(program: Program) -> str:
    """A program's batch in words: `batch 8 in 2 micro-batches, fp32`."""
    accumulation = f" in {program.num_micro_batches} micro-batches" if program.num_micro_batches > 1 else ""
    return f"batch {program.global_batch_size}{accumulation}, {program.precision}"


def _custom(calls: Iterable[Call]) -> str:
    """The operators and Functions that are not torch's own, as a clause."""
    calls = list(calls)
    names = sorted({call.target.rpartition(".")[0] for call in calls if is_custom(call.target)})
    modules = sorted({function.function.__module__ for call in calls if (function := function_of(call.target))})
    theirs = f", the Functions of {', '.join(modules)}" if modules else ""
    return f"{theirs} and whatever registers {', '.join(names)}: import it before this" if names else theirs or " only"


def _docstring(title: str, needs: str) -> list[str]:
    legend = (
        "Tensors are this rank's parts. The tables have global shapes, and a placement per axis of the mesh:",
        "S(d) is sharded along dim d, Rp is replicated with a gradient that is summed over the axis.",
        "Over the other axes all ranks have equal copies.",
    )
    title_lines = textwrap.wrap(f'"""{plain(title)}.', COLUMNS, break_long_words=False)
    needs_lines = textwrap.wrap(f"Generated by autopar from plan.yaml; it needs torch{needs}.", COLUMNS)
    return [*title_lines, "", *legend, *needs_lines, '"""', ""]


def _imports(calls: Iterable[Call], body: str, homes: dict[str, list[str]]) -> list[str]:
    """homes: what else is imported, by module."""
    lines = []
    if re.search(r"\btorch\.", body):
        lines.append("import torch")
    if re.search(r"\bF\.", body):
        lines.append("import torch.nn.functional as F")
    if lines:
        lines.append("")
    for call in {call.target: call for call in calls}.values():
        space, _, name = call.target.partition(".")
        if space == "runtime":
            homes.setdefault(f".runtime.{RUNTIME_HOME[name]}", []).append(name)
        elif space == "idioms":
            homes.setdefault(".runtime.idioms", []).append(name)
        elif space == "kernels":
            written = kernel_name(name)
            homes[f".kernels.{name}"] = [name if written == name else f"{name} as {written}"]
        elif space in RUNTIME_MODULES and space not in homes.get(".runtime", []):
            homes.setdefault(".runtime", []).append(space)
    functions = {call.target: function for call in calls if (function := function_of(call.target))}
    theirs = [*sorted(function.import_line for function in functions.values()), ""] if functions else []
    imports = [f"from {home} import {', '.join(sorted(names))}" for home, names in sorted(homes.items())]
    return lines + theirs + imports


def _layout(layout: Layout) -> str:
    shards = "".join(f', {axis}="{text}"' for axis, text in layout.placements)
    return f"{layout.name} = Layout({layout.shape}{shards})"


def _bases(cls: ModuleClass, saving: frozenset[str], others: Iterable[Statement] = ()) -> tuple[str, ...]:
    """The base classes of a generated class: what its methods and its activations need of the run time.

    others: the statements of methods beside forward.
    """
    targets = {statement.target for statement in (*cls.body, *others) if isinstance(statement, Call)}
    needed = {
        "DrawModule": bool(targets & _DRAW),
        "DropoutModule": bool(targets & _DRAW_MASKS) and not targets & _DRAW,
        "MemorySaving": cls.name in saving,
        "SummingModule": "self.whole_sum" in targets,
        "UpdatingModule": bool(cls.updated_buffers),
    }
    return tuple(name for name, is_needed in needed.items() if is_needed) or ("Module",)


def _heading(
    cls: ModuleClass, saving: frozenset[str], more: tuple[str, ...] = (), others: Iterable[Statement] = ()
) -> list[str]:
    """more: base classes beside what methods need. others: the statements of methods beside forward."""
    bases = tuple(base for base in _bases(cls, saving, others) if not more or base != "Module") + more
    lines = [f"class {cls.name}({', '.join(bases)}):", *documented(plain(cls.doc)), ""]
    lines += _table("PARAMETERS", cls.parameters) + _table("BUFFERS", cls.buffers)
    for name, buffers in (("WRITTEN_BUFFERS", cls.written_buffers), ("UPDATED_BUFFERS", cls.updated_buffers)):
        lines += [f"    {name} = {literal(buffers)}", ""] if buffers else []
    return lines


def layer_class(program: Program, cls: ModuleClass, words: Words) -> str:
    """The text of one layer class."""
    lines = _heading(cls, words.saving)
    if _NUMBERED & set(_bases(cls, words.saving)):
        lines += [f"    dropout_base = {literal(cls.dropout_base)}", f"    dropout_calls = {cls.num_dropout_calls}", ""]
    lines += [f"    def forward({_names(('self', *cls.inputs))}):"]
    lines += indented(
        axes(program, cls.body)
        + returning(source_lines(cls.body, cls.outputs, Dims(program.dims, cls.name)), cls.outputs)
    )
    return "\n".join(lines)


def _names(values: Iterable[str | Var]) -> str:
    return ", ".join(value if isinstance(value, str) else value.name for value in values)


def _root_class(program: Program, words: Words) -> str:
    cls, dims = program.root, Dims(program.dims)
    others = (*program.count_targets, *program.whole_sums)
    lines = _heading(cls, words.saving, () if program.logits is None else (_LOGITS,), others)
    lines += _class_table("LAYERS", {layer.name: paths_text(program.paths(layer.name)) for layer in program.layers})
    lines += _class_table("RECOMPUTE", {name: modes_text(modes) for name, modes in program.recompute.items()})
    lines += _class_table("OFFLOAD", {name: offload_text(modes) for name, modes in program.offload.items()})
    receives = {name: boundary.spec for name, boundary in program.receives.items()}
    lines += _table("RECEIVES", receives, words.boundaries.get("RECEIVES"))
    lines += _table("INPUTS", program.inputs)
    lines += _batch_facts(program)
    if program.receives or program.sends:
        lines += [f"    JOINTS = {literal(joints)}", ""] if (joints := joint_axes(program)) else []
    sends = {name: boundary.spec for name, boundary in program.sends.items()}
    lines += _table("SENDS", sends, words.boundaries.get("SENDS"))
    extra_inputs = (("num_targets", program.count_targets), ("sums", program.whole_sums))
    takes: tuple[str | Var, ...] = ("self", *cls.inputs, *(name for name, statements in extra_inputs if statements))
    parted = frozenset(layer for layer, count in Counter(run.layer for run in program.runs).items() if count > 1)
    lines += [f"    def forward({_names(takes)}):"]
    body = source_lines(cls.body, cls.outputs, dims, 2, parted, _aside(program, dims))
    lines += indented(axes(program, cls.body) + returning(body, cls.outputs))
    counts = "Targets that count in this micro-batch, on all ranks, for each cross-entropy."
    sums = "Sums over this micro-batch, on all ranks, that forward needs of the whole batch."
    lines += _of_batch(program, "count_targets", counts, program.count_targets, program.target_counts)
    lines += _of_batch(program, "whole_sums", sums, program.whole_sums, program.sums)
    return "\n".join(lines)


def _aside(program: Program, dims: Dims) -> Aside | None:
    """Return the lines of forward for an evaluation that asks for logits; None in a program without logits."""
    if program.logits is None:
        return None
    axes_with_reshards = {statement.axis for statement in program.root.body if isinstance(statement, Reshard)}
    without_axes = replace(program, axes=tuple(axis for axis in program.axes if axis not in axes_with_reshards))
    lines = source_lines(program.giving_logits, (program.logits,), dims)
    inner = [*axes(without_axes, program.giving_logits), *lines, f"self.give_logits({program.logits.name})"]
    read = {statement_read for statement in program.giving_logits for statement_read in reads(statement)} | {
        program.logits
    }
    return Aside(
        program.logits_at,
        frozenset(read),
        ("if self.gives_logits:  # in evaluation", *(f"    {line}" for line in inner)),
    )


def _of_batch(
    program: Program, name: str, doc: str, statements: tuple[Statement, ...], results: tuple[Var, ...]
) -> list[str]:
    """A method of the batch alone, where there are statements."""
    if not statements:
        return []
    head = ["", f"    def {name}({', '.join(('self', *map(argument, program.inputs)))}):", f'        """{doc}"""']
    lines = axes(program, statements) + source_lines(statements, results, Dims(program.dims))
    return [*head, *indented(lines), f"        return [{_names(results)}]"]


def _batch_facts(program: Program) -> list[str]:
    """Return the other facts of the example batch and of evaluation that the run time needs; mostly none."""
    arguments = {name: argument(name) for name in program.inputs}
    facts = {
        "ARGUMENTS": {name: written for name, written in arguments.items() if written != name},
        "UNUSED_INPUTS": program.unused_inputs,
        "FIXED_INPUTS": dict(program.fixed_inputs),
        "NO_EVALUATION": program.no_evaluation,
    }
    # Their text is the user's: written by repr alone.
    lines = [line for name, value in facts.items() if value for line in (f"    {name} = {value!r}", "")]
    if program.guards:
        lines += ["    GUARDS = {", *(f"        {guard.source}," for guard in program.guards), "    }", ""]
    return lines


def _class_table(name: str, entries: Mapping[str, str]) -> list[str]:
    if not entries:
        return []
    return [f"    {name} = {{", *(f"        {layer}: {text}," for layer, text in entries.items()), "    }", ""]


def modes_text(modes: tuple[tuple[str | bool, int], ...]) -> str:
    """`("full",) * 3 + ("none",)`; (("full", 1), ("none", 1)) is `("full", "none")`."""
    if sum(count for _, count in modes) <= 3:
        return literal(tuple(mode for mode, count in modes for _ in range(count)))
    return " + ".join(literal((mode,)) + (f" * {count}" if count > 1 else "") for mode, count in modes)


def offload_text(modes: tuple[tuple[str, int], ...]) -> str:
    """Return which layers are offloaded, as an expression: `(True,) * 3 + (False,)`."""
    return modes_text(tuple((bool(mode), count) for mode, count in modes))


def paths_text(paths: tuple[str, ...]) -> str:
    """`tuple(f"model.layers.{i}" for i in range(4))` where the paths count up."""
    prefix, _, first = paths[0].rpartition(".")
    counted = [f"{prefix}.{i}" for i in range(int(first), int(first) + len(paths))]
    if list(paths) != counted or len(paths) < 3 or not is_path(prefix):
        return literal(paths)
    start = "" if first == "0" else f"{first}, "
    return f'tuple(f"{prefix}.{{i}}" for i in range({start}{int(first) + len(paths)}))'


def _table(name: str, specs: Mapping[str, Spec], comments: Mapping[str, str] | None = None) -> list[str]:
    if not specs:
        return []
    lines = [f"    {name} = {{"]
    for key, spec in specs.items():
        comment = f"  # {plain(comments[key])}" if comments else ""
        lines.append(f"        {quoted(key)}: {_spec(spec)},{comment}")
    return [*lines, "    }", ""]


def _spec(spec: Spec) -> str:
    parts = [str(spec.shape)]
    parts += [f'{axis}="{text}"' for axis, text in spec.placements]
    parts += [f"zero={spec.zero}"] if spec.zero else []
    parts += [f"aliases={literal(spec.aliases)}"] if spec.aliases else []
    parts += [f'dtype="{spec.dtype}"'] if spec.dtype != "float32" else []
    parts += [f"padding={spec.padding}"] if spec.padding else []
    parts += [f'padded="{spec.padded}"'] if spec.padding and spec.padded != "S(0)" else []
    parts += ["persistent=False"] if not spec.persistent else []
    parts += [f"increment={literal(spec.increment)}"] if spec.increment else []
    parts += ["requires_grad=False"] if not spec.requires_grad and spec.dtype.startswith(_DIFFERENTIABLE) else []
    return f"Param({', '.join(parts)})"
