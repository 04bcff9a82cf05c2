"""kill -9 of driver, trainer and depot at random moments, and what resumes."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_processes import AGENTS, AGENTS_GONE_S, Places, Watch, titled, watched
from chaos_runs import LIMIT_S, Started, checkpoint_faults, differences, last_step, ledger_faults, log_faults, reaches
from tba import checkpoint

SYNC = 8
WORDS = [f"trainer.sync_every={SYNC}", "checkpoint.every=16", "evaluation.every=0", "evaluation.prompts=4",
         "evaluation.samples=4", "buffer.capacity=2000", "trainer.record_every=0", "async.threads=1"]
TITLES = {"trainer": "ray::TrainerProcess", "depot": "ray::DepotProcess"}
EARLY = 0.15
"""Share of the moments that may come before a first step."""
EARLY_S = 8.0
PER_RUN = 4
"""Kills of one run, before it is left to end."""
GONE_S = 30.0
"""Seconds in which the rest of a killed run has to be gone."""


@dataclass(slots=True)
class Kills:
    """What came of the kills of one mode."""

    mode: str
    steps: int
    rng: random.Random
    places: Places
    folder: Path
    moments: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    faults: list[str] = field(default_factory=list[str])
    runs: int = 0
    is_warm: bool = False
    """Whether processes are copies of this one: see `Forked`."""
    compared: int = 0
    """Runs compared with one that nothing interrupted."""

    def begin(self, run: Path) -> Started:
        """A new run."""
        words = ["train", "enumerable", f"mode={self.mode}", f"trainer.steps={self.steps}", *WORDS]
        return self._start([*words, "--run", str(run), "--json"], run)

    def resume(self, run: Path) -> Started:
        """The run, going on."""
        return self._start(["resume", str(run), "--json"], run)

    def _start(self, words: list[str], run: Path) -> Started:
        said = self.folder / f"{run.name}-said-{len(self.moments)}-{time.monotonic_ns()}"
        return Started(words, said, self.places.environment, is_forked=self.is_warm)


def strike(kills: Kills, started: Started, run: Path, who: str) -> dict[str, Any] | None:
    """Kills `who` of a run at a random moment; what was met, or None if the run was over before."""
    rng = kills.rng
    if rng.random() < EARLY:
        time.sleep(rng.uniform(0.0, EARLY_S))
    else:
        logged = last_step(run)  # also those after the checkpoint, which the run is about to repeat
        goal = min(kills.steps - 1, logged + rng.randint(1, 2 * kills.steps // (PER_RUN + 1)))
        if not reaches(started, run, goal):
            return None
        time.sleep(rng.uniform(0.0, 0.4))
    victims = [started.pid] if who == "driver" else titled(started.pid, TITLES[who])
    if not victims and not started.is_over:  # it is not up yet, so that its driver is hit instead
        who, victims = "driver", [started.pid]
    if started.is_over:
        return None
    at = last_step(run)
    os.kill(victims[0], signal.SIGKILL)
    return {"who": who, "at": at, "killed": time.monotonic()}


def aftermath(kills: Kills, started: Started, run: Path, met: dict[str, Any], watch: Watch) -> None:
    """How the rest of a run ended whose part was killed."""
    code = started.wait(LIMIT_S)
    met["ended_s"] = time.monotonic() - met.pop("killed")
    where = f"{run.name}, {met['who']} killed at step {met['at']}"
    if met["who"] != "driver":
        if code == 0:
            met["was_late"] = True  # the run had no more use for it
        elif code != 1 or "tba resume" not in started.errors:
            kills.faults.append(f"{where}: exit {code}, and it says {started.errors[-300:]!r}")
    if left := watch.left_after(GONE_S, but=AGENTS) or watch.left_after(AGENTS_GONE_S):
        kills.faults.append(f"{where}: these still run: {left}")
    kills.faults += [f"{where}: {fault}" for fault in checkpoint_faults(run)] if run.exists() else []


def one_run(kills: Kills, moments: int, whole: Path | None) -> None:
    """A run that is killed up to `PER_RUN` times, resumed each time, and ends."""
    run = kills.folder / f"{kills.mode}-{kills.runs}"
    kills.runs += 1
    started, struck = kills.begin(run), 0
    while struck < PER_RUN and len(kills.moments) < moments:
        who = "driver" if kills.mode == "lockstep" else ("driver", "trainer", "depot")[len(kills.moments) % 3]
        with watched() as watch:
            met = strike(kills, started, run, who)
            if met is None:
                break
            aftermath(kills, started, run, met, watch)
        struck += 1
        has_checkpoint = run.exists() and bool(checkpoint.complete(run))
        met["resumes_from"] = checkpoint.complete(run)[-1][0] if has_checkpoint else None
        kills.moments.append({"run": run.name, **met})
        print(f"{kills.mode} {len(kills.moments)}/{moments}: {met}", file=sys.stderr, flush=True)
        started = go_on(kills, run, has_checkpoint)
    code = started.wait(LIMIT_S)
    if code != 0:
        kills.faults.append(f"{run.name}: ended with {code}: {started.errors[-400:]!r}")
        return
    kills.faults += [f"{run.name}: {fault}" for fault in (
        *ledger_faults(started.summary()["ledger"]), *log_faults(run, kills.steps), *checkpoint_faults(run))]
    if whole is not None:
        kills.compared += 1
        kills.faults += [f"{run.name} differs from a run that was not killed in {what}"
                         for what in differences(run, whole)]


def go_on(kills: Kills, run: Path, has_checkpoint: bool) -> Started:
    """The run, resumed; or begun again, if `tba resume` says with exit 2 that there is nothing to resume from."""
    started = kills.resume(run)
    if has_checkpoint:
        return started
    code = started.wait(LIMIT_S)
    if code != 2 or not ("no complete checkpoint" in started.errors or "no run directory" in started.errors):
        kills.faults.append(f"{run.name}: resume without a checkpoint: exit {code}, {started.errors[-300:]!r}")
    shutil.rmtree(run, ignore_errors=True)
    return kills.begin(run)


def measure(
    mode: str, moments: int, *, seed: int, steps: int, folder: Path, is_warm: bool, most_minutes: float
) -> dict[str, Any]:
    """`moments` kills in runs of `steps` steps, or as many as `most_minutes` allow, and every fault that was found."""
    if is_warm:
        for name in ("torch", "transformers", "tba.run", "tba.policy", "tba.progress"):
            importlib.import_module(name)
    places = Places()
    kills = Kills(mode=mode, steps=steps, rng=random.Random(f"kills {mode} {seed}"), places=places, folder=folder,
                  is_warm=is_warm)
    started = time.monotonic()
    whole = None
    try:
        if mode == "lockstep":
            whole = folder / "whole"
            code = kills.begin(whole).wait()
            assert code == 0, f"the run that nothing interrupts ended with {code}"
        while len(kills.moments) < moments and time.monotonic() < started + 60 * most_minutes:
            one_run(kills, moments, whole)
        left = places.left()
    finally:
        places.remove()
    if left:
        kills.faults.append(f"files are left after the last run: {left}")
    by = {who: sum(met["who"] == who for met in kills.moments) for who in ("driver", "trainer", "depot")}
    return {
        "part": f"kills {mode}", "moments": len(kills.moments), "runs": kills.runs, "by": by, "seed": seed,
        "steps": steps, "is_warm": is_warm,
        "without_checkpoint": sum(met["resumes_from"] is None for met in kills.moments), "compared": kills.compared,
        "slowest_end_s": max((met["ended_s"] for met in kills.moments), default=0.0),
        "minutes": (time.monotonic() - started) / 60,
        "faults": kills.faults, "holds": not kills.faults, "met": kills.moments,
    }
