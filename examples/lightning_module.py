"""A training script with Lightning: a LightningModule with a schedule, clipping, validation and checkpoints.

    python -m examples.lightning_module FOLDER --out runs/tuned
    torchrun --standalone --nproc-per-node 4 -m examples.lightning_module_parallel FOLDER --out runs/tuned

FOLDER is a folder of `save_pretrained`. `lightning_module_parallel.py` adds the strategy and its import.
The losses are the same.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from examples.finetune.data import arguments, windows_of_text


class LanguageModel(LightningModule):
    def __init__(self, model, steps):
        super().__init__()
        self.model, self.steps = model, steps

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("held_out", self.model(**batch).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        schedule = get_cosine_schedule_with_warmup(optimizer, 3, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    given = arguments()
    torch.manual_seed(0)
    module = LanguageModel(AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32), given.steps)
    training, held_out = windows_of_text(given.length)
    trainer = Trainer(
        max_steps=given.steps,
        gradient_clip_val=1.0,
        val_check_interval=5,
        log_every_n_steps=1,
        logger=CSVLogger(given.out),
        enable_progress_bar=False,
    )
    batches = DataLoader(training, batch_size=8, shuffle=True, drop_last=True)
    trainer.fit(module, batches, DataLoader(held_out, batch_size=8))


if __name__ == "__main__":
    main()
