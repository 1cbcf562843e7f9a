"""A campaign of faults and bad inputs: what is tried is right, refused in one readable error, or a defect.

Each module of this folder is a kind of fault and has `cases(count, seed)`, which yields `Case`s; `python -m
benchmarks.faults` runs the kinds that it is given, all by default, within a bounded time.
"""
