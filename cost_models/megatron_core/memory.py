"""Bytes that torch has allocated on a rank of Megatron-Core: between two steps, and at the peak."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cost_models.megatron_core.activations import HALF, between_bytes, kept_bytes
from cost_models.megatron_core.parameters import (
    dense_parameters,
    expert_parameters,
    matrix_parameters,
    shapes_of_matrices,
    table_parameters,
)
from cost_models.megatron_core.setup import Model, Setup

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes by use.

    kept, loss: transient bytes, on a last stage when it reaches its loss, on others at their first backward pass.
    gradient_copies exist between steps, and not while kept and loss do.
    """

    parameters: float
    gradients: float
    optimizer: float
    gradient_copies: float
    workspaces: float
    boundaries: float
    kept: float
    loss: float

    @property
    def allocated(self) -> float:
        stays = self.parameters + self.gradients + self.optimizer + self.gradient_copies
        return stays + self.workspaces + self.boundaries

    @property
    def peak(self) -> float:
        return self.allocated - self.gradient_copies + self.kept + self.loss


def rank_memory(model: Model, setup: Setup) -> RankMemory:
    """Return the memory of the rank of `setup`."""
    dense, experts = dense_parameters(model, setup), expert_parameters(model, setup)
    is_half = setup.precision == "fp16" or setup.half_gradients  # fp32 sums are bf16's default (training/arguments.py)
    dense_share, expert_share = _shares(model, setup, dense)
    cut = dense * dense_share + experts * expert_share
    total = cut if setup.sharded_parameters else dense + experts
    # Float16 optimizers copy gradients to fp32 (core/optimizer/optimizer.py). Sums that are fp32 already need no copy.
    copies = 4 * cut if is_half else 0.0
    kept, loss = _activations(model, setup)
    return RankMemory(
        parameters=total * (HALF + _cached(setup)),
        gradients=total * (2 if is_half else 4),
        optimizer=_optimizer(model, setup, dense * dense_share, experts * expert_share),
        gradient_copies=copies,
        workspaces=_workspaces(model, setup),
        boundaries=_boundaries(model, setup),
        kept=kept,
        loss=loss,
    )


def _cached(setup: Setup) -> int:
    """Return bytes per parameter of fp8 copies beside 16-bit weights; Hopper also has a transposed copy."""
    if setup.precision != "fp8" or setup.has_fp8_parameters:
        return 0
    return 2 if setup.generation == "hopper" else 1


def _shares(model: Model, setup: Setup, dense: int) -> tuple[float, float]:
    """Return a rank's shares of the optimizer state of dense parameters and of experts.

    Where ranks own whole parameters, the fullest rank has the table of words, if that is more than its share.
    """
    if not setup.distributed_optimizer:
        return 1.0, 1.0
    replicas = setup.dp * setup.cp / setup.optimizer_instances
    dense_share = 1 / replicas
    if setup.whole_parameters:
        dense_share = max(dense_share, table_parameters(model, setup) / dense)
    return dense_share, setup.ep * setup.etp / (replicas * setup.tp)


def _optimizer(model: Model, setup: Setup, dense: float, experts: float) -> float:
    """Count an fp32 copy and two moments; Muon has one moment for matrices other than tables."""
    saved = 0.0
    if setup.optimizer == "muon":
        matrices = matrix_parameters(model, setup) / dense_parameters(model, setup) * dense
        if setup.whole_parameters and setup.distributed_optimizer:
            matrices = 0.0
        saved = 4 * (matrices + experts)
    return (setup.optimizer_bytes * (dense + experts) - saved) * (1 - setup.host_optimizer)


def _workspaces(model: Model, setup: Setup) -> float:
    """Count the scratch memory that stays allocated.

    cuBLAS has one workspace per thread with a handle, forward's and backward's. Each has 8 x 4 MiB with
    CUBLAS_WORKSPACE_CONFIG=:4096:8 (for determinism) and by torch's default from Hopper on, 8.125 MiB before (torch,
    aten/src/ATen/cuda/CublasHandlePool.cpp). Transformer Engine has 32 MiB from Hopper on, 4 before (module/base.py,
    get_cublas_workspace_size_bytes), again for each of four streams of grouped matmuls and two of overlapped tensor
    parallelism. Megatron-Core's own attention keeps the scores in a persistent buffer
    (core/transformer/dot_product_attention.py), its gathers the gathered rows (core/tensor_parallel/layers.py). Weight
    gradients added directly to the sums leave one dummy per shape.
    """
    is_old = setup.generation == "ampere"
    cublas = 8.125 * MIB if is_old and not setup.deterministic else 32 * MIB
    has_experts = any(block.kind == "moe" for block in setup.blocks)
    streams = (1 if setup.implementation == "te" or has_experts else 0) + (2 if setup.overlapped_tp else 0)
    streams += 4 if has_experts and setup.grouped_experts else 0
    engine = streams * (4 if is_old else 32) * MIB
    buffer = 0.0
    if setup.implementation == "local" and setup.attention == "unfused":
        pairs = max(block.queries * block.keys for block in setup.blocks)
        buffer = setup.micro_batch * model.heads / setup.tp * pairs * HALF
    elif setup.sequence_parallel:
        ranks = setup.ep if has_experts and setup.dispatcher == "allgather" else 1
        buffer = between_bytes(model, setup, setup.blocks[-1]) * setup.tp * ranks
    if setup.overlapped_tp:  # a buffer of gathered rows for each product that is cut up
        buffer += 6 * setup.micro_batch * setup.blocks[-1].queries * model.hidden * HALF
    dummies = shapes_of_matrices(model, setup) * HALF if setup.fused_wgrad else 0.0
    return 2 * cublas + engine + buffer + dummies


def _boundaries(model: Model, setup: Setup) -> float:
    """Count the tensors between stages that the schedule keeps.

    Each virtual stage has an input and its gradient, which core/pipeline_parallel/schedules.py keeps in lists, and one
    tensor is being sent. The number is inferred from the cases.
    """
    if setup.pp == 1:
        return 0.0
    return (2 * len(setup.chunks) + 1) * between_bytes(model, setup, setup.blocks[-1])


def _activations(model: Model, setup: Setup) -> tuple[float, float]:
    """Return (bytes kept by layers, bytes of the loss or of a layer's backward) when most forward passes are kept.

    Logits are 16 bits and copied to fp32, in which the softmax is kept (core/tensor_parallel/cross_entropy.py). The
    compiled loss does not write in place. Earlier losses of extra predictions keep their softmax. Deferred gradients of
    the table of words keep the gradients of their logits.
    """
    chunks = [sum(kept_bytes(model, setup, block) for block in chunk) for chunk in setup.chunks]
    kept = sum(chunks[index] for index in setup.in_flight)
    last = setup.blocks[-1]
    between = between_bytes(model, setup, last)
    if setup.offload:  # two layers are entirely on the device: one computes, one is fetched
        stays = replace(setup, offload=())
        kept += sum(kept_bytes(model, stays, block) - kept_bytes(model, setup, block) for block in setup.blocks[-4:])
    mask = setup.micro_batch * last.queries * last.keys if setup.dense_mask else 0
    backward = mask + _layer_backward(model, setup)
    if setup.is_first and setup.hidden_dropout:
        kept += between / HALF * (1 if setup.is_last else len(setup.in_flight))
    kept += _gathered(model, setup)
    if not setup.is_last:
        return kept, backward
    head = 3 * between * setup.split if model.family == "bert" else 0.0  # a matrix, gelu and a norm before the logits
    logits = setup.micro_batch * last.queries * model.padded_vocab(setup.tp) / setup.tp
    bytes_each = HALF + (8 if setup.fused_loss else 4) + 4 * model.extra_predictions + HALF * setup.deferred_wgrads
    deferred = setup.deferred_wgrads * (between + table_parameters(model, setup) * HALF / 2)
    return kept + 2 * between + head, max(mask + logits * bytes_each + deferred, backward)


def _gathered(model: Model, setup: Setup) -> float:
    """Count the gathered table of words, and a layer that is gathered while another computes (sharded parameters)."""
    if not setup.sharded_parameters:
        return 0.0
    table = table_parameters(model, setup) if setup.is_first or setup.is_last else 0
    layers = replace(setup, chunks=(setup.blocks[-4:],), pp=3, stage=1)
    return HALF * (table + dense_parameters(model, layers) + expert_parameters(model, layers))


def _layer_backward(model: Model, setup: Setup) -> float:
    """Count a recomputed layer, and for unfused attention the gradients of the probabilities, of the scores and of the
    scaled scores."""
    again = 0.0
    if "full" in setup.recompute:
        again = sum(kept_bytes(model, replace(setup, recompute=()), block) for block in setup.blocks[-2:])
    if setup.attention != "unfused":
        return again
    pairs = max(block.queries * block.keys for block in setup.blocks)
    return again + 3 * setup.micro_batch * model.heads / setup.tp * pairs * HALF
