"""The `main.py` of a saved program: what torchrun starts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from codegen.program import PipelineProgram, Program
from codegen.source.columns import COLUMNS
from codegen.source.launching import Nodes, single_node, usage
from codegen.source.text import plain, quoted

_TEMPLATE = '''"""Train {name} on {mesh_text}{usage}

{data_note}
{optimizer_note}"""

import importlib.util
import itertools
import os
import sys
import time
{partial_import}from pathlib import Path

import torch
import torch.distributed as dist

# Import this folder as a package, whatever its name is.
HERE = Path(__file__).resolve().parent
package = "autopar_program"
spec = importlib.util.spec_from_file_location(package, HERE / "__init__.py", submodule_search_locations=[str(HERE)])
sys.modules[package] = importlib.util.module_from_spec(spec)

from autopar_program.program import INPUTS, NUM_MICRO_BATCHES, create_mesh, create_step
{imports}

BATCH_SIZE = {batch}
{batches}


def initial_value():
    """Return the weights beside this file; each rank reads its part. A function `name -> whole tensor` works too."""
    try:
        return weight_files.stored_weights(HERE)
    except weight_files.WeightFileError as error:
        raise SystemExit(f"{{error}}: save the program with weights, or write initial_value yourself") from None


{read_bytes}{optimizer_function}def read_options():
    """{options_doc}"""
    parser = options.Parser(description=__doc__)
    number = options.number
    duration = parser.add_mutually_exclusive_group()
    duration.add_argument("--steps", type=number("steps"), default=10, help="steps of this run [default: 10]")
    duration.add_argument("--until", type=number("steps"), help="steps in all, those before a resumption included")
    {optimizer_option}{data_option}
    parser.add_argument("--checkpoint", type=Path, help="folder to resume from and to write to, also on SIGTERM")
    parser.add_argument(
        "--checkpoint-every", type=number("checkpoint_every"), default=0, help="steps between checkpoints"
    )
    parser.add_argument("--max-grad-norm", type=number("max_grad_norm"), help="clip gradients at this global norm")
{wait_option}    args = parser.parse_args()
    if args.checkpoint_every and args.checkpoint is None:
        parser.error("argument --checkpoint-every: it needs --checkpoint, a folder")
    return {options_result}


def main():
    {options} = read_options()
{optimizer_choice}    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != {ranks}:
        launch = {launch}.replace("main.py", sys.argv[0])
        raise SystemExit(f"this program is for {ranks} processes, {{world_size}} run: {{launch}}")
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_gpu:
        torch.cuda.set_device({device})
    {join}
    mesh = create_mesh("cuda" if on_gpu else "cpu")
    {step}
    step.load(initial_value())
    is_first = dist.get_rank() == 0
    with checkpoint_folder.locked(args.checkpoint if is_first else None):
        checkpoint_folder.resume(args.checkpoint, lambda path: checkpoint.load(step, path), is_first)
        exit_code = train(step, {options}, is_first)
    step.close()
    dist.barrier()  # leave together: a rank that leaves early breaks the connections of the others
    dist.destroy_process_group()
    processes.leave(exit_code)


def train(step, {options}, is_first):
    """Train, and return the exit code: 143 after SIGTERM, if there is a folder for a checkpoint, else 0."""
    ending = processes.Ending(step.mesh.device) if args.checkpoint else None
    source = batches(step.num_samples{data})
    until = step.rng.step + args.steps if args.until is None else args.until
    while step.rng.step < until:
        start = time.perf_counter()
        loss = step(step.local_batch(next(source))).item()
        num_steps = step.rng.step
        if is_first:
            print(f"step {{num_steps}} loss {{loss:.4f}} {{time.perf_counter() - start:.3f}} s", flush=True)
        should_end = ending is not None and ending.is_told()
        is_due = args.checkpoint_every > 0 and num_steps % args.checkpoint_every == 0
        if args.checkpoint and (should_end or is_due or num_steps == until):
            checkpoint_folder.write(
                args.checkpoint, num_steps, lambda path: checkpoint.save(step, path), is_first, dist.barrier
            )
        if should_end:
            return 143
    return 0


if __name__ == "__main__":
    try:
        with processes.after_the_first():
            main()
    except checkpoint.CheckpointError as error:
        raise SystemExit(1 if os.environ.get("RANK", "0") != "0" else f"error: {{error}}") from None
'''

_DATA_NOTE = (
    "Each step trains on random inputs. {file}To train on your own data, replace `batches`: it yields global batches, "
    "and `step.local_batch` takes this rank's part of each. The program needs torch, and safetensors to read the "
    "weights."
)
_FLOAT_BATCHES = {
    "data_note": _DATA_NOTE.format(file=""),
    "batches": '''

def batches(first_sample):
    """Yield global batches, tensors by input name, from a sample on: a resumed run goes on in the data."""
    for step in itertools.count(first_sample // BATCH_SIZE):
        yield example_batch(step)


def example_batch(step):
    """Return random values for each input, equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    batch = {}
    for name, spec in INPUTS.items():
        batch[name] = torch.randn(spec.shape[0] * NUM_MICRO_BATCHES, *spec.shape[1:], generator=generator)
    return batch''',
    "read_bytes": "",
    "options_doc": "Return the options of the command line.",
    "data_option": "",
    "options_result": "args",
    "options": "args",
    "data": "",
}
"""The parts of the template for inputs that are all of floats."""
_TOKEN_BATCHES = {
    "data_note": _DATA_NOTE.format(file="With --data FILE, integer inputs are pieces of that file, read as bytes. "),
    "batches": '''VOCABULARY = {vocabulary}


def batches(first_sample, data=None):
    """Yield global batches, tensors by input name, from a sample on: a resumed run goes on in the data."""
    for step in itertools.count(first_sample // BATCH_SIZE):
        yield example_batch(step, data)


def example_batch(step, data=None):
    """Return random values for each input, or pieces of the data for integer inputs. Equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    batch = {{}}
    for name, spec in INPUTS.items():
        shape = (spec.shape[0] * NUM_MICRO_BATCHES, *spec.shape[1:])
        if spec.dtype.is_floating_point:
            batch[name] = torch.randn(shape, generator=generator)
        elif data is None:
            batch[name] = torch.randint(VOCABULARY, shape, generator=generator, dtype=spec.dtype)
        else:
            length = shape[-1]
            starts = torch.randint(len(data) - length, shape[:-1], generator=torch.Generator().manual_seed(step))
            batch[name] = torch.stack([data[start : start + length] for start in starts.flatten()]).view(shape)
    return batch''',
    "read_bytes": '''def read_bytes(path, parser):
    """Return a file's bytes as a tensor of numbers below VOCABULARY."""
    try:
        values = torch.tensor(bytearray(path.read_bytes()), dtype=torch.uint8).long() % VOCABULARY
    except OSError as error:
        parser.error(f"argument --data: {path}: {error.strerror}")
    specs = [spec for spec in INPUTS.values() if not spec.dtype.is_floating_point]
    longest = max((spec.shape[-1] for spec in specs if spec.shape), default=0)
    if len(values) <= longest:
        parser.error(f"argument --data: {path} has {len(values)} bytes, an input needs more than {longest}")
    return values


''',
    "options_doc": "Return the options of the command line and the data of --data.",
    "data_option": """
    parser.add_argument("--data", type=Path, help="file to read integer inputs from")""",
    "options_result": "args, None if args.data is None else read_bytes(args.data, parser)",
    "options": "args, data",
    "data": ", data",
}
"""The parts of the template for other inputs."""
_JOIN = 'processes.join("nccl" if on_gpu else "gloo", args.collective_seconds)'
_WAIT_OPTION = """    timeout = "seconds that a rank waits for others before it fails [default: 1800, of NCCL 600]"
    parser.add_argument("--collective-seconds", type=number("collective_seconds"), help=timeout)
"""
_ALONE = 'dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)'
"""One process needs no launcher to tell it where the others are."""


@dataclass(frozen=True, slots=True)
class MainOptimizer:
    """The optimizer that a saved program trains with.

    lr, weight_decay: of AdamW, where nothing else is given. path: of another's factory, `module:name`. arguments:
    keyword arguments of it, of types that `repr` writes. unnamed: what a factory is that has no path.
    """

    lr: float = 1e-3
    weight_decay: float = 1e-2
    path: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    unnamed: str = ""

    @property
    def is_default(self) -> bool:
        """Whether the optimizer is AdamW with a rate and a decay."""
        return not (self.path or self.unnamed)


_NAMED_NOTE = """
The optimizer is that of `compiled_optimizer`, or of --optimizer module:factory.
"""
_UNNAMED_NOTE = """
The program needs an optimizer, as the one that it was compiled with has no import path: give --optimizer
module:factory, or replace the line in `compiled_optimizer`.
"""
_OPTIMIZER_FUNCTION = '''def compiled_optimizer():
    """Return a factory of optimizers, of parameters or of (name, parameter) pairs."""
    {line}


'''
_OPTIMIZER_OPTION = 'parser.add_argument("--optimizer", help="module:factory, instead of the one compiled in")'
_OPTIMIZER_CHOICE = """    chosen = args.optimizer
    factory = optimizers.imported(chosen) if chosen else compiled_optimizer()
"""


def _imports(*modules: str) -> str:
    line = f"from autopar_program.runtime import {', '.join(modules)}"
    if len(line) <= COLUMNS:
        return line
    names = "".join(f"    {module},\n" for module in modules)
    return f"from autopar_program.runtime import (\n{names})"


def _optimizer_parts(optimizer: MainOptimizer, is_fused: bool) -> dict[str, str]:
    """Return the parts of the template for the optimizer."""
    if optimizer.is_default:
        decay = "" if optimizer.weight_decay == 1e-2 else f", weight_decay={optimizer.weight_decay!r}"
        rate = "1e-3" if optimizer.lr == 1e-3 else repr(optimizer.lr)
        name, fused = ("FusedAdamW", "") if is_fused else ("torch.optim.AdamW", ", fused=True")
        fused_import = "\nfrom autopar_program.runtime.fused_adamw import FusedAdamW"
        return {
            "partial_import": "from functools import partial\n",
            "imports": _imports("checkpoint", "checkpoint_folder", "options", "processes", "weight_files")
            + fused_import * is_fused,
            "optimizer_note": "",
            "optimizer_function": "",
            "optimizer_option": f'parser.add_argument("--lr", type=number("learning_rate"), default={rate})',
            "optimizer_choice": "",
            "step": f"""factory = partial({name}, lr=args.lr{decay}{fused})
    step = create_step(mesh, factory, max_grad_norm=args.max_grad_norm)""",
        }
    if optimizer.path:
        arguments = "".join(f", {name}={value!r}" for name, value in optimizer.arguments.items())
        line = f"return optimizers.imported({optimizer.path!r}{arguments})"
    else:
        why = f"the optimizer that was compiled in ({optimizer.unnamed}) has no import path"
        line = f"raise SystemExit({why + ': give --optimizer module:factory'!r})"
    asked = "checkpoint checkpoint_folder optimizer_trial optimizers options processes weight_files"
    return {
        "partial_import": "",
        "imports": _imports(*asked.split()),
        "optimizer_note": _NAMED_NOTE if optimizer.path else _UNNAMED_NOTE,
        "optimizer_function": _OPTIMIZER_FUNCTION.format(line=line),
        "optimizer_option": _OPTIMIZER_OPTION,
        "optimizer_choice": _OPTIMIZER_CHOICE,
        "step": """parameters = optimizers.read_parameters(HERE / "parameters.json")
    trial = optimizer_trial.OptimizerTrial()
    step = create_step(mesh, factory, parameters=parameters, trial=trial, max_grad_norm=args.max_grad_norm)""",
    }


def _batch_parts(program: Program | PipelineProgram) -> dict[str, str]:
    """Return the parts of the template for the batch."""
    programs = program.programs if isinstance(program, PipelineProgram) else (program,)
    if all("float" in spec.dtype for one in programs for spec in one.inputs.values()):
        parts = _FLOAT_BATCHES
    else:
        batches = _TOKEN_BATCHES["batches"].format(vocabulary=program.any.vocabulary)
        parts = {**_TOKEN_BATCHES, "batches": batches}
    return {**parts, "data_note": textwrap.fill(parts["data_note"], COLUMNS)}


def emit_main(
    program: Program | PipelineProgram, optimizer: MainOptimizer | None = None, nodes: Nodes | None = None
) -> str:
    """The text of main.py. optimizer: AdamW by default. nodes: where its ranks run, one machine by default."""
    optimizer = optimizer or MainOptimizer()
    nodes = nodes or single_node(program.num_ranks)
    is_alone = program.num_ranks == 1
    launch = "python main.py" if is_alone else usage(nodes, "main.py")
    how = usage(nodes, "main.py --steps 10") if not is_alone else "python main.py --steps 10"
    is_fused = program.any.has_fused_update and optimizer.is_default
    return _TEMPLATE.format(
        usage=f":  {how}" if nodes.num_nodes == 1 else f",\n{how}",
        launch=quoted(launch),
        device="0" if is_alone else 'int(os.environ["LOCAL_RANK"])',
        join=_ALONE if is_alone else _JOIN,
        wait_option="" if is_alone else _WAIT_OPTION,
        name=plain(program.name),
        mesh_text=plain(program.mesh_text),
        ranks=program.num_ranks,
        batch=program.any.global_batch_size,
        **_batch_parts(program),
        **_optimizer_parts(optimizer, is_fused),
    )
