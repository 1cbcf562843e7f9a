"""PipelineProgram -> the files of a pipeline: one module per distinct stage, what assembles them, the schedule."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace

from codegen.program import BoundaryTensor, ModuleClass, PipelineProgram, PipelineStage, Program
from codegen.runtime.pipeline_ranks import tiled
from codegen.source.columns import COLUMNS, fitted
from codegen.source.emit import (
    Words,
    batch_text,
    emit_classes,
    emit_layers,
    layer_class,
    modes_text,
    offload_text,
    paths_text,
    saving_layers,
)
from codegen.source.expressions import literal
from codegen.source.idioms import with_idioms
from codegen.source.text import bytes_text, plain


@dataclass(frozen=True, slots=True)
class _File:
    """A module that several stages can share; called after the first of them."""

    stages: tuple[int, ...]
    from_layers: frozenset[str] = frozenset()
    """Layer classes that are in layers.py."""

    @property
    def module(self) -> str:
        return f"stage_{self.stages[0]}"

    @property
    def root(self) -> str:
        return f"Stage{self.stages[0]}"


def emit_pipeline(pipeline: PipelineProgram) -> dict[str, str]:
    """File name -> text: layers that several stages have, the stages, pipeline.py and schedule.txt."""
    pipeline = pipeline.map(with_idioms)
    saving = frozenset[str]().union(*(saving_layers(stage.program) for stage in pipeline.stages))
    words = Words("", saving=saving)
    files, shared = _with_layers(pipeline, _files(pipeline, words), words)
    texts = {"layers.py": _layers_source(pipeline, shared, words)} if shared else {}
    texts |= {f"{file.module}.py": _stage_source(pipeline, file, words) for file in files}
    texts["pipeline.py"] = _assembly(pipeline, files)
    texts["schedule.txt"] = "".join(f"{line}\n" for line in pipeline.schedule)
    return texts


def _files(pipeline: PipelineProgram, words: Words) -> tuple[_File, ...]:
    """Stages that differ in the layers' paths, their number and their modes only share a file."""
    users: dict[str, list[int]] = {}
    for number, stage in enumerate(pipeline.stages):
        users.setdefault(emit_classes(_without_particulars(stage.program), words), []).append(number)
    return tuple(_File(tuple(stages)) for stages in users.values())


def _with_layers(
    pipeline: PipelineProgram, files: tuple[_File, ...], words: Words
) -> tuple[tuple[_File, ...], dict[str, tuple[int, ...]]]:
    """The files, and for each layer class that layers.py has the stages with it.

    Of two classes of one name, as stages on unequal meshes can have, layers.py has the one that more files share.
    """
    users: dict[str, dict[str, list[_File]]] = {}
    for file in files:
        program = pipeline.stages[file.stages[0]].program
        for layer in program.layers:
            text = layer_class(program, replace(layer, doc=""), words) + repr(layer.layouts)
            users.setdefault(layer.name, {}).setdefault(text, []).append(file)
    most = {name: max(texts.values(), key=len) for name, texts in users.items()}
    shared = {name: files_of_layer for name, files_of_layer in most.items() if len(files_of_layer) > 1}
    named = (
        replace(f, from_layers=frozenset(n for n, files_of_layer in shared.items() if f in files_of_layer))
        for f in files
    )
    stages = {
        name: tuple(sorted(n for file in files_of_layer for n in file.stages))
        for name, files_of_layer in shared.items()
    }
    return tuple(named), stages


def _layers_source(pipeline: PipelineProgram, shared: dict[str, tuple[int, ...]], words: Words) -> str:
    layers: dict[str, tuple[Program, ModuleClass]] = {}
    for name, stages in shared.items():
        program = pipeline.stages[stages[0]].program
        layer = next(layer for layer in program.layers if layer.name == name)
        layers[name] = program, replace(layer, doc=_layer_doc(pipeline, stages, name))
    title = f"{pipeline.name} for {pipeline.mesh_text}: {batch_text(pipeline.any)}; layers that several stages have"
    return emit_layers(layers, replace(words, title=title))


def _without_particulars(program: Program) -> Program:
    """The program without what pipeline.py can say, and without docstrings."""
    several = {run.layer for run in program.runs if sum(r.layer == run.layer for r in program.runs) > 1}
    runs = tuple(
        replace(run, paths=tuple(f"layers.{i}" for i in range(len(run.paths) if run.layer in several else 1)))
        for run in program.runs
    )
    layers = tuple(replace(layer, doc="") for layer in program.layers)
    root = replace(program.root, name="Stage", doc="")
    return replace(program, runs=runs, layers=layers, root=root, recompute={}, offload={})


# --- a stage's module -------------------------------------------------------------------------------------------------


def _stage_source(pipeline: PipelineProgram, file: _File, words: Words) -> str:
    first = pipeline.stages[file.stages[0]].program
    which = _numbers(file.stages)
    title = f"{pipeline.name} for {pipeline.mesh_text}: {batch_text(first)}; {which} of {len(pipeline.stages)}"
    layers = tuple(replace(layer, doc=_layer_doc(pipeline, file.stages, layer.name)) for layer in first.layers)
    program = replace(first, layers=layers, root=replace(first.root, name=file.root, doc=_root_doc(pipeline, file)))
    boundaries = _boundary_comments(pipeline, file)
    return emit_classes(program, replace(words, title=title, boundaries=boundaries, elsewhere=file.from_layers))


def _layer_doc(pipeline: PipelineProgram, stages: tuple[int, ...], layer: str) -> str:
    paths = [path for number in stages for path in pipeline.stages[number].program.paths(layer)]
    return paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]}"


def _root_doc(pipeline: PipelineProgram, file: _File) -> str:
    first, *others = file.stages
    shared = f"; pipeline.py has the layers of {_numbers(tuple(others))}" if others else ""
    return f"Stage {first}: {pipeline.stages[first].program.root.doc}{shared}."


def _boundary_comments(pipeline: PipelineProgram, file: _File) -> Mapping[str, Mapping[str, str]]:
    """`8 MiB from stage 0`; where stages share the file, what holds for all of them."""
    programs = [pipeline.stages[number].program for number in file.stages]
    receives = {}
    for name in programs[0].receives:
        sources = {number: (pipeline.source(number, name),) for number in file.stages}
        receives[name] = _boundary(
            [stage_program.receives[name] for stage_program in programs], f"from {_peers(sources, -1)}"
        )
    sends = {}
    for name in programs[0].sends:
        readers = {number: pipeline.readers(number, name) for number in file.stages}
        sends[name] = _boundary([stage_program.sends[name] for stage_program in programs], f"to {_peers(readers, 1)}")
    return {"RECEIVES": receives, "SENDS": sends}


def _boundary(boundaries: list[BoundaryTensor], peers: str) -> str:
    """One rank's bytes differ where the stages' meshes do."""
    sizes = " or ".join(dict.fromkeys(bytes_text(boundary.num_bytes) for boundary in boundaries))
    return f"{sizes} {peers}{', gradient back' if boundaries[0].spec.requires_grad else ''}"


def _peers(peers: Mapping[int, tuple[int, ...]], direction: int) -> str:
    """The other ends of a boundary, by stage."""
    distinct = set(peers.values())
    if len(distinct) == 1:
        return _numbers(distinct.pop())
    if all(others == (stage + direction,) for stage, others in peers.items()):
        return "the next stage" if direction > 0 else "the stage before"
    return "later stages" if direction > 0 else "earlier stages"


def _numbers(stages: tuple[int, ...]) -> str:
    """Numbers of stages in words: `stage 1`, `stages 1 and 2`, `stages 1 to 4`."""
    first, last = stages[0], stages[-1]
    if len(stages) == 1:
        return f"stage {first}"
    if len(stages) > 2 and stages == tuple(range(first, last + 1)):
        return f"stages {first} to {last}"
    return f"stages {', '.join(map(str, stages[:-1]))} and {last}"


# --- pipeline.py ------------------------------------------------------------------------------------------------------


def _assembly(pipeline: PipelineProgram, files: tuple[_File, ...]) -> str:
    home = {number: file for file in files for number in file.stages}
    title = (
        f'"""{plain(pipeline.name)} as a pipeline of {len(pipeline.stages)} stages on {pipeline.mesh_text},'
        f" schedule {plain(pipeline.schedule_name)}."
    )
    lines = [
        *textwrap.wrap(title, COLUMNS, break_long_words=False),
        "",
        "A pipeline rank is a group of ranks with a mesh of its own; schedule.txt has a line of actions for each.",
        "Generated by autopar from plan.yaml; it needs torch only.",
        '"""',
        "",
        f"from . import {', '.join(file.module for file in files)}",
        "from .runtime.pipeline import Pipeline, Stage",
        "",
        "PIPELINE = Pipeline(",
        "    stages=(",
    ]
    for number, stage in enumerate(pipeline.stages):
        lines += [f"        {line}" for line in _stage_call(pipeline, number, stage, home[number])]
    lines += ["    ),", *_meshes(pipeline)]
    if len(pipeline.tied) == 1:
        lines.append(f"    tied={literal(pipeline.tied)},")
    elif pipeline.tied:
        lines += ["    tied=(", *(f"        {literal(entry)}," for entry in pipeline.tied), "    ),"]
    return fitted("\n".join([*lines, ")", ""]))


def _meshes(pipeline: PipelineProgram) -> list[str]:
    """One mesh for all pipeline ranks, or a line for each; first_ranks where they are not in the order of pipeline
    ranks."""
    axes, sizes = pipeline.meshes[0]
    firsts = tiled(pipeline.ranks_of_stage_meshes, pipeline.first_ranks)
    if len(set(pipeline.meshes)) == 1:
        lines = [f"    axes={literal(axes)},", f"    sizes={literal(sizes)},"]
    else:
        mesh_rows = zip(pipeline.meshes, pipeline.ranks_of_stage_meshes, firsts, strict=True)
        rows = [f"        {literal(mesh)},  # {_ranks_text(first, count)}" for mesh, count, first in mesh_rows]
        lines = ["    meshes=(", *rows, "    ),"]
    if firsts != tiled(pipeline.ranks_of_stage_meshes):
        lines.append(f"    first_ranks={literal(firsts)},")
    return lines


def _ranks_text(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def _stage_call(pipeline: PipelineProgram, number: int, stage: PipelineStage, file: _File) -> list[str]:
    """`Stage(stage_1.Stage1, pipeline_rank=2, ...),` with what differs from the module's own tables."""
    first_layer = {layer: str(count) for layer, count in stage.first_layer.items() if count}
    tables = {"first_layer": first_layer}
    if number != file.stages[0]:
        tables = _particulars(stage.program, pipeline.stages[file.stages[0]].program) | tables
    parts = [f"{file.module}.{file.root}", f"pipeline_rank={stage.pipeline_rank}"]
    parts += [f"{name}={_table(entries, file)}" for name, entries in tables.items() if entries]
    short = f"Stage({', '.join(parts)}),"
    return [short] if len(short) <= 100 else ["Stage(", *(f"    {part}," for part in parts), "),"]


def _particulars(program: Program, base: Program) -> dict[str, dict[str, str]]:
    """The tables that override those of `own`, whose module `program` shares; those that are equal are left out."""

    def tables(of: Program) -> dict[str, dict[str, str]]:
        counts = {layer: len(of.paths(layer)) for layer in of.layer_names}
        return {
            "layers": {layer: paths_text(of.paths(layer)) for layer in counts},
            "recompute": {k: modes_text(of.recompute.get(k, (("none", n),))) for k, n in counts.items()},
            "offload": {k: offload_text(of.offload.get(k, (("", n),))) for k, n in counts.items()},
        }

    mine, base_tables = tables(program), tables(base)
    has = {"layers": True, "recompute": program.recompute or base.recompute, "offload": program.offload or base.offload}
    return {name: table for name, table in mine.items() if has[name] and table != base_tables[name]}


def _table(entries: Mapping[str, str], file: _File) -> str:
    return f"{{{', '.join(f'{file.module}.{layer}: {text}' for layer, text in entries.items())}}}"
