"""Small single-GPU models and a text corpus. Nothing here knows of autopar, processes or devices."""
