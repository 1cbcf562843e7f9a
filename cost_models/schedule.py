"""Pipeline schedules: which rank runs what in which order, and how long it takes.

    SCHEDULES                    a record of each schedule, by name                        schedules/generate.py
    make_schedule(...)           the actions of each pipeline rank, for a schedule by name      schedules/generate.py
    schedule_text                the same as text, for a generated program's schedule.txt  schedules/actions.py
    simulate(...)                event by event, with unequal stages and transfers         schedules/timeline.py
    chrome_trace(timeline)       for chrome://tracing and Perfetto                         schedules/timeline.py

A pipeline rank is the group of ranks that runs one stage, or several (chunks). Stages are numbered in model order.
"""

from cost_models.schedules.actions import Action, Kind, Lines, StageTimes, schedule_text
from cost_models.schedules.generate import PLAIN, SCHEDULES, make_schedule, num_chunks, placement, schedule_named
from cost_models.schedules.record import ClosedForm, Schedule
from cost_models.schedules.sweep import Edges, Shape
from cost_models.schedules.timeline import Event, Timeline, chrome_trace, simulate

__all__ = [
    "PLAIN",
    "SCHEDULES",
    "Action",
    "ClosedForm",
    "Edges",
    "Event",
    "Kind",
    "Lines",
    "Schedule",
    "Shape",
    "StageTimes",
    "Timeline",
    "chrome_trace",
    "num_chunks",
    "make_schedule",
    "schedule_named",
    "schedule_text",
    "placement",
    "simulate",
]
