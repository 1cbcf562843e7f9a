"""A planning request and its prices, shared by the searches over meshes and over pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.costs.captured_steps import captured
from autopar.costs.fp8 import Fp8Layers
from autopar.costs.kernels import FusedKernels
from autopar.costs.layer_costs import defers_weights
from autopar.costs.price import Pricer
from autopar.costs.rates import Rates, Training, is_cpu
from autopar.frontend.rebatch import BatchedTrace
from autopar.ir.compression import Compression
from autopar.ir.graph import Graph, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.plan_data import Basis
from autopar.planning.search_space import SearchSpace
from autopar.planning.traced_model import TracedModel
from autopar.settings.constraints import Constraints
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, operators_of
from codegen.runtime.optimizer_probe import Needs
from cost_models.certainty import OWN, Certainty, spread
from cost_models.machine import Cluster
from cost_models.memory import FRAGMENTATION
from cost_models.mixed_cluster import AnyCluster, MixedCluster
from cost_models.straggler import paced

HIDDEN_FRACTION = 0.5
"""Share of gradient traffic assumed to overlap backward on a GPU, and of the seconds of weight gradients to overlap
sums of input gradients: an assumption until it is calibrated."""


@dataclass(frozen=True, slots=True)
class Request:
    """A planning request.

    trace: the model's graph at any number of micro-batch rows. cluster: of equal nodes; if `mixed` has unlike groups
    of them, the first. kernels: whether the program will have fused kernels, which are priced then. fp8: whether its
    linear layers will multiply in e4m3, likewise. num_waiting: devices that wait for one another in a step, 0 for
    all of `whole`. captures: whether steps are priced as CUDA graphs (costs/captured_steps.py).
    unpadded: the trace without heads of padding, if `trace` has some and plans without them are to be compared.
    traced: the model, if its user's optimizer and example batch are known.
    """

    trace: BatchedTrace
    cluster: Cluster
    global_batch_size: int
    precision: str
    training: Training
    constraints: Constraints
    mixed: MixedCluster | None = None
    kernels: bool = False
    fp8: bool = False
    num_waiting: int = 0
    backend: str = "eager"
    captures: bool = False
    unpadded: BatchedTrace | None = None
    traced: TracedModel | None = field(default=None, compare=False)

    @property
    def needs(self) -> Needs:
        """Return the parameters that the optimizer's update must see whole; `constraints` include them."""
        return Needs() if self.traced is None else self.traced.needs

    @property
    def whole(self) -> AnyCluster:
        """Return all devices."""
        return self.mixed or self.cluster

    @property
    def overlaps(self) -> bool:
        """Return whether the program sums gradients over tensor-parallel ranks during weight gradients
        (codegen/passes/overlap.py).

        Not on a CPU: such sums take cores from the products, and steps gain no more than their times scatter. Not
        with inductor, which compiles linear layers with their neighbors: separate run-time calls would split that.
        """
        return not is_cpu(self.whole.groups[0]) and self.backend != "inductor"

    @property
    def basis(self) -> Basis:
        """Return the basis for which plans are priced."""
        inputs = self.trace(self.global_batch_size).inputs
        shapes = {
            batch_input.name: f"{str(batch_input.meta.dtype).removeprefix('torch.')} {list(batch_input.meta.shape)}"
            for batch_input in inputs
        }
        return Basis(shapes, self.kernels, self.backend)

    def of(self, graph: Graph) -> Request:
        """Return the same request with the trace of a plan's graph."""
        if self.unpadded is None or graph.heads_padded_to > 1:
            return self
        return replace(self, trace=self.unpadded, unpadded=None)

    def splits(self, count: int) -> bool:
        """Return whether the batch may be cut into `count` micro-batches (accumulation/micro_batches.py)."""
        return self.trace.whole_batch_reason(count) is None

    def of_group(self, group: int) -> Request:
        """Return the same request for one of the cluster's groups of equal nodes."""
        num_waiting = self.num_waiting or self.whole.num_devices
        return replace(self, cluster=self.whole.groups[group], mixed=None, num_waiting=num_waiting)

    def compressed(self, compression: Compression) -> Request:
        """Return the same request with ZeRO's collectives compressed like this."""
        return replace(self, training=replace(self.training, compression=compression))

    def capacity_bytes(self, group: int = 0) -> int:
        """Return the usable bytes of a group's rank: the user's budget, or the device's memory."""
        return self.constraints.memory_bytes or self.whole.groups[group].device.memory_bytes

    def certainty(self, num_bytes: Mapping[str, float], group: int = 0) -> Certainty:
        """Return how sure the predicted bytes of a rank of a group are, by kind, and so whether they fit."""
        return spread(OWN, is_cpu(self.whole.groups[group])).certainty(num_bytes, self.capacity_bytes(group))


def pricer_for(
    request: Request, mesh: Mesh, num_micro_batches: int, offload: str = "", has_first_pass: bool = False
) -> Pricer:
    """Return the prices for a mesh.

    Gradient traffic is hidden behind backward, on CPUs by the measured share. Sums over tensor-parallel ranks
    overlap weight gradients if programs do that. Devices are as slow as the slowest of all that wait for one
    another.
    """
    on_cpu = is_cpu(request.cluster)
    training = replace(
        request.training, num_micro_batches=num_micro_batches, has_first_pass=has_first_pass, offload=offload
    )
    cluster = paced(request.cluster, request.num_waiting or request.whole.num_devices)
    is_captured = request.captures and not on_cpu
    if is_captured:
        cluster = captured(cluster)
    overlaps = request.overlaps and not defers_weights(request.constraints.schedule or "")
    rates = Rates(
        mesh,
        cluster,
        training,
        hidden_fraction=cluster.intra_node.hidden_share if on_cpu else HIDDEN_FRACTION,
        fragmentation=0.0 if on_cpu else FRAGMENTATION,
        overlap_share=HIDDEN_FRACTION if overlaps else 0.0,
        host_call_seconds=0.0 if on_cpu or is_captured else request.cluster.device.host_call_seconds,
        is_compiled=request.backend == "inductor",
        is_captured=is_captured,
    )
    return Pricer(rates, kernels=FusedKernels() if request.kernels else None, fp8=Fp8Layers() if request.fp8 else None)


def usable_bytes(request: Request) -> float:
    """Return one rank's memory for decisions and transients: capacity less the device's workspace."""
    return float(request.capacity_bytes() - (0 if is_cpu(request.cluster) else request.cluster.device.reserved_bytes))


def decode(search_space: SearchSpace, chosen: tuple[int, ...]) -> Assignment:
    """Return the solver's chosen options, by the names of their variables."""
    picked = {d.key: d.options[i] for d, i in zip(search_space.variables, chosen, strict=True)}
    return Assignment(
        {key[1:3]: value for key, value in picked.items() if key[0] == "operator"},
        {(key[1], Ref(key[2], key[3])): value for key, value in picked.items() if key[0] == "tensor"},
        {key[1:3]: value for key, value in picked.items() if key[0] == "parameter"},
    )


def operators_at(request: Request, rows: int) -> tuple[Graph, dict[tuple[str, str], Operator]]:
    """Return the graph of `rows` micro-batch rows and its calls."""
    graph = request.trace(rows)
    return graph, operators_of(graph)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
