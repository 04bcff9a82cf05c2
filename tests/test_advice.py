"""Where the time went, and what to turn."""

from __future__ import annotations

from typing import Any

import pytest

from makers import settings_with
from tba.advice import Times, advice, times_of

SUMMARY: dict[str, Any] = {
    "trainer": {"step_s": 6.0, "wait_s": 3.0, "draw_s": 1.0, "publish_s": 1.0, "checkpoint_s": 50.0, "wait_share": 0.4},
    "searchers": {"searcher-0": {"sampling_s": 3.0, "idle_s": 1.0},
                  "searcher-1": {"sampling_s": 1.0, "scoring_s": 5.0}},
}


def test_shares_are_of_each_sides_own_time():
    times = times_of(SUMMARY)
    assert times.trainer == {"training": 0.6, "drawing": 0.1, "publishing": 0.1, "idle": 0.2}
    assert times.searchers == {"sampling": 0.4, "idle": 0.1, "scoring": 0.5}


def test_nothing_measured_is_no_time():
    times = times_of({"trainer": dict.fromkeys(SUMMARY["trainer"], 0.0), "searchers": {}})
    assert times == Times(trainer={}, searchers={})
    assert advice(times, settings_with(mode="async")) == ""


def said(*, lead: int | None = None, **parts: float) -> str:
    trainer = {"training": 0.0, "drawing": 0.0, "publishing": 0.0, "idle": 0.0}
    trainer |= {name: value for name, value in parts.items() if name in ("publishing", "drawing")}
    trainer["idle"] = parts.get("trainer_idle", 0.0)
    trainer["training"] = 1 - sum(trainer.values())
    searchers = {name: value for name, value in parts.items() if name in ("sampling", "scoring", "loading")}
    searchers["idle"] = parts.get("searchers_idle", 0.0)
    sizes = {"sync_every": 6, "steps": 12}
    settings = settings_with(mode="async", async_={"lead": lead}, buffer={"reuse": 1.5}, trainer=sizes)
    return advice(Times(trainer=trainer, searchers=searchers), settings)


@pytest.mark.parametrize(("parts", "line"), [
    ({"trainer_idle": 0.61, "sampling": 0.9, "scoring": 0.1},
     "trainer idle 61%: add searchers (90% of their time is sampling) or raise buffer.reuse, now 1.5."),
    ({"trainer_idle": 0.2, "searchers_idle": 0.4, "sampling": 0.6, "lead": 0},
     "trainer idle 20% and searchers idle 40%, each waiting for the other: raise async.lead, now 0."),
    ({"trainer_idle": 0.05, "publishing": 0.04, "sampling": 1.0},
     "publishing takes 4% of the trainer's time: raise trainer.sync_every, now 6."),
    ({"trainer_idle": 0.05, "loading": 0.3, "sampling": 0.7}, "searchers spend 30% of their time on taking weights in"),
    ({"trainer_idle": 0.01, "searchers_idle": 0.5, "sampling": 0.5}, "searchers idle 50%, since the trainer is"),
    ({"trainer_idle": 0.01, "scoring": 0.7, "sampling": 0.3}, "scoring takes 70% of the searchers' time"),
    ({"trainer_idle": 0.02, "searchers_idle": 0.1, "sampling": 0.9}, "balanced: trainer idle 2%, searchers idle 10%."),
])
def test_the_first_thing_that_holds_a_run_up_is_said_with_its_setting(parts: dict[str, Any], line: str):
    assert said(**parts).startswith(line)


def test_lockstep_has_nothing_to_balance():
    assert advice(times_of(SUMMARY), settings_with(mode="lockstep")) == ""
