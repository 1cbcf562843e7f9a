"""Gradient accumulation: what the micro-batches of a step must do so that they add up to the whole batch."""
