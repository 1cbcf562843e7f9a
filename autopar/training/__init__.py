"""The training loop behind `Trainer`: configuration, batches, steps, checkpoints, progress."""
