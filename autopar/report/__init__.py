"""The report: what a plan does with a model, in words, and what it is predicted to cost."""

from autopar.report.terminal import render_report, report_panels

__all__ = ["render_report", "report_panels"]
