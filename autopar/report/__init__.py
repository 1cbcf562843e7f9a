"""The report: a plan's decisions for a model in words, and its predicted costs."""

from autopar.report.terminal import render_report, report_panels

__all__ = ["render_report", "report_panels"]
