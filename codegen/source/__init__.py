"""A program as text: statements, modules, `main.py`, and the files of a pipeline."""
