"""Answers of torch and Python to a forward while it is traced: one module per subject."""
