"""From a `Program` to readable Python source, and the kernels and runtime that source uses.

A leaf library: it imports torch (and Triton where installed), never `autopar`, `search` or `cost_models`.
"""
