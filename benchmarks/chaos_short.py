"""Many short runs in a row: how soon each ends after its last step, and what they leave."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

from chaos_processes import Places, watched
from chaos_runs import LIMIT_S, LOOK_S, Started, ledger_faults, reaches

STEPS = 16
WORDS = [f"trainer.steps={STEPS}", "trainer.sync_every=8", "evaluation.every=0", "evaluation.prompts=2",
         "evaluation.samples=2", "mode=async", "async.threads=1"]
EXIT_LIMIT_S = 10.0
GONE_S = 5.0
"""Seconds after a run's end in which its last processes have to be gone."""
INTERRUPTED = 5
"""Every so-manieth run has no end, and is stopped by Ctrl-C."""


def one_run(number: int, places: Places, folder: Path) -> dict[str, Any]:
    """One run: seconds from the last step to the exit, and what is wrong with it."""
    run, is_stopped = folder / f"run-{number}", number % INTERRUPTED == INTERRUPTED - 1
    more = ["trainer.steps=80000"] if is_stopped else []
    begun = time.monotonic()
    with watched() as watch:
        started = Started(["train", "enumerable", *WORDS, *more, "--run", str(run), "--json"],
                          folder / f"said-{number}", places.environment)
        has_come = reaches(started, run, STEPS)
        if is_stopped:
            started.process.send_signal(signal.SIGINT)
        last = time.monotonic()
        while not started.is_over and time.monotonic() < last + LIMIT_S:
            time.sleep(LOOK_S)
        exit_s, code = time.monotonic() - last, started.wait(1)
        faults = [] if has_come and code == (130 if is_stopped else 0) else [f"exit {code}: {started.errors[-300:]!r}"]
        faults += [f"these run: {left}" for left in [watch.left_after(GONE_S)] if left]
        faults += list(ledger_faults(started.summary()["ledger"])) if not faults else []
    faults += [f"left: {path}" for path in places.left()]
    if exit_s > EXIT_LIMIT_S:
        faults.append(f"exit {exit_s:.1f} s after the last step")
    return {
        "run": number, "exit_s": exit_s, "wall_s": last + exit_s - begun, "is_stopped": is_stopped, "faults": faults,
    }


def measure(runs: int, *, folder: Path) -> dict[str, Any]:
    """`runs` short runs in a row."""
    places, found = Places(), []
    try:
        for number in range(runs):
            found.append(one_run(number, places, folder))
            print(f"short {number + 1}/{runs}: {found[-1]}", file=sys.stderr, flush=True)
    finally:
        places.remove()
    exits = sorted(one["exit_s"] for one in found)
    faults = [f"run {one['run']}: {fault}" for one in found for fault in one["faults"]]
    return {
        "part": "short", "runs": runs, "stopped": sum(one["is_stopped"] for one in found),
        "exit_median_s": exits[len(exits) // 2], "exit_most_s": exits[-1], "faults": faults, "holds": not faults,
        "minutes": sum(one["wall_s"] for one in found) / 60, "met": found,
    }
