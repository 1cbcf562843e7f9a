"""The `main.py` of a saved program: what torchrun starts."""

from __future__ import annotations

from codegen.program import Program

_TEMPLATE = '''"""Trains {name} on {mesh}:  torchrun --nproc-per-node {ranks} {folder}main.py --steps 10

Without --data every step gets random inputs; with it, --data FILE is read as a stream of bytes and every integer input
is filled with consecutive pieces of it. Replace `batches` with your own data: it yields whole global batches, of which
`step.local_batch` takes this rank's part. Needs torch only (and safetensors to read weights.safetensors).
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
package = HERE.name
{root} = importlib.import_module(f"{{package}}.model").{root}
Mesh = importlib.import_module(f"{{package}}.runtime.mesh").Mesh
Step = importlib.import_module(f"{{package}}.runtime.step").Step
checkpoint = importlib.import_module(f"{{package}}.runtime.checkpoint")

NUM_MICRO_BATCHES = {micro}
VOCABULARY = {vocabulary}


def batches(start, data):
    """Whole global batches by input name, from sample `start` on."""
    generator = torch.Generator()
    step = start // {batch}
    while True:
        generator.manual_seed(step)
        batch = {{}}
        for name, spec in {root}.INPUTS.items():
            shape = (spec.shape[0] * NUM_MICRO_BATCHES, *spec.shape[1:])
            if spec.dtype.is_floating_point:
                batch[name] = torch.randn(shape, generator=generator)
            elif data is not None:
                length = shape[-1]
                starts = torch.randint(len(data) - length, shape[:-1], generator=torch.Generator().manual_seed(step))
                batch[name] = torch.stack([data[s : s + length] for s in starts.flatten()]).view(shape)
            else:
                batch[name] = torch.randint(VOCABULARY, shape, generator=generator, dtype=spec.dtype)
        yield batch
        step += 1


def initial_value(name):
    """Weights of weights.safetensors where it is there, else small random numbers equal on all ranks."""
    path = HERE / "weights.safetensors"
    if path.exists():
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            return file.get_tensor(name)
    raise SystemExit(f"{{path}} is missing: save the program with weights, or write initial_value yourself")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="folder to resume from and to write to at the end")
    parser.add_argument("--max-grad-norm", type=float)
    options = parser.parse_args()
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if running != {ranks}:
        launch = f"torchrun --nproc-per-node {ranks} {{sys.argv[0]}}"
        raise SystemExit(f"this program is for {ranks} processes, {{running}} run: {{launch}}")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = Mesh.create({axes}, {sizes}, "cuda" if on_gpu else "cpu")
    step = Step(
        {root},
        mesh,
        optimizer_factory=lambda params: torch.optim.AdamW(params, lr=options.lr),
        num_micro_batches=NUM_MICRO_BATCHES,
        precision="{precision}",
        max_grad_norm=options.max_grad_norm,
    )
    step.load(initial_value)
    if options.checkpoint and options.checkpoint.exists():
        checkpoint.load(step, options.checkpoint)
    data = None
    if options.data:
        data = torch.tensor(bytearray(options.data.read_bytes()), dtype=torch.uint8).long() % VOCABULARY
    source = batches(step.num_samples, data)
    for _ in range(options.steps):
        started = time.perf_counter()
        loss = step(step.local_batch(next(source))).item()
        if dist.get_rank() == 0:
            print(f"step {{step.rng.step}} loss {{loss:.4f}} {{time.perf_counter() - started:.3f}} s", flush=True)
    if options.checkpoint:
        checkpoint.save(step, options.checkpoint)
    dist.barrier()  # a rank that leaves while others still use their connections to it can abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def emit_main(program: Program) -> str:
    """The text of main.py."""
    return _TEMPLATE.format(
        name=program.name,
        mesh=program.mesh_text,
        ranks=program.num_ranks,
        folder="",
        root=program.root.name,
        micro=program.num_micro_batches,
        batch=program.global_batch_size,
        axes=program.axes,
        sizes=program.axis_sizes,
        precision=program.precision,
        vocabulary=program.vocabulary,
    )
