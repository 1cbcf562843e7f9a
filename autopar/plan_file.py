"""The form of a plan's file: YAML, with a line to name for everything that cannot be read."""

from __future__ import annotations

import re
from typing import Any

import yaml

from autopar.compression import Compression
from autopar.errors import ConstraintError, PlanError
from autopar.mesh import Mesh
from autopar.placement import Placement, Placements, R, Stored
from autopar.plan import (
    OFFLOADS,
    RECOMPUTE_MODES,
    Pipeline,
    Plan,
    Prediction,
    ScopePlan,
    StagePlan,
    is_offload,
    labels_text,
    placements_text,
    stored_text,
)
from autopar.seats import Seat, envelope

FORMAT = 1
REQUIRED = ("autopar_plan", "model", "cluster", "mesh", "global_batch_size", "micro_batches", "precision", "top")


def write(plan: Plan) -> str:
    """The file's text."""
    return yaml.safe_dump(_to_data(plan), sort_keys=False, width=120, default_flow_style=False)


def read(text: str, source: str) -> Plan:
    """The plan in a file's text. Raises PlanError naming the file, line and key of what cannot be read."""
    return _Reader(text, source).read()


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
        "mesh": f"pp{plan.pipeline.num_positions}" if plan.pipeline.seats else plan.layout,
        "global_batch_size": plan.global_batch_size,
        "micro_batches": plan.num_micro_batches,
        "precision": plan.precision,
        **({"compression": plan.compression.names} if plan.compression else {}),
        **({"fp8": True} if plan.fp8 else {}),
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
    entries: dict[str, Any] = {"schedule": pipeline.schedule, "offload": pipeline.offload}
    entries |= {"positions": [str(seat) for seat in pipeline.seats], "stages": stages}
    return {"pipeline": {name: entry for name, entry in entries.items() if entry}}


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
        for key in REQUIRED:
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
        seats = self._seats(whole)
        self.mesh = envelope([seat.mesh for seat in seats]) if seats else _inner(whole)
        seats = tuple(Seat(seat.mesh.over(self.mesh.axes), seat.group) for seat in seats)
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
            self._pipeline(num_positions, seats),
            self._compression(),
            self._fp8(),
            self.source,
            self.lines,
        )

    def _seats(self, whole: Mesh) -> tuple[Seat, ...]:
        """The positions' own meshes, where the file has them."""
        entries = self._mapping(("pipeline",), self.data.get("pipeline")).get("positions") or ()
        path = ("pipeline", "positions")
        if entries and (len(entries) != whole.size("pp") or whole.axes != ("pp",)):
            raise self.fail(path, f"{len(entries)} positions for the mesh {whole}", f"mesh: pp{len(entries)}")
        found = []
        for number, text in enumerate(entries):
            try:
                found.append(Seat.parse(str(text)))
            except ValueError as error:
                raise self.fail((*path, str(number)), str(error)) from None
        return tuple(found)

    def _pipeline(self, num_positions: int, seats: tuple[Seat, ...]) -> Pipeline:
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
        return Pipeline(num_positions, str(data.get("schedule", "")), tuple(stages), offload, seats)

    def _compression(self) -> Compression:
        try:
            return Compression.parse(self.data.get("compression"))
        except ConstraintError as error:
            values = error.values if isinstance(error.values, str) else ""
            alternatives = error.alternatives if isinstance(error.alternatives, str) else ""
            raise self.fail(("compression",), f"{error.constraint}: {values}", alternatives) from None

    def _fp8(self) -> bool:
        given = self.data.get("fp8", False)
        if not isinstance(given, bool):
            raise self.fail(("fp8",), f"{given!r} is neither true nor false", "true or false")
        return given

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


def _inner(whole: Mesh) -> Mesh:
    """A mesh without its pipeline axis."""
    return Mesh(whole.axes[1:], whole.sizes[1:]) if "pp" in whole.axes else whole
