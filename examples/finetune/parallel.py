"""Fine-tune a Hugging Face model under torchrun: `plain.py` with eight lines changed.

    torchrun --standalone --nproc-per-node 4 -m examples.finetune.parallel FOLDER --out tuned

Losses and folder are those of `plain.py`.
"""

from itertools import islice

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

import autopar
from examples.finetune.data import arguments, windows_of_text


def make_optimizer(named_parameters):
    named = list(named_parameters)
    decayed = [p for name, p in named if p.ndim > 1]
    still = [p for name, p in named if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def main():
    given = arguments()
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32)
    training, held_out = windows_of_text(given.length)
    generator = torch.Generator().manual_seed(0)
    batches = DataLoader(training, batch_size=8, shuffle=True, generator=generator, drop_last=True)
    evaluation = DataLoader(held_out, batch_size=8)

    example = next(iter(evaluation))
    program = autopar.compile(model, given.cluster, example_inputs=example, optimizer=make_optimizer)
    step = program.build(max_grad_norm=1.0)
    schedule = get_cosine_schedule_with_warmup(step.optimizer, 5, given.steps)
    for number, batch in enumerate(islice(batches, given.steps), 1):
        loss = step(step.local_batch(batch))
        schedule.step()
        print(f"step {number} loss {loss.item():.6f}")
        if number % 10 == 0:
            losses = [step.evaluate(step.local_batch(batch)).item() for batch in evaluation]
            print(f"step {number} evaluation {sum(losses) / len(losses):.6f}")
    program.save_pretrained(step, given.out)


if __name__ == "__main__":
    main()
