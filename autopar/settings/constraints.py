"""The user's constraints: pinned and forbidden decisions, checked against the model before planning.

A plain dict:

    {"pp": 2, "dp": 2, "tp": 2,                           pipeline ranks, degrees of mesh axes
     "ddp": 2,                                            groups of dp ranks, each with all ZeRO shards
     "ep": 2,                                             ranks of dp that shard the experts
     "etp": 1,                                            ranks that share each expert: 1, or all of ttp x tp
     "ttp": 2,                                            ranks of the outer axis of tensor parallelism
     "zero": 1, "micro_batches": 4, "memory": "20GiB",    ZeRO stage, accumulation, bytes per rank
     "schedule": "1f1b", "chunks": 2,                     pipeline schedule, stages per pipeline rank
     "recompute": "full",                                 of every layer: none, offload, selective or full
     "offload": "optimizer",                              to the host: or "parameters", "nvme:/a/folder", "none"
     "cp": 2,                                             ranks that shard the positions of a sequence
     "context": "ring",                                   attention under cp: or "all_gather", "heads"
     "parameters": {"*.q_proj.weight": {"tp": "S(0)"}},   pin placements by name pattern (fnmatch)
     "activations": {"*.mlp": {"tp": "R"}},               outputs of the calls of matching modules or nodes
     "forbid_parameters": {...}, "forbid_activations": {...}}
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from autopar.accumulation.accumulating_trace import AccumulatingTrace
from autopar.errors import ConstraintError
from autopar.files.text_files import near, shown
from autopar.ir.chain import buffer_across_units
from autopar.ir.graph import Graph
from autopar.ir.mesh import AXIS_NAMES, PIPELINE_AXIS, SHARDING_AXES, TENSOR_AXES, Mesh
from autopar.ir.placement import Placement, Placements, Stored
from autopar.ir.plan_data import OFFLOADS, RECOMPUTE_MODES, is_offload
from autopar.rules.families.attention import EXCHANGES, HEADS
from autopar.rules.rule import AxisOption
from autopar.settings.arguments import whole, word
from autopar.sharding.call_options import (
    Operator,
    Option,
    can_cut_context,
    expert_axes,
    has_context,
    num_experts,
    sequence_length,
)
from autopar.sharding.scopes import Scope, scopes_of
from autopar.units import either_text
from codegen.axis_records import AXES
from cost_models.schedule import SCHEDULES

_SCALARS = ("etp", "zero", "micro_batches", "memory", "schedule", "chunks", "recompute", "offload", "context")
_WORDS: Mapping[str, tuple[str, ...]] = {
    "schedule": tuple(SCHEDULES),
    "recompute": RECOMPUTE_MODES,
    "context": (*EXCHANGES, "heads"),
}
_PATTERNS = ("parameters", "activations", "forbid_parameters", "forbid_activations")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

Pattern = tuple[str, tuple[tuple[str, Placement], ...]]


@dataclass(frozen=True, slots=True)
class Constraints:
    """The parsed dict. degrees: axis -> ranks. Patterns: (glob, ((axis, placement), ...)).

    etp: ranks of ttp x tp that share each expert; if fewer than all, the other ranks have other experts.
    context: the exchange of attention calls whose sequence cp shards: of keys and values, or by heads, which exchanges
    queries, keys and values. None takes the fastest.
    """

    degrees: Mapping[str, int]
    etp: int | None = None
    zero: int | None = None
    micro_batches: int | None = None
    memory_bytes: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: str | None = None
    offload: str | None = None
    context: str | None = None
    parameters: tuple[Pattern, ...] = ()
    activations: tuple[Pattern, ...] = ()
    forbid_parameters: tuple[Pattern, ...] = ()
    forbid_activations: tuple[Pattern, ...] = ()

    @property
    def expert_ranks(self) -> int:
        """The ranks that the pins give to the sharding of experts."""
        tensor = self.degrees.get("tp", 1) * self.degrees.get("ttp", 1)
        return self.degrees.get("ep", 1) * (tensor if self.etp == 1 else 1)

    @classmethod
    def parse(cls, settings: Mapping[str, Any] | Constraints | None) -> Constraints:
        """Parse a mapping. Raises ConstraintError with the key, its value and the legal values."""
        if isinstance(settings, Constraints):
            return settings
        if settings is not None and not isinstance(settings, Mapping):
            raise ConstraintError(
                "constraints must map names to values", values=shown(settings), alternatives="a dict such as {'tp': 2}"
            )
        settings = dict(settings or {})
        names = (*AXIS_NAMES, *_SCALARS, *_PATTERNS)
        for key in settings:
            if key not in names:
                raise ConstraintError("unknown constraint", values=shown(key), alternatives=near(key, names))
        degrees = {axis: whole(axis, settings[axis], 1) for axis in AXIS_NAMES if axis in settings}
        etp = whole("etp", settings["etp"], 1) if settings.get("etp") is not None else None
        zero = whole("zero", settings["zero"], 0) if "zero" in settings else None
        if zero is not None and zero > 3:
            raise ConstraintError("zero must be a ZeRO stage", values=f"{zero}", alternatives="0, 1, 2 or 3")
        micro = whole("micro_batches", settings["micro_batches"], 1) if "micro_batches" in settings else None
        memory = parse_bytes(settings["memory"]) if settings.get("memory") is not None else None
        chunks = whole("chunks", settings["chunks"], 1) if "chunks" in settings else None
        chosen: dict[str, Any] = {
            name: word(name, settings[name], legal) for name, legal in _WORDS.items() if settings.get(name) is not None
        }
        offload = settings.get("offload")
        if offload is not None and not (isinstance(offload, str) and is_offload(offload)):
            legal = (*OFFLOADS, "nvme:/a/folder")
            raise ConstraintError("unknown offload", values=shown(offload), alternatives=", ".join(legal))
        chosen |= {name: _patterns(name, settings.get(name)) for name in _PATTERNS}
        constraints = cls(
            degrees=degrees,
            etp=etp,
            zero=zero,
            micro_batches=micro,
            memory_bytes=memory,
            chunks=chunks,
            offload="" if offload == "none" else offload,
            **chosen,
        )
        constraints._check_together()
        return constraints

    def _check_together(self) -> None:
        """Raise ConstraintError for pins that exclude one another."""
        pipeline_ranks, chunks = self.degrees.get("pp"), self.chunks or 1
        is_chosen = self.schedule is None or SCHEDULES[self.schedule].allows(chunks)
        choosing = [name for name, schedule in SCHEDULES.items() if schedule.chooses_chunks]
        rules = (
            (pipeline_ranks == 1 and self.schedule, "a schedule is of a pipeline", f"schedule={self.schedule}, pp=1"),
            (pipeline_ranks == 1 and chunks > 1, "several chunks are of a pipeline", f"chunks={chunks}, pp=1"),
            (
                chunks > 1 and not is_chosen,
                f"the number of stages per pipeline rank can be chosen for the schedule {either_text(choosing)} alone",
                f"chunks={chunks}, schedule={self.schedule}",
            ),
            (
                self.offload == "parameters" and self.zero not in (None, 3),
                "ZeRO-3 alone has shards of parameters that can be offloaded",
                f"offload=parameters, zero={self.zero}",
            ),
            (
                self.context and self.degrees.get("cp") == 1,
                "sequences are cut over cp",
                f"context={self.context}, cp=1",
            ),
        )
        for is_wrong, constraint, values in rules:
            if is_wrong:
                raise ConstraintError(constraint, values=values, alternatives="one of the two left out")

    def check(self, graph: Graph) -> None:
        """Raise ConstraintError for a pattern that matches nothing, with the nearest names, and for pins of cp,
        context, ep or etp that the model cannot have."""
        if self.context and not has_context(graph):
            raise ConstraintError(
                "no attention call of the model can be cut along its sequence",
                values=f"context={self.context}",
                alternatives='scaled_dot_product_attention without dropout (attn_implementation="sdpa"), '
                "as many queries as keys under a causal mask, no learned mask",
            )
        cp, length = self.degrees.get("cp", 1), sequence_length(graph)
        if cp > 1 and (not length or length % cp):
            legal = ", ".join(str(n) for n in range(2, length + 1) if length % n == 0)
            raise ConstraintError(
                "cp does not divide the positions of sequences" if length else "cp needs a sequence",
                values=f"cp={cp}, " + (f"{length} positions" if length else "no input of the model is a sequence"),
                alternatives=f"cp of {legal}" if legal else "cp left out",
            )
        ep, experts = self.degrees.get("ep", 1), num_experts(graph)
        if ep > 1 and (not experts or experts % ep):
            legal = ", ".join(str(n) for n in range(2, experts + 1) if experts % n == 0)
            raise ConstraintError(
                "ep does not divide the experts of the mixture" if experts else "ep needs a mixture of experts",
                values=f"ep={ep}, {experts or 'no'} experts" + ("" if experts else " that autopar recognizes"),
                alternatives=f"ep of {legal}"
                if legal
                else "ep left out, or the weights of all experts in one parameter [E, in, out]",
            )
        self._check_folding(graph)
        parameters = [name for p in graph.parameters for name in (p.name, *p.aliases)]
        activations = sorted(activation_names(graph))
        for patterns, names, noun in (
            (self.parameters + self.forbid_parameters, parameters, "parameter"),
            (self.activations + self.forbid_activations, activations, "module or call"),
        ):
            for glob, _ in patterns:
                if not any(fnmatchcase(name, glob) for name in names):
                    plain = glob.replace("*", "")
                    ends = {name[-len(plain) :]: name for name in reversed(names)}  # most patterns give the end
                    close = [ends[end] for end in difflib.get_close_matches(plain, ends, 3, 0.3)] or names[:3]
                    raise ConstraintError(
                        f"a pattern matches no {noun} of the model",
                        values=shown(glob),
                        alternatives=["a pattern for names like " + ", ".join(close)],
                    )

    def _check_folding(self, graph: Graph) -> None:
        """Raise ConstraintError for an etp without experts, or with a degree that programs do not support."""
        tensor = self.degrees.get("tp", 1) * self.degrees.get("ttp", 1)
        if self.etp is None:
            return
        if not num_experts(graph):
            raise ConstraintError(
                "etp needs a mixture of experts",
                values=f"etp={self.etp}, no experts that autopar recognizes",
                alternatives="etp left out",
            )
        if self.etp not in (1, tensor):
            raise ConstraintError(
                "etp must be 1, or all ranks of ttp x tp",
                values=f"etp={self.etp}, ttp x tp = {tensor}" + ("" if "tp" in self.degrees else ", tp is not pinned"),
                alternatives=f"etp=1, or etp={self.etp} with tp={self.etp}"
                + (f", or etp={tensor}" if tensor > 1 else ""),
            )
        ranks, experts, length = self.expert_ranks, num_experts(graph), sequence_length(graph)
        if self.etp == 1 < tensor and (experts % ranks or not length or length % tensor):
            raise ConstraintError(
                "with etp=1, ttp x tp must divide the positions, and ep x ttp x tp the experts",
                values=f"ttp x tp = {tensor} for {length} positions, ep x ttp x tp = {ranks} for {experts} experts",
                alternatives=f"etp={tensor}, or degrees that divide them",
            )

    def allowed_stored(self, scope: Scope, name: str, options: tuple[Stored, ...], mesh: Mesh) -> tuple[Stored, ...]:
        """Return a parameter's options that agree with the pins."""
        names = scope.full_names(name)
        return self._filter(
            names, options, lambda o: (o.placements,), mesh, self.parameters, self.forbid_parameters, name
        )

    def offered(self, operator: Operator, options: tuple[Option, ...], mesh: Mesh) -> tuple[Option, ...]:
        """Return the options that agree with `etp` and `context`. Raises ConstraintError if cp divides neither sequence
        nor heads, or if ttp x tp does not divide the experts or the positions of their rows."""
        if self.etp is not None and operator.multiplies_by_expert:
            return self._folded(operator, options, mesh)
        cutting = [number for number, axis in enumerate(mesh.axes) if AXES[axis].cuts_sequence]
        if self.context is None or not cutting or operator.positions is None or not can_cut_context(operator):
            return options
        (number,) = cutting
        agreeing = tuple(option for option in options if _exchange(option.axes[number]) == self.context)
        if not agreeing:
            queries, keys = (operator.inputs[i].shape[-3:-1] for i in (0, 1))
            raise ConstraintError(
                f"{operator.node.name} cannot be sharded like this on {mesh}",
                values=f"context={self.context}, heads and positions of queries {queries}, of keys {keys}",
                alternatives=sorted({_exchange(option.axes[number]) for option in options} - {""}) or "another cp",
            )
        return agreeing

    def _folded(self, operator: Operator, options: tuple[Option, ...], mesh: Mesh) -> tuple[Option, ...]:
        """Return the options with each expert on `etp` ranks of ttp x tp."""
        tensor = {
            number: size
            for number, (axis, size) in enumerate(zip(mesh.axes, mesh.sizes, strict=True))
            if axis in TENSOR_AXES
        }
        shared = [
            math.prod(size for number, size in tensor.items() if number not in expert_axes(operator, option))
            for option in options
        ]
        agreeing = tuple(option for option, number in zip(options, shared, strict=True) if number == self.etp)
        if not agreeing:
            raise ConstraintError(
                f"{operator.node.name} cannot be sharded like this on {mesh}",
                values=f"etp={self.etp}, {operator.rule.sizes[operator.experts or 'e']} experts, "
                f"rows {operator.inputs[0].shape}",
                alternatives=[f"etp={number}" for number in sorted(set(shared))] or "another tp",
            )
        return agreeing

    def allowed_options(
        self, scope: Scope, operator: Operator, options: tuple[Option, ...], mesh: Mesh
    ) -> tuple[Option, ...]:
        """Return a call's options with outputs that agree with the pins."""
        names = [operator.node.name, *scope.full_names(operator.node.module)]
        patterns, forbidden = self.activations, self.forbid_activations
        return self._filter(names, options, lambda o: o.outputs, mesh, patterns, forbidden, operator.node.name)

    def _filter(
        self,
        names: Iterable[str],
        options: tuple[Any, ...],
        placements_of: Any,
        mesh: Mesh,
        pins: tuple[Pattern, ...],
        forbidden: tuple[Pattern, ...],
        subject: str,
    ) -> tuple[Any, ...]:
        names = list(names)
        for glob, wanted in pins:
            if any(fnmatchcase(name, glob) for name in names):
                agreeing = tuple(o for o in options if all(_agrees(p, wanted, mesh) for p in placements_of(o)))
                if not agreeing:
                    legal = sorted(
                        {
                            str(p[mesh.axes.index(a)])
                            for o in options
                            for p in placements_of(o)
                            for a, _ in wanted
                            if a in mesh.axes
                        }
                    )
                    raise ConstraintError(
                        f"{subject} cannot have the pinned placement",
                        values=f"{glob}: " + ", ".join(f"{a}={p}" for a, p in wanted) + f" on {mesh}",
                        alternatives=[", ".join(legal) or "no pin"],
                    )
                options = agreeing
        for glob, wanted in forbidden:
            if any(fnmatchcase(name, glob) for name in names):
                agreeing = tuple(o for o in options if not all(_agrees(p, wanted, mesh) for p in placements_of(o)))
                if not agreeing:
                    raise ConstraintError(
                        f"the forbidden placements leave nothing for {subject} on {mesh}",
                        values=shown(glob),
                        alternatives="a narrower pattern, or fewer forbidden placements",
                    )
                options = agreeing
        return options


def activation_names(graph: Graph) -> set[str]:
    """Return the names that activation patterns can match: calls and module paths."""
    return {
        name
        for scope in scopes_of(graph)
        for node in scope.nodes
        for name in (node.name, *scope.full_names(node.module))
        if name
    }


def _exchange(option: AxisOption) -> str:
    """Return the exchange of attention on an axis, in the words of `context`; "" for another option."""
    return "heads" if option.label in HEADS else option.lowering if option.lowering in EXCHANGES else ""


def parse_bytes(value: Any) -> int:
    """Parse `"20GiB"`, `"512 MB"` or a number of bytes."""
    number, unit = value, ""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", value)
        number, unit = (float(match.group(1)), match.group(2).lower()) if match else (0, "")
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    is_number = is_number and abs(number) <= sys.float_info.max
    if not is_number or unit not in _UNITS or number * _UNITS[unit] < 1:
        raise ConstraintError(
            "memory must be a number of bytes above 0", values=shown(value), alternatives='"20GiB", or 21474836480'
        )
    return int(number * _UNITS[unit])


def _patterns(key: str, table: Any) -> tuple[Pattern, ...]:
    patterns = []
    if table is not None and not isinstance(table, Mapping):
        raise ConstraintError(
            f"{key} must map name patterns to placements",
            values=shown(table),
            alternatives='{"*.weight": {"tp": "S(0)"}}',
        )
    for glob, wanted in (table or {}).items():
        try:
            pairs = tuple((str(axis), Placement.parse(str(text))) for axis, text in dict(wanted).items())
        except (ValueError, TypeError) as error:
            raise ConstraintError(
                f"{key}[{glob!r}] must map axes to placements", values=shown(wanted), alternatives=str(error)
            ) from None
        for axis, _ in pairs:
            if axis not in SHARDING_AXES:
                raise ConstraintError(
                    f"{key}[{glob!r}] names an unknown axis", values=axis, alternatives=" or ".join(SHARDING_AXES)
                )
        patterns.append((str(glob), pairs))
    return tuple(patterns)


def _agrees(placements: Placements, wanted: tuple[tuple[str, Placement], ...], mesh: Mesh) -> bool:
    """Return whether placements agree with a pin. R in a pin matches both kinds of replication."""
    for axis, placement in wanted:
        if axis in mesh.axes:
            here = placements[mesh.axes.index(axis)]
            if here != placement and not (here.is_replicated and placement.is_replicated):
                return False
    return True


def check_micro_batches(traced: AccumulatingTrace, limits: Constraints) -> None:
    """Raise ConstraintError for a pinned number of micro-batches that cannot make the batch."""
    reason = traced.whole_batch_reason(limits.micro_batches or 1)
    if reason is not None:
        raise ConstraintError(
            "the model needs its whole batch at once, in one micro-batch",
            values=f"micro_batches={limits.micro_batches}, but {reason}",
            alternatives="micro_batches=1",
        )


def without_shared_buffers(limits: Constraints, graph: Graph) -> Constraints:
    """Return the constraints, without pipelines where one stage would read a buffer that another one updates.

    Raises ConstraintError for a pinned pipeline.
    """
    buffer = buffer_across_units(graph)
    if buffer and limits.degrees.get("pp", 1) > 1:
        raise ConstraintError(
            "a pipeline would read a buffer in one stage and update it in another",
            values=f"pp={limits.degrees['pp']}, buffer {buffer}",
            alternatives=["pp=1", "update the buffer in the module that reads it"],
        )
    return replace(limits, degrees={**limits.degrees, PIPELINE_AXIS: 1}) if buffer else limits
