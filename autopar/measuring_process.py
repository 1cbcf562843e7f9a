"""One of the processes that `autopar.measure` starts: times kernels and collectives while the others do the same.

Run as a file, not as part of the package: importing autopar takes longer than measuring. Cores are shared by time
slices of milliseconds, so that a single call tells nothing: what is timed is always a stretch of many calls during
which every process is busy. Kernels are timed by the CPU time that they use, which leaves out what other programs on
the machine take; collectives, which mostly wait, by the clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cost_models.collective import Kind
from cost_models.compute import Work

WINDOW_SECONDS = 0.04
"""How long one kernel is repeated in one round: some ten time slices of the scheduler."""
COLLECTIVE_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24)
COLLECTIVE_KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
MATMUL_SHAPES = (
    (16, 64, 64), (64, 64, 64), (128, 256, 256), (512, 256, 256), (512, 512, 512), (1024, 1024, 256), (8, 512, 512),
    (512, 16, 512),
)  # fmt: skip
"""(m, n, k): rows, output features, input features."""
BLOCK_FORWARD_KERNELS = 10
BLOCK_BACKWARD_KERNELS = 14
"""What `_block` launches as the cost model counts it: two norms, four linears (two matmuls each in backward),
attention, two additions, a GELU. Views are free in the model, so what they cost is spread over the kernels."""

Call = Callable[[], object]


def main(argument: str) -> None:
    """Does the task (JSON) that `measure` wrote and leaves rank<N>.json in the task's folder.

    There: CPU seconds per round of every kernel, in the order of "works", and of the block's "forward" and "backward";
    seconds per round of every collective as [kind, num_bytes, group_size, seconds]; the "share" of a core that the
    process had while it was timing kernels; process_bytes as in `Measurements`.
    """
    task = json.loads(argument)
    process_bytes = _resident_bytes()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder, rank, size = Path(task["folder"]), task["rank"], task["size"]
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=size)
    cases = _kernels()
    windows = [[_window(call) for _, call in cases] for _ in range(task["min_rounds"])]
    forward, backward = zip(*(_block_seconds() for _ in range(task["min_rounds"])), strict=True)
    collectives = _time_collectives(rank, size, task["min_rounds"], task["collective_seconds"]) if size > 1 else {}
    result = {
        "process_bytes": process_bytes,
        "works": [asdict(work) for work, _ in cases],
        "kernels": [[window.cpu_seconds / window.count for window in kernel] for kernel in zip(*windows, strict=True)],
        "share": sum(w.cpu_seconds for r in windows for w in r) / sum(w.wall_seconds for r in windows for w in r),
        "forward": forward,
        "backward": backward,
        "collectives": [[*key, seconds] for key, seconds in collectives.items()],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _resident_bytes() -> int:
    """Peak resident memory of this process so far; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True, slots=True)
class _Window:
    count: int
    cpu_seconds: float
    wall_seconds: float


def _window(call: Call) -> _Window:
    """What repeating the call takes while all processes do so."""
    call()
    dist.barrier()
    count, start, cpu_start = 0, time.perf_counter(), time.process_time()
    while (now := time.perf_counter()) - start < WINDOW_SECONDS:
        call()
        count += 1
    return _Window(count, time.process_time() - cpu_start, now - start)


def _kernels() -> list[tuple[Work, Call]]:
    """Kernels with what they do: linears square and skinny, elementwise and row-wise ones small to large, attention."""
    cases = [_linear(m, n, k) for m, n, k in MATMUL_SHAPES]
    cases += [_linear(256, 512, 512, torch.bfloat16), _linear(256, 512, 512, torch.float64)]
    for rows in (16, 128, 1024, 8192):
        cases.append(_memory(lambda x, y: x + y, rows, num_inputs=2))
    for rows in (128, 1024, 4096):
        cases.append(_memory(lambda x, y: F.gelu(x), rows, num_inputs=1))
        cases.append(_memory(lambda x, y: F.layer_norm(x, x.shape[-1:]), rows, num_inputs=1))
    return [*cases, _attention(causal=False), _attention(causal=True)]


def _linear(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Work, Call]:
    x = torch.randn(m, k, dtype=dtype)
    weight = torch.randn(n, k, dtype=dtype, requires_grad=True)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]
    work = Work("matmul", 2.0 * m * n * k, float(dtype.itemsize * (m * k + n * k + m * n)), name, (m, n, k))
    return work, lambda: F.linear(x, weight)


def _memory(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: int, num_inputs: int
) -> tuple[Work, Call]:
    """On tensors of [rows, 512] fp32; every operand and the result moved once."""
    x, y = torch.randn(rows, 512, requires_grad=True), torch.randn(rows, 512)
    return Work("memory", 0.0, 4.0 * x.numel() * (num_inputs + 1)), lambda: function(x, y)


def _attention(causal: bool) -> tuple[Work, Call]:
    batch, heads, length, width = 1, 4, 256, 64
    query, key, value = (torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3))
    flops = 4.0 * query.numel() * length * (0.5 if causal else 1.0)
    work = Work("attention", flops, 4.0 * 4 * query.numel())
    return work, lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def _block_seconds() -> tuple[float, float]:
    """CPU time of forward and backward of a transformer block with tensors so small that only overhead is left."""
    x = torch.randn(4, 16, requires_grad=True)
    norms = [torch.ones(16, requires_grad=True) for _ in range(2)]
    shapes = ((48, 16), (16, 16), (64, 16), (16, 64))
    weights = [torch.randn(shape, requires_grad=True) for shape in shapes]
    gradient = torch.ones(4, 16)
    forward = backward = 0.0
    count = 0

    def once() -> None:
        nonlocal forward, backward
        start = time.process_time()
        y = _block(x, norms, weights)
        middle = time.process_time()
        torch.autograd.backward(y, gradient)
        forward, backward = forward + middle - start, backward + time.process_time() - middle

    for _ in range(3):
        once()
    dist.barrier()
    forward, backward = 0.0, 0.0
    deadline = time.perf_counter() + 2 * WINDOW_SECONDS
    while time.perf_counter() < deadline:
        once()
        count += 1
    return forward / count, backward / count


def _block(x: torch.Tensor, norms: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The kernels that BLOCK_FORWARD_KERNELS counts, with the views between them. x [4 tokens, 16]."""
    h = F.linear(F.layer_norm(x, (16,), norms[0]), weights[0])
    query, key, value = h.view(1, 4, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()
    h = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + F.linear(h.transpose(1, 2).reshape(4, 16), weights[1])
    h = F.gelu(F.linear(F.layer_norm(x, (16,), norms[1]), weights[2]))
    return x + F.linear(h, weights[3])


def _time_collectives(
    rank: int, size: int, min_rounds: int, seconds: float
) -> dict[tuple[Kind, int, int], list[float]]:
    """Rounds over all kinds, sizes and groups, until rank 0 finds that the time is up; at least min_rounds."""
    groups = {size: dist.group.WORLD}
    inner = next(n for n in range(2, size + 1) if size % n == 0)
    if inner < size:
        members = [list(range(first, first + inner)) for first in range(0, size, inner)]
        groups[inner] = [dist.new_group(ranks) for ranks in members][rank // inner]
    times: dict[tuple[Kind, int, int], list[float]] = {}
    start, rounds = time.perf_counter(), 0
    more = torch.ones(1)
    while bool(more.item()):
        for group_size, group in groups.items():
            for kind in COLLECTIVE_KINDS:
                for num_bytes in COLLECTIVE_BYTES:
                    elapsed = _collective_seconds(kind, num_bytes, group, group_size)
                    times.setdefault((kind, num_bytes, group_size), []).append(elapsed)
        rounds += 1
        more.fill_(rounds < min_rounds or time.perf_counter() - start < seconds)
        dist.broadcast(more, 0)
    return times


def _collective_seconds(kind: Kind, num_bytes: int, group: Any, size: int) -> float:
    call = _collective(kind, num_bytes, group, size)
    repeats = 8 if num_bytes < 2**18 else 4 if num_bytes < 2**21 else 2 if num_bytes < 2**24 else 1
    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _collective(kind: Kind, num_bytes: int, group: Any, size: int) -> Call:
    """num_bytes as cost_models.collective counts them."""
    # torch 2.13 deprecates the *_tensor names for *_single, which 2.11 lacks.
    library: Any = dist
    all_gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
    reduce_scatter = getattr(library, "reduce_scatter_single", None) or library.reduce_scatter_tensor
    part = torch.ones(max(num_bytes // 4 // size, 1))
    whole, other = torch.ones(part.numel() * size), torch.ones(part.numel() * size)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: all_gather(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter(part, whole, group=group)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)
    place = dist.get_rank(group)
    after, before = (dist.get_global_rank(group, (place + hop) % size) for hop in (1, -1))

    def send_on() -> None:
        works = [dist.isend(whole, after, group=group), dist.irecv(other, before, group=group)]
        for work in works:
            if work is not None:
                work.wait()

    return send_on


if __name__ == "__main__":
    main(sys.argv[1])
