"""Proof of a plan without its cluster: what it uses, run small on this machine, and what that shows.

small.py       a call as it is, but small              operators.py   every (operator, option) of the plan
reshards.py    every reshard, as emitted               edges.py       the typed program, edge by edge
schedules.py   the schedule, action by action          miniature.py   the model's class, small, trained
certify.py     all of it, in order                     certificate.py what was found, as value and file
"""

from autopar.certify.certificate import Certificate
from autopar.certify.certify import certify_program

__all__ = ["Certificate", "certify_program"]
