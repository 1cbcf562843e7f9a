"""The run time of generated programs: collectives with gradients, ZeRO units, the training step, checkpoints.

This folder is copied beside a generated program, so its modules import torch and one another, nothing else.
Read `mesh.py` and `reshard.py` first: they are all the communication that a generated forward shows.
"""
