"""Prove a plan without its cluster: run its parts small on this machine and check the program against the plan.

operators.py       every (operator, option) of the plan on real tensors
reshards.py        every reshard, as emitted
edges.py           the typed program, edge by edge
decisions.py       the program against the plan
messages.py        tensors that cross between stages
schedules.py       the schedule, action by action
miniature.py       the model's class, small, trained
certify.py         all checks, in order
certificate.py     the result, as value and file

shrunken_call.py shrinks one call, which autopar/proofs runs. miniature_run.py trains one miniature: its meshes come
from cuts.py, its model from miniature_config.py, its plan from miniature_plan.py.
"""

from autopar.certify.certificate import Certificate
from autopar.certify.certify import certify_program

__all__ = ["Certificate", "certify_program"]
