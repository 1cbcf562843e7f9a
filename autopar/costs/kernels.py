"""Prices of fused kernels (`kernels=` of autopar.compile): their savings over the calls that they replace.

A fused call reads the tensors that enter its run and writes those that leave it, once. Backward it reads the results'
gradients and the kept tensors (`saves` of its pattern), and writes the gradients of the inputs. With r, w, k and g the
bytes of inputs, results, kept tensors and computed gradients, on one rank, the seconds are

    forward = time(r + w) + launches,    backward = time(w + k + g) + launches

The calls of the run share them: an input is charged to the first call that reads it, a result to its call. A call is
priced alone where its decision splits the run: by a partial sum, or by a cut normalized dim, head or vocabulary that a
kernel needs complete. Reshards between calls are known only in a program: predictions price the program's runs
(emitted.py). The search prices runs that no reshard splits; as each call is charged its share, splitting a run never
seems to pay.

The linear layer with its loss (codegen/kernels/linear_cross_entropy.py) never has all logits in memory. Its forward
computes all three products, chunk by chunk, and keeps the gradients up to a factor. It costs more time than the loss's
kernel alone (the sum over chunks is fp32) and is chosen where it needs less memory.

Layers of experts are priced as without kernels, in one launch instead of one per expert (contractions.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costs.kept import kept
from autopar.costs.rates import Rates, are_aligned, dtype_name, is_cpu, num_local_dim
from autopar.costs.specials import specials
from autopar.ir.graph import Ref, base_name
from autopar.ir.mesh import Mesh
from autopar.sharding.call_options import Operator, Option, num_local
from autopar.sharding.fusible_runs import Fusion
from codegen.fusion.template import ChunkRows
from codegen.kernels.linear_cross_entropy import sum_dtype
from cost_models import compute

Key = tuple[str, str]
"""Name of a call: (scope, call)."""


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """The fused kernels of programs.

    fusions: (scope, call) -> its run, of one program (emitted.py). None without a program: then a run counts as
    intact where no call's decision splits it.
    """

    fusions: Mapping[Key, Fusion] | None = None


def preferred_fusion(operator: Operator, mesh: Mesh, on_cpu: bool) -> Fusion | None:
    """Return the run that programs for this mesh and device fuse the call into."""

    def is_preferred(fusion: Fusion) -> bool:
        """Return whether programs use the run, and prefer no other run for any of its calls."""
        has_it = is_one_call(fusion, on_cpu) and fusion.pays(mesh.num_token_ranks)
        return has_it and not any(is_preferred(rival) for rival in fusion.rivals)

    return next((fusion for fusion in operator.fusions if is_preferred(fusion)), None)


def is_one_call(fusion: Fusion, on_cpu: bool) -> bool:
    """Return whether this device runs the kernel as one call; references on CPUs are the calls that they replace."""
    return fusion.match.pattern.on_cpu or not on_cpu


# --- seconds ----------------------------------------------------------------------------------------------------------


def fused_seconds(fusion: Fusion, operator: Operator, option: Option, rates: Rates) -> tuple[float, float]:
    """Return a call's share of the seconds (forward, backward) of its run."""
    chunk_rows = fusion.match.pattern.chunk_rows
    if chunk_rows is None:
        return _traffic_seconds(fusion, operator, option, rates)
    if operator.node.name == fusion.node.name:
        return _loss_seconds(chunk_rows, fusion, operator, option, rates)
    is_layer = base_name(operator.node.op) == "linear"
    return _lm_head_seconds(chunk_rows, operator, option, rates) if is_layer else (0.0, 0.0)


def _traffic_seconds(fusion: Fusion, operator: Operator, option: Option, rates: Rates) -> tuple[float, float]:
    """Return the call's share of the run's seconds: its inputs and results as a share of the run's traffic."""
    tensors = [*zip(operator.inputs, option.inputs, strict=True)]
    tensors += zip(operator.node.outputs, option.outputs, strict=True)
    largest, lies = max(tensors, key=lambda pair: pair[0].numel)
    local = num_local(largest, lies, rates.mesh) / largest.numel
    name, pattern = operator.node.name, fusion.match.pattern
    metas, charged = fusion.tensors, fusion.charged
    results = [Ref(node.name) for node in fusion.nodes]
    handed_on = {fusion.leaves[leaf] for leaf in pattern.no_gradient}
    gradients = [ref for ref, meta in fusion.entering.items() if meta.requires_grad and ref not in handed_on]
    launch, seconds = rates.cluster.device.kernel_launch_seconds, []
    moved = [*fusion.entering, *results], [*results, *kept_by(fusion), *gradients]
    counts = specials(fusion.node)
    for refs, launches, count in zip(moved, pattern.launches, counts, strict=True):
        whole = sum(metas[ref].num_bytes for ref in refs)
        here = sum(metas[ref].num_bytes for ref in refs if charged[ref] == name)
        work = compute.Work("memory", 0.0, local * whole, specials=count * local * fusion.node.meta.numel)
        more = (launches - 1) * launch if name == fusion.node.name else 0.0
        seconds.append(compute.seconds(work, rates.cluster.device) * here / whole + more)
    return seconds[0], seconds[1] if gradients else 0.0


def _lm_head_seconds(chunk_rows: ChunkRows, operator: Operator, option: Option, rates: Rates) -> tuple[float, float]:
    """Price the layer. Forward: three products per chunk, with the sum of weight gradients; backward: both
    gradients times a factor."""
    lm_head = _lm_head(chunk_rows, operator, option, rates)
    c, h, v, e, a = lm_head.chunk_rows, lm_head.width, lm_head.classes, lm_head.element_bytes, lm_head.sum_bytes
    operands = (c * h + v * h + c * v) * e
    products = [((c, v, h), operands)]
    products += [((c, h, v), operands)] if lm_head.needs_x else []
    products += [((v, h, c), (c * h + c * v) * e + 2 * v * h * a)] if lm_head.needs_weight else []
    dtype, device = dtype_name(operator.node.outputs[0]), rates.cluster.device
    aligned = are_aligned(dtype, v, h)
    works = (
        compute.Work("matmul", 2.0 * c * v * h, moved, dtype, shape=shape, aligned=aligned) for shape, moved in products
    )
    chunk = sum(compute.seconds(work, device) for work in works)
    if len(products) == 1:
        return lm_head.num_chunks * chunk, 0.0
    cleared = rates.memory_seconds(v * h * a) if lm_head.needs_weight else 0.0
    scaled = rates.memory_seconds(2 * lm_head.x_bytes) + rates.memory_seconds(lm_head.sums_bytes / a * (a + e))
    return lm_head.num_chunks * chunk + cleared, scaled


def _loss_seconds(
    chunk_rows: ChunkRows, fusion: Fusion, operator: Operator, option: Option, rates: Rates
) -> tuple[float, float]:
    """Price the loss: per chunk its logits are read, and read and written as their gradient. Ranks that share
    the vocabulary gather three fp32 numbers per row."""
    logits, lies = operator.inputs[0], option.inputs[0]
    rows, classes = num_local_dim(logits, lies, rates.mesh, -2), num_local_dim(logits, lies, rates.mesh)
    count, height = _chunks(chunk_rows, rows, classes, is_cpu(rates.cluster))
    size = height * classes * fusion.entering[fusion.node.inputs[0]].dtype.itemsize
    chunk = rates.memory_seconds(size) + rates.memory_seconds(2 * size)
    for axis, placement in enumerate(lies):
        if placement.is_shard and placement.dim == 1:
            num_bytes = 12.0 * height * rates.mesh.sizes[axis]
            chunk += rates.collective_seconds("all_gather", axis, num_bytes)
    return count * chunk, 0.0


# --- bytes ------------------------------------------------------------------------------------------------------------


def fused_saved_bytes(fusion: Fusion, operator: Operator, option: Option, rates: Rates) -> float:
    """Return the bytes of activations that a call is first to keep: those that enter its run here."""
    scale = 1.0 + rates.fragmentation
    chunk_rows = fusion.match.pattern.chunk_rows
    if chunk_rows is not None:
        is_layer = base_name(operator.node.op) == "linear"
        return _lm_head(chunk_rows, operator, option, rates).kept_bytes * scale if is_layer else 0.0
    kept_refs, name = kept_by(fusion), operator.node.name
    tensors = [*zip(operator.node.inputs, operator.inputs, option.inputs, strict=True)]
    results = (Ref(name, index) for index in range(len(operator.node.outputs)))
    tensors += zip(results, operator.node.outputs, option.outputs, strict=True)
    sizes = {ref: num_local(meta, lies, rates.mesh) * meta.dtype.itemsize for ref, meta, lies in tensors}
    first = fusion.node.inputs[0]
    rows = 0.0
    if fusion.charged[first] == name:  # numbers per row are cut with the rows
        whole = sum(kept(fusion.node, tuple(fusion.tensors[ref] for ref in fusion.node.inputs), False).extra_bytes)
        rows = whole * sizes[first] / fusion.tensors[first].num_bytes
    return scale * (sum(size for ref, size in sizes.items() if ref in kept_refs and fusion.charged[ref] == name) + rows)


def lm_head_bytes(chunk_rows: ChunkRows, operator: Operator, option: Option, rates: Rates) -> tuple[float, float]:
    """Return the bytes (kept besides inputs and results, temporaries of the forward) of a linear layer with its
    loss."""
    lm_head, on_cpu = _lm_head(chunk_rows, operator, option, rates), is_cpu(rates.cluster)
    # On a CPU softmax's numerator is a second tensor next to the logits, in two fp32 temporaries.
    width = lm_head.element_bytes + (8 if on_cpu else 0)
    return lm_head.kept_bytes, float(lm_head.chunk_rows * lm_head.classes * width)


def _lm_head(chunk_rows: ChunkRows, operator: Operator, option: Option, rates: Rates) -> _LMHead:
    (x, weight), (x_lies, weight_lies) = operator.inputs[:2], option.inputs[:2]
    classes, width = num_local_dim(weight, weight_lies, rates.mesh, 0 - len(weight.shape)), x.shape[-1]
    x_elements = num_local(x, x_lies, rates.mesh)
    count, height = _chunks(chunk_rows, x_elements // width, classes, is_cpu(rates.cluster))
    size, wide = x.dtype.itemsize, sum_dtype(x.dtype).itemsize
    return _LMHead(
        num_chunks=count,
        chunk_rows=height,
        width=width,
        classes=classes,
        element_bytes=size,
        sum_bytes=wide,
        needs_x=x.requires_grad,
        needs_weight=weight.requires_grad,
        x_bytes=float(x_elements * size),
        sums_bytes=float(classes * width * wide),
    )


def _chunks(chunk_rows: ChunkRows, rows: int, classes: int, on_cpu: bool) -> tuple[int, int]:
    """Return how the kernel cuts the rows: (number of chunks, rows of one)."""
    height = chunk_rows(rows, classes, on_cpu)
    return -(-rows // height), min(height, rows)


@dataclass(frozen=True, slots=True)
class _LMHead:
    """Sizes of a linear layer with its loss on one rank. element_bytes, sum_bytes: of an element of x and weight,
    and of the summed weight gradient; x_bytes, sums_bytes: of all of them."""

    num_chunks: int
    chunk_rows: int
    width: int
    classes: int
    element_bytes: int
    sum_bytes: int
    needs_x: bool
    needs_weight: bool
    x_bytes: float
    sums_bytes: float

    @property
    def kept_bytes(self) -> float:
        """Return the bytes of both gradients, computed in the forward."""
        return self.x_bytes * self.needs_x + self.sums_bytes * self.needs_weight


def is_whole(fusion: Fusion, operator: Operator, option: Option) -> bool:
    """Return whether a call's decision leaves its run one kernel call."""
    pattern, is_last = fusion.match.pattern, operator.node.name == fusion.node.name
    if not (is_last or pattern.is_linear) and any(p.kind == "P" for lies in option.outputs for p in lies):
        return False
    if not pattern.needs_whole:
        return True
    tensors = [*zip(operator.inputs, option.inputs, strict=True)]
    tensors += zip(operator.node.outputs, option.outputs, strict=True)
    matrices = [(len(meta.shape) - 1, lies) for meta, lies in tensors if len(meta.shape) > 1]
    return not any(p.is_shard and p.dim == last for last, lies in matrices for p in lies)


def kept_by(fusion: Fusion) -> frozenset[Ref]:
    """Return which inputs and results of a run its backward keeps."""
    metas = fusion.tensors
    kept_inputs = (
        (node.inputs, kept(node, tuple(metas[ref] for ref in node.inputs), False).inputs) for node in fusion.nodes
    )
    return frozenset(inputs[position] for inputs, positions in kept_inputs for position in positions)
