"""The Plan: everything that was decided, as a file that a person can read, edit and give back.

Written are the mesh, the placements of parameters and inputs, the calls that do something other than follow their
inputs, and the prediction. A call's default is the option that needs the least communication given where its inputs
lie; a tensor's default is where its producer left it. `choices.py` derives the rest and validates what was edited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.placement import Placement, Placements, R
from autopar.price import Stored

FORMAT = 1
RECOMPUTE_MODES = ("none", "offload", "selective", "full")
"""What becomes of a layer's activations until its backward: kept, held by the host, partly or wholly computed again."""
OFFLOADS = ("none", "optimizer", "parameters")
"""What lives in host memory: the optimiser's state and masters; under ZeRO-3 the shards of the parameters too.
`nvme:/a/folder` keeps the optimiser's state and masters in files of that folder."""


def is_offload(text: str) -> bool:
    """Whether `text` is one of OFFLOADS or names a folder."""
    return text in OFFLOADS or text.startswith("nvme:/")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one optimiser step by kind, and bytes on the fullest rank by kind.

    positions: the same bytes for each pipeline position, where there are several.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    num_bytes: Mapping[str, float] = field(default_factory=dict)
    positions: tuple[Mapping[str, float], ...] = ()

    @property
    def step_seconds(self) -> float:
        return sum(value for kind, value in self.seconds.items() if kind != "hidden communication")

    @property
    def peak_bytes(self) -> float:
        return sum(self.num_bytes.values())


@dataclass(frozen=True, slots=True)
class ScopePlan:
    """Decisions of the top level ("") or of one layer class.

    parameters: all of them. inputs: batch inputs, or what enters a layer. calls: axis labels of calls that differ
    from their default. tensors: kept placements ("name" or "name[i]") that differ from their producer's.
    """

    parameters: Mapping[str, Stored]
    inputs: Mapping[str, Placements]
    calls: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, Placements]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage: blocks `first` to `last` (not included) of the model's chain of blocks.

    recompute: per layer class, how many of its layers in this stage, in order, run in which mode ("none", "selective",
    "full"); classes that are left out keep everything.
    """

    first: int
    last: int
    recompute: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the model is cut over `num_positions` equal groups of ranks, each with the plan's mesh.

    schedule: of autopar's schedules ("" with one position). stages: in model order; more than positions where a
    position runs several. offload: of OFFLOADS, "" for none.
    """

    num_positions: int = 1
    schedule: str = ""
    stages: tuple[StagePlan, ...] = ()
    offload: str = ""

    @property
    def num_chunks(self) -> int:
        """Stages of one position."""
        return max(len(self.stages) // self.num_positions, 1)

    @property
    def is_plain(self) -> bool:
        """One position that keeps all activations and everything on the device."""
        return self.num_positions == 1 and not self.offload and not any(s.recompute for s in self.stages)


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module's docstring. mesh: of one pipeline position. `scopes` maps "" and layer class names to their
    decisions, which hold for every stage."""

    model: str
    cluster: str
    mesh: Mesh
    global_batch_size: int
    num_micro_batches: int
    precision: str
    scopes: Mapping[str, ScopePlan]
    prediction: Prediction = Prediction()
    runner_ups: tuple[tuple[str, float, str], ...] = ()
    pipeline: Pipeline = Pipeline()
    source: str = field(default="", compare=False, repr=False)
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_ranks(self) -> int:
        """Ranks of all pipeline positions."""
        return self.mesh.num_ranks * self.pipeline.num_positions

    @property
    def layout(self) -> str:
        """The mesh with the pipeline's axis before it: `pp2 x dp2 x tp2`."""
        return layout_text(self.pipeline.num_positions, self.mesh)

    def place(self, scope: str, *path: str) -> str:
        """`plan.yaml, line 12: layers.Block.calls.linear`, or without the line for a plan that was not read."""
        full = (("layers", scope) if scope else ("top",)) + path
        line = next((self.lines[full[:n]] for n in range(len(full), 0, -1) if full[:n] in self.lines), None)
        return ("" if line is None else f"{self.source}, line {line}: ") + ".".join(full)

    def to_yaml(self) -> str:
        """The file's text; `Plan.from_yaml` reads it back to an equal plan."""
        return yaml.safe_dump(_to_data(self), sort_keys=False, width=120, default_flow_style=False)

    @classmethod
    def from_yaml(cls, text: str, source: str = "plan.yaml") -> Plan:
        """Raises PlanError naming the file, line and key of what cannot be read."""
        return _Reader(text, source).read()

    @classmethod
    def from_file(cls, path: str | Path) -> Plan:
        """`from_yaml` of a file. Raises PlanError, also where it cannot be read."""
        try:
            return cls.from_yaml(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}", values=str(error)) from None


def layout_text(num_positions: int, mesh: Mesh) -> str:
    """`pp2 x dp2 x tp2`."""
    if num_positions == 1:
        return str(mesh)
    return f"pp{num_positions}" + (f" x {mesh}" if mesh.axes else "")


def placements_text(placements: Placements, mesh: Mesh) -> str:
    """`dp=S(0) tp=R`."""
    return " ".join(f"{axis}={p}" for axis, p in zip(mesh.axes, placements, strict=True))


def labels_text(labels: tuple[str, ...], mesh: Mesh) -> str:
    """`dp=b.0 tp=n`."""
    return " ".join(f"{axis}={label}" for axis, label in zip(mesh.axes, labels, strict=True))


def stored_text(stored: Stored, mesh: Mesh) -> str:
    """`dp=Rp tp=S(0) zero=1`."""
    zero = f" zero={stored.zero}" if stored.zero else ""
    return placements_text(stored.placements, mesh) + zero


def _to_data(plan: Plan) -> dict[str, Any]:
    def scope_data(scope: ScopePlan) -> dict[str, Any]:
        return {
            "inputs": {n: placements_text(p, plan.mesh) for n, p in scope.inputs.items()},
            "parameters": {n: stored_text(s, plan.mesh) for n, s in scope.parameters.items()},
            "calls": {n: labels_text(labels, plan.mesh) for n, labels in scope.calls.items()},
            "tensors": {n: placements_text(p, plan.mesh) for n, p in scope.tensors.items()},
        }

    return {
        "autopar_plan": FORMAT,
        "model": plan.model,
        "cluster": plan.cluster,
        "mesh": plan.layout,
        "global_batch_size": plan.global_batch_size,
        "micro_batches": plan.num_micro_batches,
        "precision": plan.precision,
        **_pipeline_data(plan.pipeline),
        "top": scope_data(plan.scopes[""]),
        "layers": {name: scope_data(scope) for name, scope in plan.scopes.items() if name},
        "predicted_seconds": {k: float(v) for k, v in plan.prediction.seconds.items()},
        "predicted_bytes": {k: float(v) for k, v in plan.prediction.num_bytes.items()},
        **_positions_data(plan.prediction),
        "runner_ups": [{"plan": n, "seconds": float(s), "why": w} for n, s, w in plan.runner_ups],
    }


def _positions_data(prediction: Prediction) -> dict[str, Any]:
    positions = [{k: float(v) for k, v in kinds.items()} for kinds in prediction.positions]
    return {"predicted_bytes_by_position": positions} if positions else {}


def _pipeline_data(pipeline: Pipeline) -> dict[str, Any]:
    if pipeline.is_plain and not pipeline.stages:
        return {}
    stages = []
    for stage in pipeline.stages:
        modes = {n: ", ".join(f"{mode} {count}" for mode, count in runs) for n, runs in stage.recompute.items()}
        stages.append({"blocks": f"{stage.first}-{stage.last - 1}"} | ({"recompute": modes} if modes else {}))
    entries = {"schedule": pipeline.schedule, "offload": pipeline.offload}
    return {"pipeline": {name: text for name, text in entries.items() if text} | {"stages": stages}}


class _Reader:
    """YAML -> Plan, remembering the line of every key for error messages."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.lines: dict[tuple[str, ...], int] = {}
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"{source} is not YAML", values=str(error).replace("\n", " ")) from None
        if not isinstance(self.data, dict) or root is None:
            raise PlanError(
                f"{source} is not a plan",
                values=type(self.data).__name__,
                alternatives="a mapping as Plan.to_yaml writes it",
            )
        self._remember(root, ())

    def _remember(self, node: Any, path: tuple[str, ...]) -> None:
        self.lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self._remember(value, (*path, str(key.value)))
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self._remember(value, (*path, str(number)))

    def fail(self, path: tuple[str, ...], message: str, alternatives: str = "") -> PlanError:
        line = self.lines.get(path, self.lines.get(path[:-1], 1))
        return PlanError(f"{self.source}, line {line}: {'.'.join(path)}: {message}", alternatives=alternatives or None)

    def read(self) -> Plan:
        for key in (
            "autopar_plan",
            "model",
            "cluster",
            "mesh",
            "global_batch_size",
            "micro_batches",
            "precision",
            "top",
        ):
            if key not in self.data:
                raise self.fail((key,), "is missing")
        if self.data["autopar_plan"] != FORMAT:
            raise self.fail(("autopar_plan",), f"format {self.data['autopar_plan']} is not {FORMAT}")
        try:
            whole = Mesh.parse(str(self.data["mesh"]))
        except ValueError as error:
            raise self.fail(("mesh",), str(error)) from None
        if "pp" in whole.axes[1:]:
            raise self.fail(("mesh",), "pp must be the first axis: every stage is a block of neighbouring ranks")
        num_positions = whole.size("pp")
        self.mesh = Mesh(whole.axes[1:], whole.sizes[1:]) if num_positions > 1 else whole
        scopes = {"": self._scope(("top",))}
        for name in self._mapping(("layers",), self.data.get("layers")):
            scopes[name] = self._scope(("layers", name))
        return Plan(
            str(self.data["model"]),
            str(self.data["cluster"]),
            self.mesh,
            self._count("global_batch_size"),
            self._count("micro_batches"),
            str(self.data["precision"]),
            scopes,
            Prediction(
                dict(self.data.get("predicted_seconds") or {}),
                dict(self.data.get("predicted_bytes") or {}),
                tuple(dict(kinds) for kinds in self.data.get("predicted_bytes_by_position") or ()),
            ),
            tuple((r["plan"], float(r["seconds"]), r["why"]) for r in self.data.get("runner_ups") or ()),
            self._pipeline(num_positions),
            self.source,
            self.lines,
        )

    def _pipeline(self, num_positions: int) -> Pipeline:
        data = self._mapping(("pipeline",), self.data.get("pipeline"))
        if not data:
            if num_positions > 1:
                raise self.fail(("mesh",), "has a pp axis, but the plan has no pipeline")
            return Pipeline()
        stages = []
        for number, entry in enumerate(data.get("stages") or ()):
            path = ("pipeline", "stages", str(number))
            match = re.fullmatch(r"(\d+)-(\d+)", str(self._mapping(path, entry).get("blocks", "")))
            if match is None:
                raise self.fail(path, f"blocks {entry.get('blocks')!r} is not a range", "first-last, such as 0-8")
            modes = self._mapping((*path, "recompute"), entry.get("recompute"))
            recompute = {str(n): self._modes((*path, "recompute", str(n)), str(text)) for n, text in modes.items()}
            stages.append(StagePlan(int(match.group(1)), int(match.group(2)) + 1, recompute))
        if len(stages) % num_positions or not stages:
            message = f"{len(stages)} stages cannot be dealt to {num_positions} positions"
            raise self.fail(("pipeline", "stages"), message)
        offload = str(data.get("offload", ""))
        if offload and not is_offload(offload):
            legal = ", ".join((*OFFLOADS, "nvme:/a/folder"))
            raise self.fail(("pipeline", "offload"), f"{offload!r} is unknown", legal)
        offload = "" if offload == "none" else offload
        return Pipeline(num_positions, str(data.get("schedule", "")), tuple(stages), offload)

    def _modes(self, path: tuple[str, ...], text: str) -> tuple[tuple[str, int], ...]:
        found = []
        for part in text.split(","):
            mode, _, count = part.strip().partition(" ")
            if mode not in RECOMPUTE_MODES or not count.isdigit():
                raise self.fail(path, f"cannot read {part.strip()!r}", f"MODE COUNT with {', '.join(RECOMPUTE_MODES)}")
            found.append((mode, int(count)))
        return tuple(found)

    def _scope(self, path: tuple[str, ...]) -> ScopePlan:
        data = self.data
        for part in path:
            data = self._mapping(path, data[part])
        for part in ("parameters", "inputs", "calls", "tensors"):
            self._mapping((*path, part), data.get(part))
        parameters = {n: self._stored((*path, "parameters", n), t) for n, t in (data.get("parameters") or {}).items()}
        inputs = {n: self._placements((*path, "inputs", n), t) for n, t in (data.get("inputs") or {}).items()}
        calls = {n: self._labels((*path, "calls", n), t) for n, t in (data.get("calls") or {}).items()}
        tensors = {n: self._placements((*path, "tensors", n), t) for n, t in (data.get("tensors") or {}).items()}
        return ScopePlan(parameters, inputs, calls, tensors)

    def _mapping(self, path: tuple[str, ...], value: Any) -> dict[str, Any]:
        if not isinstance(value, (dict, type(None))):
            raise self.fail(path, f"{value!r} is not a mapping", "names with their placements")
        return value or {}

    def _count(self, key: str) -> int:
        value = self.data[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail((key,), f"{value!r} is not a count", "a whole number of at least 1")
        return value

    def _pairs(self, path: tuple[str, ...], text: Any, extra: tuple[str, ...] = ()) -> dict[str, str]:
        pairs: dict[str, str] = {}
        for part in str(text).split():
            name, equals, value = part.partition("=")
            if not equals or name not in (*self.mesh.axes, *extra):
                raise self.fail(
                    path, f"cannot read {part!r}", f"axis=value with axes {', '.join(self.mesh.axes) or '(none)'}"
                )
            pairs[name] = value
        return pairs

    def _placements(self, path: tuple[str, ...], text: Any, extra: tuple[str, ...] = ()) -> Placements:
        pairs = self._pairs(path, text, extra)
        try:
            return tuple(Placement.parse(pairs[axis]) if axis in pairs else R for axis in self.mesh.axes)
        except ValueError as error:
            raise self.fail(path, str(error)) from None

    def _stored(self, path: tuple[str, ...], text: Any) -> Stored:
        pairs = self._pairs(path, text, ("zero",))
        zero = pairs.get("zero", "0")
        if zero not in ("0", "1", "2", "3"):
            raise self.fail(path, f"zero={zero}", "zero is 0, 1, 2 or 3")
        return Stored(self._placements(path, text, ("zero",)), int(zero))

    def _labels(self, path: tuple[str, ...], text: Any) -> tuple[str, ...]:
        pairs = self._pairs(path, text)
        return tuple(pairs.get(axis, "R") for axis in self.mesh.axes)
