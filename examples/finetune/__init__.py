"""A fine-tuning script on one process (`plain.py`) and on many (`parallel.py`)."""
