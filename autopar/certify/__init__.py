"""Proof of a plan without its cluster: what it uses, run small on this machine, and what that shows.

small.py       a call as it is, but small              operators.py   every (operator, option) of the plan
reshards.py    every reshard, as emitted               decisions.py   the program against the plan
edges.py       the typed program, edge by edge         messages.py    what crosses between stages
schedules.py   the schedule, action by action          miniature.py   the model's class, small, trained
certify.py     all of it, in order                     certificate.py what was found, as value and file

A miniature is made in small_job.py: its meshes by cuts.py, its model by small_config.py, its optimizer by
small_optimizer.py, its plan by small_plan.py, for which counterparts.py finds the plan's calls. rounded.py judges one
that rounds as the plan does.
"""

from autopar.certify.certificate import Certificate
from autopar.certify.certify import certify_program

__all__ = ["Certificate", "certify_program"]
