"""`accelerate_loop.py` under torchrun, with one line and its import added.

torchrun --standalone --nproc-per-node 4 -m examples.accelerate_loop_parallel FOLDER --out runs/tuned
"""

from itertools import islice

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

import autopar.frameworks.accelerate
from examples.finetune.data import arguments, windows_of_text


def main():
    given = arguments()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    accelerator = autopar.frameworks.accelerate.parallelize(accelerator, given.cluster)
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    still = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 3, given.steps)
    training, held_out = windows_of_text(given.length)
    torch.manual_seed(0)
    batches = DataLoader(training, batch_size=8, shuffle=True, drop_last=True)
    evaluation = DataLoader(held_out, batch_size=8)

    prepared = accelerator.prepare(model, optimizer, batches, evaluation, scheduler)
    model, optimizer, batches, evaluation, scheduler = prepared
    for number, batch in enumerate(islice(batches, given.steps), 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {number} loss {loss.item():.6f} norm {norm.item():.6f}")
        if number % 5 == 0:
            model.eval()
            with torch.no_grad():
                losses = [accelerator.gather_for_metrics(model(**batch).loss).item() for batch in evaluation]
            model.train()
            accelerator.print(f"step {number} evaluation {sum(losses) / len(losses):.6f}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(given.out, is_main_process=accelerator.is_main_process)


if __name__ == "__main__":
    main()
