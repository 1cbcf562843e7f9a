"""The `main.py` of a saved program: what torchrun starts."""

from __future__ import annotations

import json

from codegen.program import PipelineProgram, Program

_TEMPLATE = '''"""Trains {name} on {mesh_text}:  {launcher} main.py --steps 10

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
checkpoint = importlib.import_module(f"{{package}}.runtime.checkpoint")
{imports}

NUM_MICRO_BATCHES = {micro}
VOCABULARY = {vocabulary}


def batches(start, data):
    """Whole global batches by input name, from sample `start` on."""
    generator = torch.Generator()
    step = start // {batch}
    while True:
        generator.manual_seed(step)
        batch = {{}}
        for name, spec in {inputs}.items():
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
        torch.cuda.set_device({device})
    dist.init_process_group("nccl" if on_gpu else "gloo"{alone})
    mesh = {mesh}
    step = Step(
        {model},
        mesh,
        optimizer_factory=lambda params: {optimizer},
        num_micro_batches=NUM_MICRO_BATCHES,
        precision="{precision}",
        max_grad_norm=options.max_grad_norm,
{options}    )
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


_SINGLE_IMPORTS = '''{root} = importlib.import_module(f"{{package}}.model").{root}
Mesh = importlib.import_module(f"{{package}}.runtime.mesh").Mesh
Step = importlib.import_module(f"{{package}}.runtime.step").Step'''

_PIPELINE_IMPORTS = '''PIPELINE = importlib.import_module(f"{package}.pipeline").PIPELINE
Step = importlib.import_module(f"{package}.runtime.step").Step

INPUTS = {name: spec for stage in PIPELINE.stages for name, spec in stage.program.INPUTS.items()}
SCHEDULE = tuple((HERE / "schedule.txt").read_text().splitlines())'''

_FUSED_IMPORT = '\nFusedAdamW = importlib.import_module(f"{package}.runtime.fused_adamw").FusedAdamW'

_ALONE = ", store=dist.HashStore(), rank=0, world_size=1"
"""One process needs no launcher to tell it where the others are."""

_OPTIMIZER = "torch.optim.AdamW(params, lr=options.lr, fused=True)"
_FUSED_OPTIMIZER = "FusedAdamW(params, lr=options.lr)"


def emit_main(program: Program | PipelineProgram) -> str:
    """The text of main.py."""
    if isinstance(program, PipelineProgram):
        return _emit(
            program,
            program.any,
            imports=_PIPELINE_IMPORTS,
            inputs="INPUTS",
            model="PIPELINE",
            mesh='PIPELINE.create_mesh("cuda" if on_gpu else "cpu")',
            options=["schedule=SCHEDULE"],
        )
    root = program.root.name
    return _emit(
        program,
        program,
        imports=_SINGLE_IMPORTS.format(root=root),
        inputs=f"{root}.INPUTS",
        model=root,
        mesh=f'Mesh.create({program.axes}, {program.axis_sizes}, "cuda" if on_gpu else "cpu")',
        options=[],
    )


def _emit(
    whole: Program | PipelineProgram, any_program: Program, *, imports: str, options: list[str], **parts: str
) -> str:
    """any_program: one with the header's values. options: further arguments of Step."""
    if any_program.offload_optimizer:
        options = [*options, f'offload_optimizer="{any_program.offload_optimizer}"']
    if any_program.offload_parameters:
        options = [*options, "offload_parameters=True"]
    if any_program.compression:
        options = [*options, f"compression={json.dumps(dict(any_program.compression))}"]
    if any_program.backend != "eager":
        options = [*options, f'backend="{any_program.backend}"']
    if any_program.kernels:
        options = [*options, "kernels=True"]
    if any_program.fp8:
        options = [*options, "fp8=True"]
    is_fused = any_program.has_fused_update
    is_alone = whole.num_ranks == 1
    return _TEMPLATE.format(
        launcher="python" if is_alone else f"torchrun --nproc-per-node {whole.num_ranks}",
        device="0" if is_alone else 'int(os.environ["LOCAL_RANK"])',
        alone=_ALONE if is_alone else "",
        name=whole.name,
        mesh_text=whole.mesh_text,
        ranks=whole.num_ranks,
        micro=any_program.num_micro_batches,
        batch=any_program.global_batch_size,
        precision=any_program.precision,
        vocabulary=any_program.vocabulary,
        options="".join(f"        {option},\n" for option in options),
        imports=imports + (_FUSED_IMPORT if is_fused else ""),
        optimizer=_FUSED_OPTIMIZER if is_fused else _OPTIMIZER,
        **parts,
    )
