"""The figures that rate a plan: step time, tokens per second, model FLOPs utilization, memory."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costs.flops import model_flops, model_flops_utilisation
from autopar.costs.rates import is_cpu
from autopar.ir.graph import Graph
from autopar.program import GeneratedProgram
from cost_models.certainty import OWN, Certainty, spread


@dataclass(frozen=True, slots=True)
class Figures:
    """Predicted figures of one step.

    rows: of the global batch. tokens: of the global batch, 0 for a model without tokens. flops: "model FLOPs" over all
    ranks (costs/flops.py). mfu: flops as a share of the peak of all devices. peak_bytes, capacity_bytes: of the fullest
    rank. certainty: the 90 % interval of the peak, and whether it fits.
    """

    num_devices: int
    step_seconds: float
    rows: int
    tokens: int
    flops: float
    mfu: float
    peak_bytes: float
    capacity_bytes: float
    certainty: Certainty

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.step_seconds if self.step_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.num_devices

    @property
    def memory_share(self) -> float:
        """The peak as a share of the capacity."""
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


def figures_of(compiled: GeneratedProgram) -> Figures:
    """Return the figures of a program's plan from its prediction."""
    plan, best, capacity = compiled.plan, compiled.best, float(capacity_bytes(compiled))
    is_on_cpu = is_cpu(compiled.cluster.groups[plan.fullest_group])
    flops = plan.num_micro_batches * model_flops(best.graph, best.operators)
    seconds = plan.prediction.step_seconds
    return Figures(
        num_devices=compiled.cluster.num_devices,
        step_seconds=seconds,
        rows=plan.global_batch_size,
        tokens=plan.num_micro_batches * tokens_of(best.graph),
        flops=flops,
        mfu=model_flops_utilisation(flops, seconds, compiled.cluster, plan.precision),
        peak_bytes=plan.prediction.peak_bytes,
        capacity_bytes=capacity,
        certainty=spread(OWN, is_on_cpu).certainty(plan.prediction.num_bytes, capacity),
    )


def capacity_bytes(compiled: GeneratedProgram) -> int:
    """Return the bytes that a rank may use: the user's budget, or the device's memory."""
    budget = compiled.request.constraints.memory_bytes if compiled.request else None
    return budget or compiled.cluster.groups[compiled.plan.fullest_group].device.memory_bytes


def tokens_of(graph: Graph) -> int:
    """Return the tokens of a micro-batch: the elements of its largest two-dimensional integer input."""
    metas = [input_.meta for input_ in graph.inputs if input_.batch_dim is not None]
    ids = [m.numel for m in metas if len(m.shape) == 2 and not (m.dtype.is_floating_point or m.dtype.is_complex)]
    return max(ids, default=0)
