"""Pipeline schedules: who runs what in which order, whether that can run, and how long and in how many bytes it does.

    make_schedule(...)the actions of each pipeline rank, for a schedule by name      schedules/generate.py
    schedule_text, parse_schedule the same as text, for a generated program's schedule.txt  schedules/actions.py
    check(schedule)raises unless they can be executed to the end             schedules/check.py
    simulate(schedule, times)event by event, with unequal stages and transfers         schedules/timeline.py
    ideal_seconds, in_flight     closed forms                                              schedules/closed_form.py
    chrome_trace(timeline)       for chrome://tracing and Perfetto                         schedules/timeline.py

A pipeline rank is the group of ranks that runs one stage, or several (chunks). Stages are numbered in model order.
"""

from cost_models.schedules.actions import Action, Kind, Schedule, parse_schedule, schedule_text
from cost_models.schedules.check import check
from cost_models.schedules.closed_form import ideal_seconds, in_flight
from cost_models.schedules.generate import SCHEDULES, make_schedule, num_chunks, placement
from cost_models.schedules.stage_times import StageTimes
from cost_models.schedules.sweep import Edges, Shape
from cost_models.schedules.timeline import Event, Timeline, chrome_trace, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Edges",
    "Event",
    "Kind",
    "Schedule",
    "Shape",
    "StageTimes",
    "Timeline",
    "check",
    "chrome_trace",
    "ideal_seconds",
    "in_flight",
    "num_chunks",
    "make_schedule",
    "schedule_text",
    "parse_schedule",
    "placement",
    "simulate",
]
