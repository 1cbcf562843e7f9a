"""`autopar report`: report a plan file, or the plan for a model."""

from __future__ import annotations

from autopar.cli.options import (
    Flags,
    Force,
    GivenCluster,
    GivenModel,
    Json,
    Log,
    Page,
    Source,
    Timeline,
    is_plan_file,
    program_of_source,
    require_outputs,
)
from autopar.cli.output import print_json, print_report, say, show, write_page, write_timeline
from autopar.errors import ConstraintError
from autopar.page.run_log import read_log
from autopar.plan import Plan
from autopar.report.json_facts import plan_json
from autopar.report.terminal import plan_summary


def report(
    source: Source,
    flags: Flags,
    model: GivenModel = None,
    cluster: GivenCluster = None,
    timeline: Timeline = None,
    html: Page = None,
    log: Log = None,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Report a plan file, or the plan for a model: the sharding of every layer, and the predicted time and memory."""
    require_outputs(None, [timeline, html], force)
    flags.plan_options()  # refuse a wrong flag even where it changes nothing
    if log is not None:
        _require_log(log, html)
    if is_plan_file(source) and model is None and timeline is None and html is None:
        saved = Plan.from_file(source)
        if as_json:
            print_json(plan_json(saved))
            return
        show(*plan_summary(saved))
        say(f"\n`autopar report {source} --model MODEL` reports every layer and predicts the plan again.")
        return
    compiled = program_of_source(source, model, cluster, flags)
    print_report(compiled, as_json)
    write_timeline(compiled, timeline, force)
    write_page(compiled, html, log, force)


def _require_log(log: str, html: str | None) -> None:
    """Raise ConstraintError for a log without a page, and OutputError for a file that is no log."""
    if html is None:
        raise ConstraintError("--log needs a page", values=f"--log {log}", alternatives=f"--log {log} --html FILE")
    read_log(log)
