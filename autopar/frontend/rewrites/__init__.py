"""Rewrites of the traced graph: operators and runs of calls as calls that have rules."""
