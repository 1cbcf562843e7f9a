"""Fine-tune a Hugging Face model on one process: a schedule, clipping, evaluation, groups without decay.

    python -m examples.finetune.plain FOLDER --out tuned

FOLDER is a folder of `save_pretrained`. `parallel.py` is the same script on any number of processes.
"""

from itertools import islice

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

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

    optimizer = make_optimizer(model.named_parameters())
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, given.steps)
    model.train()
    for number, batch in enumerate(islice(batches, given.steps), 1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {number} loss {loss.item():.6f}")
        if number % 10 == 0:
            model.eval()
            with torch.no_grad():
                losses = [model(**batch).loss.item() for batch in evaluation]
            model.train()
            print(f"step {number} evaluation {sum(losses) / len(losses):.6f}")
    model.save_pretrained(given.out)


if __name__ == "__main__":
    main()
