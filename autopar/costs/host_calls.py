"""The number of calls that a GPU's host issues for a program, counted statement by statement of the emitted code.

The unit is an elementwise call of torch with its autograd and its launch (Device.host_call_seconds). The others are
ratios of CPU time to this unit on one core of an EPYC, rounded (benchmarks/host_calls.py, torch 2.13: 2.0 us). They
include 3 us per cuLaunchKernel, 11 us per launch of Triton and 20 us per enqueueing of NCCL from the sources named
there. The unit of the H100 and a fused kernel's launch are fitted to the steps of five families whose host was behind
(shared/data/gpu_h100_families.jsonl; benchmarks/step_errors.py has the errors):

    a view                             0.3 forward   0.7 backward
    a product, attention               1.5           0.6 + 1.3 per gradient
    any other call of torch            1.0           0.6 + 0.9 per gradient
    a fused kernel                     1 + 8 per launch, both ways: an autograd function of Python, its checks, Triton
    a reshard                          1, and 7 for the collective of that direction
    a trained parameter                              0.7: its hook

Between two synchronizations the host runs ahead of the device. A stretch of D device seconds that the host issues
evenly in H seconds ends after max(D, H). Stretches are the forward and the backward of a unit of the chain (a layer):

    forward = max(D_f, H_f),    backward = max(D_b, H_b)

The seconds above D are reported as `HOST`. The host could lose the lead of one layer's forward in another stretch. For
unlike units the sum of maxima exceeds the maximum of sums, by at most the smaller of gain and loss. The loss and the
gradient's norm are read before the update (codegen/runtime/non_finite.py), which therefore begins with an idle device:
its host's seconds are all exposed.

Under inductor a run of calls between two reshards is one graph of torch.compile (regions.py): 36 us of guards and 7 to
9 us per kernel (meta-pytorch/tritonbench, pull request 1017). That is 5 units a graph and one per product or kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.graph import base_name
from autopar.operators.traits import ATTENTION, MATMULS, VIEWS
from codegen.fusion import KERNELS
from codegen.program import Call, LayerLoop, Reshard, Statement, Var, reads

Calls = tuple[float, float]
"""Units of forward and of backward."""

VIEW: Calls = (0.3, 0.7)
NODE = 0.6
"""Of autograd's engine, for one of torch's functions."""
CALL, GRADIENT = 1.0, 0.9
PRODUCT, PRODUCT_GRADIENT = 1.5, 1.3
FUNCTION = 1.0
LAUNCH = 8.0
"""Of a fused kernel: its results are allocated, its tile is looked up, Triton launches. Fitted, see above."""
COLLECTIVE = 7.0
GATHERED: Calls = (COLLECTIVE, 2 * COLLECTIVE)
"""Of ZeRO-3, per group of ranks and unit: gathers in forward and in backward, and scattered gradients."""
LAYER = 2.0
"""Call of a layer, as a module with hooks."""
TRAINED = 0.7
"""Per trained parameter and micro-batch. This and the next constants are in units of calls as steps have them: some
9.5 us on the same core, with launches, where loops of one call take 5."""
UPDATED = 0.7
"""Per trained parameter and step, if torch's optimizer looks all of them up; a fused update has a table."""
MICRO_BATCH = 12.0
"""Checks of the batch, the order of buckets, sums of losses."""
SYNCHRONISED = 10.0
"""From the reading of the norm to the update's launch; by reading."""
STEP = 18.0
"""The rest of a step besides micro-batches and parameters."""
ACTION = 2 * COLLECTIVE
"""Receives and sends of a stage's forward or backward."""
LOSS: Calls = (20.0, 10.0)
"""Of cross-entropy in torch's calls (codegen/runtime/cross_entropy.py), as in host.py."""
MATH: Calls = (17.0, 28.0)
"""Of attention in torch's math path (contractions.py): two products and a dozen calls forward, four and a dozen
backward, counted on a CPU."""
WINDOWS: Calls = (38.0, 47.0)
"""Of attention over windows (codegen/runtime/windows.py): masks, then slices and attention for each of four tiles;
counted on a CPU for Gemma's windows."""
RUNTIME: Calls = (FUNCTION + 10 * CALL, FUNCTION + 10 * CALL)
"""Of any other run-time function, by reading a few."""
JOINED = ("overlapped.", "deferred.", "fp8.", "async_tp.")
"""Run-time functions that combine a product with other calls."""
GRAPH = 5.0


def calls_of(statement: Statement) -> Calls:
    """Return the calls of one statement of a program."""
    if isinstance(statement, Reshard):
        return reshard_calls(bool(statement.forward), bool(statement.backward), statement.source.type.requires_grad)
    if isinstance(statement, LayerLoop):
        return 0.0, 0.0
    if statement.target.startswith("kernels."):
        return _kernel(statement)
    counts = [_call(call) for call in statement.original]
    functions = FUNCTION if statement.target.startswith(JOINED) else 0.0
    is_trained = any(result.type.requires_grad for result in statement.results)
    forward, backward = (sum(side) for side in zip(*counts, strict=True))
    return forward + functions, backward + functions if is_trained else 0.0


def reshard_calls(sends_forward: bool, sends_backward: bool, has_gradient: bool) -> Calls:
    """Return the calls of one reshard step."""
    gradient = FUNCTION + (COLLECTIVE if sends_backward else CALL)
    return FUNCTION + (COLLECTIVE if sends_forward else 0.0), gradient if has_gradient else 0.0


def product_calls(num_gradients: int) -> Calls:
    """Return the calls of a product or attention in one call of torch."""
    return PRODUCT, NODE + PRODUCT_GRADIENT * num_gradients if num_gradients else 0.0


def host_calls(statements: Iterable[Statement], is_layer: bool, is_compiled: bool = False) -> Calls:
    """Return the calls of a unit's statements, without parameters. is_compiled: those of layers that call only torch
    form one graph up to the next other statement."""
    forward, backward = (LAYER, 0.0) if is_layer else (0.0, 0.0)
    in_graph = False
    for statement in statements:
        is_plain = isinstance(statement, Call) and statement.target.startswith(("aten.", "idioms."))
        if not (is_plain and is_layer and is_compiled):
            calls = calls_of(statement)
            in_graph = False
        else:
            assert isinstance(statement, Call)
            calls = _in_graph(statement)
            if not in_graph:
                calls = calls[0] + GRAPH + CALL, calls[1] + GRAPH + CALL
            in_graph = True
        forward, backward = forward + calls[0], backward + calls[1]
    return forward, backward


def _kernel(call: Call) -> Calls:
    """Return the calls of a fused kernel; of one that works chunk by chunk, with one chunk."""
    pattern = KERNELS[call.target]
    counts = zip(pattern.launches, pattern.products, pattern.torch_calls, strict=True)
    forward, backward = (
        FUNCTION + launches * LAUNCH + products * PRODUCT + calls * CALL for launches, products, calls in counts
    )
    is_trained = any(result.type.requires_grad for result in call.results)
    return forward, backward if is_trained else 0.0


def _call(call: Call) -> Calls:
    """Return the calls of one call of the lowered program."""
    gradients = len({variable.name for variable in reads(call) if variable.type.requires_grad})
    if call.target.startswith(JOINED):
        return product_calls(gradients)
    if not call.target.startswith("aten."):
        counts = {"runtime.cross_entropy": LOSS, "runtime.window_attention": WINDOWS}.get(call.target, RUNTIME)
        return counts if gradients else (counts[0], 0.0)
    name = base_name(call.target)
    if name in VIEWS and name != "reshape":
        return VIEW if gradients else (VIEW[0], 0.0)
    if name == "cross_entropy_loss":
        return LOSS
    if name in ATTENTION and _has_mask_gradient(call):
        return MATH
    if name in MATMULS or name in ATTENTION:
        return product_calls(gradients)
    return CALL, NODE + GRADIENT * gradients if gradients else 0.0


def _has_mask_gradient(call: Call) -> bool:
    """Return whether attention's mask is trained: torch then has no fused kernel."""
    mask = dict(call.kwargs).get("attn_mask", call.args[3] if len(call.args) > 3 else None)
    return isinstance(mask, Var) and mask.type.requires_grad


def _in_graph(call: Call) -> Calls:
    """Return the calls of one call inside a compiled graph: products are separate kernels, everything else shares
    one kernel with its neighbors."""
    kernels = sum(base_name(product.target) in MATMULS | ATTENTION for product in call.original)
    is_trained = any(result.type.requires_grad for result in call.results)
    return kernels * CALL, 2 * kernels * CALL if is_trained else 0.0
