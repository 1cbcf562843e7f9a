"""Turns a `Program` into readable Python source, and has the kernels and the run time that the source uses.

A leaf library: it imports torch (and Triton where installed), never `autopar`, `search` or `cost_models`.
"""
