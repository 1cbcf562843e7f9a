"""A campaign of faults and bad inputs: each case is right, refused in one readable error, or a defect.

Each module of this folder is a kind of fault and has `cases(count, seed)`, which yields `Case`s; `python -m
benchmarks.faults` runs the kinds that it is given, all by default, and prints one table. A case that does not end is a
hang, and files and processes that stay behind are leftovers.
"""
