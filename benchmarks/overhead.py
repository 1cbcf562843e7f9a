"""Is a generated program as fast as what one would write by hand with torch?

    python -m benchmarks.overhead                  # from the repository's root; some minutes on two cores
    python -m benchmarks.overhead --quick          # a tiny model, a few steps: does it run, are the losses equal?

Both sides train the same Llama (Hugging Face's module with sdpa attention is the hand-written model; the generated
program is compiled from it) on the same batch with the same fused AdamW, in the same processes (gloo over loopback, one
thread each), in alternating blocks of steps: a block of one side is only compared with the block of the other side
next to it, because the machine's speed drifts. The losses of every step must agree, or there is no row.

    dp        against DistributedDataParallel
    zero3     against torch.distributed.fsdp.fully_shard on every layer and the root
    tp        against parallelize_module, column- and row-wise; the generated program is pinned to the same sharding
    tp-free   the same, but the planner shards as it likes

tokens/s are of whole global batches, timed between barriers. CPU seconds (user and system, all ranks, per step) are
beside them: other processes on the machine disturb those less. The generated program also returns the global mean
loss, for which it sums the loss and the number of targets over the ranks; the hand-written one does without.
Rows are appended to benchmarks/results/overhead.csv.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import inspect
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.launch import run_ranks
from benchmarks.table import append

RESULTS = Path(__file__).parent / "results" / "overhead.csv"
LOSS_TOLERANCE = 1e-4
WARM_STEPS = 3
Batch = Mapping[str, Tensor]
Optimizer = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)

COLUMN_AND_ROW = {
    **{f"*.{name}_proj.weight": {"tp": "S(0)"} for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": {"tp": "S(1)"} for name in ("o", "down")},
}


@dataclass(frozen=True, slots=True)
class Size:
    """The model and its batch. batch_size: rows of the global batch, a multiple of every number of ranks."""

    hidden: int = 256
    intermediate: int = 704
    num_layers: int = 4
    num_heads: int = 8
    num_key_value_heads: int = 4
    sequence: int = 128
    batch_size: int = 4

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.sequence

    def model(self) -> LlamaForCausalLM:
        """With the same random weights at every call."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            max_position_embeddings=self.sequence,
            use_cache=False,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        return LlamaForCausalLM(config)

    def batch(self) -> dict[str, Tensor]:
        """Random bytes, of which every token but the first of a row is a target."""
        ids = torch.randint(0, 256, (self.batch_size, self.sequence), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "labels": ids.clone()}


QUICK = Size(hidden=64, intermediate=128, num_layers=2, num_heads=4, sequence=32)


@dataclass(frozen=True, slots=True)
class Hand:
    """A hand-written step: `step(this rank's batch) -> this rank's loss`.

    splits: whether every rank has rows of its own, rather than all of them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    splits: bool

    def local_batch(self, batch: Batch) -> dict[str, Tensor]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if self.splits else (0, 1)
        return {name: value.chunk(size)[rank].contiguous() for name, value in batch.items()}

    def __call__(self, local_batch: Batch) -> Tensor:
        loss: Tensor = self.model(**local_batch).loss
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def data_parallel(model: LlamaForCausalLM) -> Hand:
    """DistributedDataParallel, with what makes it faster here.

    Gradients are views of its buckets, the graph is static, and the rotary frequencies are not sent every step.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True, buffers: False}
    wrapped = DistributedDataParallel(model, **options)
    return Hand(wrapped, Optimizer(wrapped.parameters()), splits=True)


def sharded_parameters(model: LlamaForCausalLM) -> Hand:
    """fully_shard on every layer and the root, parameters freed after forward (ZeRO-3)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return Hand(model, Optimizer(model.parameters()), splits=True)


def tensor_parallel(model: LlamaForCausalLM) -> Hand:
    """Attention and MLP column- then row-wise on local tensors; norms, embedding and head replicated.

    With a vocabulary of 256 the head is no larger than another projection, and splitting it would gather the logits.
    No sequence parallelism: gloo's reduce_scatter is an all_reduce inside, so it would only add an all_gather.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        rows = ("self_attn.o_proj", "mlp.down_proj")
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, plan)
    # Groups, since the fused step takes a list of plain tensors or of distributed ones.
    distributed = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    return Hand(model, Optimizer([{"params": distributed}, {"params": plain}]), splits=False)


@dataclass(frozen=True, slots=True)
class Contest:
    """One row: what the generated program may be, and what is written by hand."""

    name: str
    baseline: str
    hand: Callable[[LlamaForCausalLM], Hand]
    constraints: Callable[[int], dict[str, Any]]


CONTESTS = (
    Contest("dp", "DistributedDataParallel", data_parallel, lambda n: {"dp": n, "zero": 0}),
    Contest("zero3", "fully_shard", sharded_parameters, lambda n: {"dp": n, "zero": 3}),
    Contest("tp", "parallelize_module", tensor_parallel, lambda n: {"tp": n, "parameters": COLUMN_AND_ROW}),
    Contest("tp-free", "parallelize_module", tensor_parallel, lambda n: {"tp": n}),
)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of one side: wall seconds per step, CPU seconds of all ranks per step."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Blocks of both sides, the i-th of each next to one another in time; and the largest relative loss difference."""

    generated: tuple[Block, ...]
    hand: tuple[Block, ...]
    loss_error: float


def measure(compiled: Any, contest: Contest, batch: Batch, num_blocks: int, num_steps: int) -> Measured:
    """On every rank: alternate blocks of both sides. Raises ArithmeticError where the losses differ."""
    step = compiled.build()
    hand = contest.hand(copy.deepcopy(compiled.model).train())
    sides: dict[str, tuple[Callable[[Batch], Tensor], Batch]] = {
        "generated": (step, compiled.local_batch(batch)),
        "hand": (hand, hand.local_batch(batch)),
    }
    losses: dict[str, list[Tensor]] = {name: [] for name in sides}
    blocks: dict[str, list[Block]] = {name: [] for name in sides}
    for name, (function, local) in sides.items():
        losses[name] += [function(local) for _ in range(WARM_STEPS)]
    for index in range(num_blocks):
        # A B, B A, A B ...: neither side is always the one that follows.
        for name in sorted(sides, reverse=bool(index % 2)):
            block, found = _run_block(*sides[name], num_steps)
            blocks[name].append(block)
            losses[name] += found
    error = _loss_error(losses["generated"], losses["hand"])
    if error > LOSS_TOLERANCE:
        raise ArithmeticError(f"{contest.name}: losses differ by {error:.2e} (relative), more than {LOSS_TOLERANCE}")
    return Measured(tuple(blocks["generated"]), tuple(blocks["hand"]), error)


def _run_block(function: Callable[[Batch], Tensor], local: Batch, num_steps: int) -> tuple[Block, list[Tensor]]:
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    losses = [function(local) for _ in range(num_steps)]
    used = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.barrier()
    seconds = (time.perf_counter() - wall) / num_steps
    dist.all_reduce(used)
    return Block(seconds, float(used) / num_steps), losses


def _loss_error(generated: Sequence[Tensor], hand: Sequence[Tensor]) -> float:
    """The hand-written losses are means of each rank's (equally many) tokens."""
    expected = torch.stack(list(hand)).double()
    dist.all_reduce(expected)
    expected /= dist.get_world_size()
    return float(((torch.stack(list(generated)).double() - expected) / expected).abs().max())


def run_contest(
    contest: Contest, num_ranks: int, size: Size, cluster: str, num_blocks: int, num_steps: int
) -> dict[str, Any]:
    """One row. Raises RankError if a rank fails, also where the losses differ."""
    model, batch = size.model(), size.batch()
    compiled = autopar.compile(
        model,
        cluster.replace("N", str(num_ranks)),
        example_inputs=batch,
        optimizer=Optimizer,
        constraints=contest.constraints(num_ranks),
    )
    measured = run_ranks(measure, (compiled, contest, batch, num_blocks, num_steps), num_ranks)[0]
    return _row(contest, compiled, num_ranks, size, num_steps, measured)


def _row(
    contest: Contest, compiled: Any, num_ranks: int, size: Size, num_steps: int, measured: Measured
) -> dict[str, Any]:
    generated = [size.num_tokens / block.seconds for block in measured.generated]
    hand = [size.num_tokens / block.seconds for block in measured.hand]
    ratios = [g / h for g, h in zip(generated, hand, strict=True)]
    pairs = zip(measured.hand, measured.generated, strict=True)
    cpu_ratio = statistics.median(h.cpu_seconds / g.cpu_seconds for h, g in pairs)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": f"{platform.machine()} {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in compiled.model.parameters()),
        "layers": size.num_layers,
        "hidden": size.hidden,
        "sequence": size.sequence,
        "batch": size.batch_size,
        "contest": contest.name,
        "ranks": num_ranks,
        "baseline": contest.baseline,
        "division": division(compiled),
        "blocks": len(ratios),
        "steps_per_block": num_steps,
        "hand_tokens_per_second": round(statistics.median(hand), 1),
        "hand_interquartile": round(interquartile(hand), 1),
        "generated_tokens_per_second": round(statistics.median(generated), 1),
        "generated_interquartile": round(interquartile(generated), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_interquartile": round(interquartile(ratios), 4),
        "hand_cpu_seconds": round(statistics.median(b.cpu_seconds for b in measured.hand), 4),
        "generated_cpu_seconds": round(statistics.median(b.cpu_seconds for b in measured.generated), 4),
        "cpu_ratio": round(cpu_ratio, 4),
        "loss_error": f"{measured.loss_error:.1e}",
    }


def division(compiled: Any) -> str:
    """ "7 S 2 Rp of 12": how many parameters (of one layer of each kind, and the root) are stored in parts, ZeRO
    included, and of how many the ranks compute with a whole copy on different data; the others' work is repeated."""
    specs = [s for cls in (*compiled.program.layers, compiled.program.root) for s in dict(cls.parameters).values()]
    kinds = [{text[0] for _, text in s.placements if text != "R"} | ({"S"} if s.zero else set()) for s in specs]
    stored = sum("S" in kind for kind in kinds)
    copied = sum(kind == {"R"} for kind in kinds)
    return f"{stored} S {copied} Rp of {len(specs)}"


def interquartile(values: Sequence[float]) -> float:
    """The range of the middle half; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the contests asked for, print a table, append the rows; returns them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--contests", nargs="+", default=[c.name for c in CONTESTS], choices=[c.name for c in CONTESTS])
    parser.add_argument("--blocks", type=int, default=25, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=2, help="steps of a block")
    parser.add_argument("--cluster", default="N cpu", help="what to plan for; N stands for the number of ranks")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model and two blocks of one step")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else Size()
    num_blocks, num_steps = (2, 1) if options.quick else (options.blocks, options.steps)
    rows = []
    columns = ("hand tok/s", "generated", "ratio", "iqr", "cpu ratio", "loss error")
    print(f"{'contest':8} {'ranks':5} {'baseline':24} {'division':16} " + " ".join(f"{name:>10}" for name in columns))
    for num_ranks in options.ranks:
        for contest in (c for c in CONTESTS if c.name in options.contests):
            row = run_contest(contest, num_ranks, size, options.cluster, num_blocks, num_steps)
            rows.append(row)
            keys = ["hand_tokens_per_second", "generated_tokens_per_second", "ratio", "ratio_interquartile"]
            keys += ["cpu_ratio"]
            values = " ".join(f"{row[key]:10}" for key in keys)
            head = f"{contest.name:8} {num_ranks:5} {contest.baseline:24} {row['division']:16}"
            print(f"{head} {values} {row['loss_error']:>10}", flush=True)
            append([row], options.output)
    return rows


if __name__ == "__main__":
    main()
