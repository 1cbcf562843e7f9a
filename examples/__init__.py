"""Small single-GPU models and a text corpus. They import no autopar and no torch.distributed."""
