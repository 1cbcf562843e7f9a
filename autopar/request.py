"""What is to be planned, and how its parts are priced: shared by the searches over meshes and over pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.choices import Choices
from autopar.constraints import Constraints
from autopar.graph import Graph, Ref
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.price import Pricer, Training, is_cpu
from autopar.rebatch import BatchedTrace
from autopar.space import Space
from autopar.strategies import Operator, operators_of
from cost_models.machine import Cluster
from cost_models.memory import FRAGMENTATION, workspace_bytes
from search.problem import Solution

HIDDEN_FRACTION = 0.5
"""Share of gradient traffic taken to run behind backward on a GPU: an assumption until it is calibrated."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned. trace: the model's graph at any number of micro-batch rows."""

    trace: BatchedTrace
    cluster: Cluster
    global_batch_size: int
    precision: str
    training: Training
    constraints: Constraints


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan and everything needed to lower it; without a solution if a person wrote the plan."""

    plan: Plan
    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    choices: Choices
    solution: Solution | None


def pricer_for(request: Request, mesh: Mesh, num_micro_batches: int, offload: str = "") -> Pricer:
    """Prices for a mesh. Gradient traffic hides behind backward on GPUs; CPU ranks share their cores with it."""
    on_cpu = is_cpu(request.cluster)
    training = replace(request.training, num_micro_batches=num_micro_batches, offload=offload)
    return Pricer(mesh, request.cluster, training, 0.0 if on_cpu else HIDDEN_FRACTION, 0.0 if on_cpu else FRAGMENTATION)


def usable_bytes(request: Request) -> float:
    """What decisions and transients may take of one rank's memory: capacity less the device's own workspace."""
    capacity = request.constraints.memory_bytes or request.cluster.device.memory_bytes
    return float(capacity - (0 if is_cpu(request.cluster) else workspace_bytes(request.cluster.device)))


def decode(space: Space, chosen: tuple[int, ...]) -> Choices:
    """Options by name."""
    picked = {d.key: d.options[i] for d, i in zip(space.decisions, chosen, strict=True)}
    return Choices(
        {key[1:3]: value for key, value in picked.items() if key[0] == "operator"},
        {(key[1], Ref(key[2], key[3])): value for key, value in picked.items() if key[0] == "tensor"},
        {key[1:3]: value for key, value in picked.items() if key[0] == "parameter"},
    )


def operators_at(request: Request, rows: int) -> tuple[Graph, dict[tuple[str, str], Operator]]:
    """The graph of `rows` micro-batch rows and its calls."""
    return request.trace(rows), operators_of(request.trace(rows), request.trace.estimate(2) if rows == 1 else None)


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
