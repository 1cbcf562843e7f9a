"""Proof of a plan without its cluster: what it uses, run small on this machine, and what that shows.

`certify_program(program)` gives a `Certificate`.
"""
