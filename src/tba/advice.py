"""Where the time of a run went, and what to turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tba import metrics as m
from tba.settings import Settings

IDLE_TRAINER = 0.1
"""Share of its time that a trainer may wait without advice."""
IDLE_SEARCHERS = 0.3
"""The same of searchers, on average."""
PUBLISHING = 0.03
"""Share of the trainer's time for copies of the weights without advice."""
LOADING = 0.2
"""Share of the searchers' time for taking weights in without advice."""
SCORING = 0.5
"""Share of the searchers' time for scoring without advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The time of each side, in seconds or in shares of it, by part of its work; empty where nothing was measured."""

    trainer: Mapping[str, float]
    """training (forward, backward and optimizer), drawing (waiting for a batch in the making), publishing, idle."""
    searchers: Mapping[str, float]
    """sampling, scoring, reference (its log-probs), loading (weights), idle; over all searchers."""


def spent_in(step: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the trainer's time before and in a step, by the names that a summary's `trainer` has for their sums.

    Drawing is the part of the wait in which the batch was in the making.
    """
    return {
        "wait_s": step[m.WAIT_SECONDS],
        "draw_s": min(step[m.WAIT_SECONDS], step[m.DRAW_SECONDS] + step[m.COLLATE_SECONDS]),
        "publish_s": step.get(m.PUBLISH_SECONDS, 0.0), "step_s": step[m.STEP_SECONDS],
    }


def times_of(summary: Mapping[str, Any]) -> Times:
    """The shares in a run's summary."""
    spent = seconds_of(summary)
    return Times(trainer=_shares(spent.trainer), searchers=_shares(spent.searchers))


def seconds_of(summary: Mapping[str, Any]) -> Times:
    """The seconds in a run's summary."""
    spent = summary["trainer"]
    drawing = spent.get("draw_s", 0.0)
    trainer = {
        "training": spent["step_s"], "drawing": drawing, "publishing": spent["publish_s"],
        "idle": max(0.0, spent["wait_s"] - drawing),
    }
    searchers: dict[str, float] = {}
    for parts in summary["searchers"].values():
        for part, seconds in parts.items():
            name = part.removesuffix("_s")
            searchers[name] = searchers.get(name, 0.0) + seconds
    return Times(trainer=trainer, searchers=searchers)


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {name: part / total for name, part in seconds.items()} if total > 0 else {}


def advice(times: Times, settings: Settings) -> str:
    """One line: the first thing that holds the run up, and the settings that change it."""
    trainer, searchers = times.trainer, times.searchers
    if settings.mode == "lockstep" or not trainer:
        return ""
    idle, waiting = trainer["idle"], searchers.get("idle", 0.0)
    if idle > IDLE_TRAINER and waiting > IDLE_SEARCHERS and settings.lead is not None:
        return (f"trainer idle {idle:.0%} and searchers idle {waiting:.0%}, each waiting for the other: raise "
                f"async.lead, now {settings.lead}.")
    if idle > IDLE_TRAINER:
        busiest = max((part for part in searchers if part != "idle"), key=lambda part: searchers[part], default="")
        most = f" ({searchers[busiest]:.0%} of their time is {busiest})" if busiest else ""
        return f"trainer idle {idle:.0%}: add searchers{most} or raise buffer.reuse, now {settings.buffer.reuse:g}."
    if trainer["publishing"] > PUBLISHING:
        return (f"publishing takes {trainer['publishing']:.0%} of the trainer's time: raise trainer.sync_every, now "
                f"{settings.trainer.sync_every}.")
    if searchers.get("loading", 0.0) > LOADING:
        return (f"searchers spend {searchers['loading']:.0%} of their time on taking weights in: raise "
                f"trainer.sync_every, now {settings.trainer.sync_every}, or search.batch_prompts, now "
                f"{settings.search.batch_prompts}.")
    if waiting > IDLE_SEARCHERS:
        return (f"searchers idle {waiting:.0%}, since the trainer is the slower side: take fewer searchers, or lower "
                f"buffer.reuse, now {settings.buffer.reuse:g}, to train on fresher data.")
    if searchers.get("scoring", 0.0) > SCORING:
        return (f"scoring takes {searchers['scoring']:.0%} of the searchers' time: make the reward faster, have more "
                f"prompts scored at once (search.scorers, now {settings.search.scorers}), or add searchers.")
    return f"balanced: trainer idle {idle:.0%}, searchers idle {waiting:.0%}."
