"""A fine-tuning script with transformers' Trainer: a schedule, clipping, groups without decay, evaluation, checkpoints.

    python -m examples.hf_trainer FOLDER --out runs/tuned
    torchrun --standalone --nproc-per-node 4 -m examples.hf_trainer_parallel FOLDER --out runs/tuned

FOLDER is a folder of `save_pretrained`. `hf_trainer_parallel.py` adds one line and its import.
The losses are the same.
"""

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from examples.finetune.data import arguments, windows_of_text


def main():
    given = arguments()
    model = AutoModelForCausalLM.from_pretrained(given.folder)
    training, held_out = windows_of_text(given.length)
    settings = TrainingArguments(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=1,
        logging_first_step=True,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=settings, train_dataset=training, eval_dataset=held_out)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
