"""Read and write a plan's file: YAML, with the line of everything that cannot be read.

Every value has a type and, if its words are fixed, an enumeration, because values read here go into generated source.
Other modules check placements and stages against the model's graph (sharding/validate_plan.py, planning/user_plans.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import yaml

from autopar.errors import ConstraintError, PlanError
from autopar.files.text_files import near, parse_yaml, shown
from autopar.ir.compression import Compression
from autopar.ir.mesh import AXIS_NAMES, PIPELINE_AXIS, SHARDING_AXES, Mesh
from autopar.ir.placement import Placement, Placements, Stored
from autopar.ir.plan_data import (
    OFFLOADS,
    RECOMPUTE_MODES,
    Basis,
    Pipeline,
    PlanData,
    Prediction,
    ScopePlan,
    StagePlan,
    is_offload,
    labels_text,
    placements_text,
    stored_text,
)
from autopar.ir.stage_mesh import StageMesh, envelope
from codegen.runtime.compiled_layers import BACKENDS
from codegen.runtime.precision import PRECISIONS
from cost_models.schedule import SCHEDULES

FORMAT = 1
LONGEST = 500
"""The most characters of a text."""
REQUIRED = ("autopar_plan", "model", "cluster", "mesh", "global_batch_size", "micro_batches", "precision", "top")
PADDINGS = ("padded_to", "experts_padded_to", "heads_padded_to")
OPTIONAL = (
    *("compression", "fp8", *PADDINGS, "pipeline", "layers", "priced_for", "predicted_seconds", "predicted_bytes"),
    *("predicted_bytes_by_position", "runner_ups"),
)
BASIS = ("inputs", "kernels", "backend")
SCOPE = ("inputs", "parameters", "calls", "tensors")
PIPELINE = ("schedule", "offload", "positions", "stages")

T = TypeVar("T")
Kind = TypeVar("Kind", bound=PlanData)
Keys = tuple[str, ...]


def write(plan: PlanData) -> str:
    """Return the text of a plan's file."""
    return yaml.safe_dump(_to_data(plan), sort_keys=False, width=120, default_flow_style=False)


def read(text: str, source: str, kind: type[Kind]) -> Kind:
    """Read the plan in a file's text, as a value of `kind`.

    Raises PlanError that names the file, line and key of the unreadable value.
    """
    return _Reader(text, source).read(kind)


def _to_data(plan: PlanData) -> dict[str, Any]:
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
        "mesh": f"pp{plan.pipeline.num_pipeline_ranks}" if plan.pipeline.stage_meshes else plan.mesh_text,
        "global_batch_size": plan.global_batch_size,
        "micro_batches": plan.num_micro_batches,
        "precision": plan.precision,
        **({"compression": plan.compression.names} if plan.compression else {}),
        **({"fp8": True} if plan.fp8 else {}),
        **{name: getattr(plan, name) for name in PADDINGS if getattr(plan, name) > 1},
        **_pipeline_data(plan.pipeline),
        "top": scope_data(plan.scopes[""]),
        "layers": {name: scope_data(scope) for name, scope in plan.scopes.items() if name},
        **_basis_data(plan.basis),
        "predicted_seconds": {k: float(v) for k, v in plan.prediction.seconds.items()},
        "predicted_bytes": {k: float(v) for k, v in plan.prediction.num_bytes.items()},
        **_pipeline_ranks_data(plan.prediction),
        "runner_ups": [{"plan": n, "seconds": float(s), "why": w} for n, s, w in plan.runner_ups],
    }


def _basis_data(basis: Basis | None) -> dict[str, Any]:
    if basis is None:
        return {}
    inputs = dict(basis.inputs)
    return {"priced_for": {"inputs": inputs, "kernels": basis.kernels, "backend": basis.backend}}


def _pipeline_ranks_data(prediction: Prediction) -> dict[str, Any]:
    pipeline_ranks = [{k: float(v) for k, v in kinds.items()} for kinds in prediction.pipeline_ranks]
    return {"predicted_bytes_by_position": pipeline_ranks} if pipeline_ranks else {}


def _pipeline_data(pipeline: Pipeline) -> dict[str, Any]:
    if pipeline.is_plain and not pipeline.stages:
        return {}
    stages = []
    for stage in pipeline.stages:
        modes = {n: ", ".join(f"{mode} {count}" for mode, count in runs) for n, runs in stage.recompute.items()}
        stages.append({"blocks": f"{stage.first}-{stage.last - 1}"} | ({"recompute": modes} if modes else {}))
    entries: dict[str, Any] = {"schedule": pipeline.schedule, "offload": pipeline.offload}
    entries |= {"positions": [str(stage_mesh) for stage_mesh in pipeline.stage_meshes], "stages": stages}
    return {"pipeline": {name: entry for name, entry in entries.items() if entry}}


class _Reader:
    """Reads a plan from YAML and remembers the line of every key for error messages."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        data, self.lines = parse_yaml(text, source, PlanError)
        if not isinstance(data, dict):
            raise PlanError(
                f"{source}, line 1: this is not a plan",
                values=type(data).__name__,
                alternatives="a mapping as Plan.to_yaml writes it",
            )
        self.data = self.mapping((), data, (*REQUIRED, *OPTIONAL))

    def fail(self, path: Keys, message: str, alternatives: str | Sequence[str] = "") -> PlanError:
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 1)
        return PlanError(f"{self.source}, line {line}: {'.'.join(path)}: {message}", alternatives=alternatives or None)

    def read(self, kind: type[Kind]) -> Kind:
        for key in REQUIRED:
            if key not in self.data:
                raise self.fail((key,), "is missing")
        if self.count("autopar_plan") != FORMAT:
            raise self.fail(("autopar_plan",), f"format {self.data['autopar_plan']} is not {FORMAT}", f"{FORMAT}")
        whole = self._mesh()
        pipeline = self.mapping(("pipeline",), self.data.get("pipeline"), PIPELINE)
        stage_meshes = self._stage_meshes(whole, pipeline)
        self.mesh = envelope([stage_mesh.mesh for stage_mesh in stage_meshes]) if stage_meshes else _inner(whole)
        stage_meshes = tuple(
            StageMesh(stage_mesh.mesh.over(self.mesh.axes), stage_mesh.group) for stage_mesh in stage_meshes
        )
        scopes = {"": self._scope(("top",), self.data["top"])}
        for name, entry in self.mapping(("layers",), self.data.get("layers")).items():
            scopes[name] = self._scope(("layers", name), entry)
        return kind(
            model=self.text(("model",), self.data["model"]),
            cluster=self.text(("cluster",), self.data["cluster"]),
            mesh=self.mesh,
            global_batch_size=self.count("global_batch_size"),
            num_micro_batches=self.count("micro_batches"),
            precision=self.word(("precision",), self.data["precision"], PRECISIONS),
            scopes=scopes,
            prediction=self._prediction(),
            runner_ups=tuple(self._runner_up(path, entry) for path, entry in self.items(("runner_ups",), self.data)),
            pipeline=self._pipeline(whole.size(PIPELINE_AXIS), stage_meshes, pipeline),
            compression=self._compression(),
            fp8=self.flag(("fp8",), self.data.get("fp8", False)),
            basis=self._basis(),
            **{name: self.count(name) for name in PADDINGS if name in self.data},
            source=self.source,
            lines=self.lines,
        )

    # --- values -------------------------------------------------------------------------------------------------------

    def mapping(self, path: Keys, value: Any, allowed: Sequence[str] = ()) -> dict[str, Any]:
        """Return a mapping with text keys, of the `allowed` names if there are any."""
        if value is not None and not isinstance(value, dict):
            raise self.fail(path, f"{shown(value)} is not a mapping", "names with their values")
        for name in value or {}:
            if not isinstance(name, str) or not name:
                raise self.fail((*path, str(name)), f"{name!r} is not a name", "text")
            if allowed and name not in allowed:
                raise self.fail((*path, name), "unknown key", near(name, allowed))
            self.text((*path, name), name)
        return value or {}

    def items(self, path: Keys, owner: Mapping[str, Any]) -> list[tuple[Keys, Any]]:
        """Return the items of a list, with the path of each; none if the key is missing."""
        value = owner.get(path[-1])
        if value is not None and not isinstance(value, list):
            raise self.fail(path, f"{shown(value)} is not a list", "lines that begin with -")
        return [((*path, str(number)), item) for number, item in enumerate(value or ())]

    def text(self, path: Keys, value: Any) -> str:
        """Return one line of printable text."""
        if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > LONGEST:
            raise self.fail(path, f"{shown(value)} is not a line of text", f"at most {LONGEST} printable characters")
        return value

    def word(self, path: Keys, value: Any, legal: Sequence[str]) -> str:
        if value not in legal or not isinstance(value, str):
            raise self.fail(path, f"{shown(value)} is unknown", ", ".join(legal))
        return value

    def count(self, key: str) -> int:
        value = self.data[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail((key,), f"{shown(value)} is not a count", "a whole number of at least 1")
        return value

    def number(self, path: Keys, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(path, f"{shown(value)} is not a number", "a finite number")
        return float(value)

    def flag(self, path: Keys, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.fail(path, f"{shown(value)} is neither true nor false", "true or false")
        return value

    def parsed(self, path: Keys, parse: Callable[[str], T], value: Any) -> T:
        """Return `parse` of a text; its ValueError lists the legal values."""
        try:
            return parse(self.text(path, value))
        except ConstraintError as error:
            raise self.fail(path, f"{error.constraint}: {error.values}", str(error.alternatives or "")) from None
        except PlanError:
            raise
        except ValueError as error:
            message, _, form = str(error).partition("; write ")
            raise self.fail(path, message, form) from None

    # --- parts of a plan ----------------------------------------------------------------------------------------------

    def _mesh(self) -> Mesh:
        whole = self.parsed(("mesh",), Mesh.parse, self.data["mesh"])
        if not set(whole.axes) <= set(AXIS_NAMES):
            raise self.fail(("mesh",), f"{whole} has an unknown axis", f"axes {', '.join(AXIS_NAMES)}")
        if PIPELINE_AXIS in whole.axes[1:]:
            raise self.fail(
                ("mesh",), "pp must be the first axis: every stage is a block of neighboring ranks", "pp2 x dp2"
            )
        return whole

    def _numbers(self, path: Keys, value: Any) -> dict[str, float]:
        return {name: self.number((*path, name), number) for name, number in self.mapping(path, value).items()}

    def _prediction(self) -> Prediction:
        seconds, num_bytes = (
            self._numbers((key,), self.data.get(key)) for key in ("predicted_seconds", "predicted_bytes")
        )
        pipeline_ranks = self.items(("predicted_bytes_by_position",), self.data)
        return Prediction(seconds, num_bytes, tuple(self._numbers(path, entry) for path, entry in pipeline_ranks))

    def _runner_up(self, path: Keys, entry: Any) -> tuple[str, float, str]:
        fields = self.mapping(path, entry, ("plan", "seconds", "why"))
        missing = [key for key in ("plan", "seconds", "why") if key not in fields]
        if missing:
            raise self.fail(path, f"{', '.join(missing)} is missing", "plan, seconds and why")
        seconds = self.number((*path, "seconds"), fields["seconds"])
        return self.text((*path, "plan"), fields["plan"]), seconds, self.text((*path, "why"), fields["why"])

    def _stage_meshes(self, whole: Mesh, pipeline: Mapping[str, Any]) -> tuple[StageMesh, ...]:
        """Return the pipeline ranks' own meshes, if the file has them."""
        path = ("pipeline", "positions")
        entries = self.items(path, pipeline)
        if entries and (len(entries) != whole.size(PIPELINE_AXIS) or whole.axes != (PIPELINE_AXIS,)):
            raise self.fail(path, f"{len(entries)} pipeline ranks for the mesh {whole}", f"mesh: pp{len(entries)}")
        stage_meshes = tuple(self.parsed(path, StageMesh.parse, text) for path, text in entries)
        for (where, _), stage_mesh in zip(entries, stage_meshes, strict=True):
            if not set(stage_mesh.mesh.axes) <= set(SHARDING_AXES):
                raise self.fail(where, f"{stage_mesh.mesh} has an unknown axis", f"axes {', '.join(SHARDING_AXES)}")
        return stage_meshes

    def _pipeline(
        self, num_pipeline_ranks: int, stage_meshes: tuple[StageMesh, ...], data: Mapping[str, Any]
    ) -> Pipeline:
        if not data:
            if num_pipeline_ranks > 1:
                raise self.fail(("mesh",), "has a pp axis, but the plan has no pipeline", "a mesh without pp")
            return Pipeline()
        stages = tuple(self._stage(path, entry) for path, entry in self.items(("pipeline", "stages"), data))
        if len(stages) % num_pipeline_ranks or not stages:
            message = f"{len(stages)} stages cannot be dealt to {num_pipeline_ranks} pipeline ranks"
            raise self.fail(("pipeline", "stages"), message, f"a multiple of {num_pipeline_ranks}")
        offload = self.text(("pipeline", "offload"), data.get("offload", "none"))
        if not is_offload(offload):
            legal = ", ".join((*OFFLOADS, "nvme:/a/folder"))
            raise self.fail(("pipeline", "offload"), f"{shown(offload)} is unknown", legal)
        path, schedule = ("pipeline", "schedule"), data.get("schedule", "")
        if schedule or num_pipeline_ranks > 1:
            schedule = self.word(path, schedule, tuple(SCHEDULES))
        offload = "" if offload == "none" else offload
        return Pipeline(
            num_pipeline_ranks=num_pipeline_ranks,
            schedule=schedule or "",
            stages=stages,
            offload=offload,
            stage_meshes=stage_meshes,
        )

    def _stage(self, path: Keys, entry: Any) -> StagePlan:
        fields = self.mapping(path, entry, ("blocks", "recompute"))
        blocks = str(fields.get("blocks", ""))
        match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", blocks)
        if match is None:
            raise self.fail(path, f"blocks {shown(blocks)} is not a range", "first-last, such as 0-8")
        modes = self.mapping((*path, "recompute"), fields.get("recompute"))
        recompute = {name: self._modes((*path, "recompute", name), text) for name, text in modes.items()}
        return StagePlan(int(match.group(1)), int(match.group(2)) + 1, recompute)

    def _modes(self, path: Keys, text: Any) -> tuple[tuple[str, int], ...]:
        modes = []
        for part in self.text(path, text).split(","):
            mode, _, count = part.strip().partition(" ")
            if mode not in RECOMPUTE_MODES or not re.fullmatch("[0-9]{1,9}", count) or not int(count):
                raise self.fail(path, f"cannot read {part.strip()!r}", f"MODE COUNT with {', '.join(RECOMPUTE_MODES)}")
            modes.append((mode, int(count)))
        return tuple(modes)

    def _compression(self) -> Compression:
        try:
            return Compression.parse(self.mapping(("compression",), self.data.get("compression")))
        except ConstraintError as error:
            raise self.fail(("compression",), f"{error.constraint}: {error.values}", str(error.alternatives)) from None

    def _basis(self) -> Basis | None:
        path = ("priced_for",)
        fields = self.mapping(path, self.data.get("priced_for"), BASIS)
        if not fields:
            return None
        where = (*path, "inputs")
        inputs = {
            name: self.text((*where, name), text) for name, text in self.mapping(where, fields.get("inputs")).items()
        }
        kernels = self.flag((*path, "kernels"), fields.get("kernels", False))
        backend = self.word((*path, "backend"), fields.get("backend", "eager"), BACKENDS)
        return Basis(inputs, kernels, backend)

    # --- placements ---------------------------------------------------------------------------------------------------

    def _scope(self, path: Keys, entry: Any) -> ScopePlan:
        kinds = {name: (*path, name) for name in SCOPE}
        fields = self.mapping(path, entry, SCOPE)
        sections = {kind: self.mapping(where, fields.get(kind)) for kind, where in kinds.items()}
        return ScopePlan(
            {n: self._stored((*kinds["parameters"], n), t) for n, t in sections["parameters"].items()},
            {n: self._placements((*kinds["inputs"], n), t) for n, t in sections["inputs"].items()},
            {n: self._labels((*kinds["calls"], n), t) for n, t in sections["calls"].items()},
            {n: self._placements((*kinds["tensors"], n), t) for n, t in sections["tensors"].items()},
        )

    def _pairs(self, path: Keys, text: Any, extra: tuple[str, ...] = ()) -> dict[str, str]:
        """Return the pairs of `dp=Rp tp=S(0) zero=1` by name; a missing axis means R."""
        axes = self.mesh.axes
        form = f"axis=value with axes {', '.join(axes) or '(none)'}"
        if not isinstance(text, str) or not text.isprintable():
            raise self.fail(path, f"{shown(text)} is not text", form)
        pairs: dict[str, str] = {}
        for part in text.split():
            name, equals, value = part.partition("=")
            if not equals or name not in (*axes, *extra) or name in pairs:
                raise self.fail(path, f"cannot read {part!r}", form)
            pairs[name] = value
        return pairs

    def _placements(self, path: Keys, text: Any, extra: tuple[str, ...] = ()) -> Placements:
        pairs = self._pairs(path, text, extra)
        return tuple(self.parsed(path, Placement.parse, pairs.get(axis, "R")) for axis in self.mesh.axes)

    def _stored(self, path: Keys, text: Any) -> Stored:
        zero = self._pairs(path, text, ("zero",)).get("zero", "0")
        if zero not in ("0", "1", "2", "3"):
            raise self.fail(path, f"zero={zero}", "zero is 0, 1, 2 or 3")
        return Stored(self._placements(path, text, ("zero",)), int(zero))

    def _labels(self, path: Keys, text: Any) -> tuple[str, ...]:
        pairs = self._pairs(path, text)
        return tuple(pairs.get(axis, "R") for axis in self.mesh.axes)


def _inner(whole: Mesh) -> Mesh:
    """Return a mesh without its pipeline axis."""
    return Mesh(whole.axes[1:], whole.sizes[1:]) if PIPELINE_AXIS in whole.axes else whole
