"""Runs as subprocesses, and what must hold of the files that they leave."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tba import checkpoint
from tba import metrics as m
from tba.cli import main

LIMIT_S = 900.0
"""Seconds in which a run has to come to its next step, or to its end: this machine may be busy with other things."""
LOOK_S = 0.02
OF_A_CLOCK = {m.WALL, m.WAIT_SECONDS, m.STEP_SECONDS, m.COLLATE_SECONDS, m.DRAW_SECONDS, m.PUBLISH_SECONDS,
              m.RESCORE_SECONDS, m.RECORD_SECONDS, m.ATTEMPT}
"""Metrics in which an interrupted run may differ from one that was not."""


class Forked:
    """A command of `tba` in a copy of this process, which has imported what takes long: as `Popen`, as far as needed.

    A kill -9 is a kill -9; what it spares is the start of the interpreter and the libraries' import.
    """

    def __init__(self, words: Sequence[str], out: TextIO, err: TextIO, environment: Mapping[str, str]) -> None:
        """Only where this process has no other thread."""
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(environment)
            code = main(list(words))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """Its exit code, negative if a signal ended it; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, limit_s: float) -> int:
        """Its exit code, waited for."""
        deadline = time.monotonic() + limit_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended in {limit_s:g} s.")
            time.sleep(LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)


class Started:
    """A command of `tba` under way; what it says goes to files, so that it never waits for a reader."""

    def __init__(
        self, words: Sequence[str], said: Path, environment: Mapping[str, str], *, is_forked: bool = False
    ) -> None:
        """`said` is the stem of the files; `is_forked`: see `Forked`."""
        self.said = said
        self._out, self._err = (said.with_suffix(end).open("w+") for end in (".out", ".err"))
        self.process: Forked | subprocess.Popen[bytes] = (
            Forked(words, self._out, self._err, environment) if is_forked else subprocess.Popen(
                [sys.executable, "-m", "tba", *words], stdout=self._out, stderr=self._err, env=dict(environment)
            )
        )
        self.pid = self.process.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(limit_s)
        finally:
            self._out.close()
            self._err.close()

    @property
    def errors(self) -> str:
        """What it said on stderr."""
        return self.said.with_suffix(".err").read_text(errors="replace")

    def summary(self) -> dict[str, Any]:
        """The JSON object in the last line of its stdout."""
        lines = self.said.with_suffix(".out").read_text().splitlines()
        return json.loads(lines[-1]) if lines else {}


def lines_of(run: Path) -> list[dict[str, Any]]:
    """What was logged, without a last line that is not whole."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """What was logged of steps."""
    return [line for line in lines_of(run) if m.STEP in line]


def last_step(run: Path) -> int:
    """The step logged last, read from the end of the log; 0 if there is none."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return 0
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - 20_000))
        for line in reversed(log.read().split(b"\n")[:-1]):
            if line.startswith(b"{") and (found := json.loads(line).get(m.STEP)):
                return int(found)
    return 0


def reaches(started: Started, run: Path, step: int, limit_s: float = LIMIT_S) -> bool:
    """Whether a run has logged `step` before it ended.

    Raises:
        TimeoutError: neither has come about within the limit.
    """
    deadline = time.monotonic() + limit_s
    while last_step(run) < step:
        if started.is_over:
            return last_step(run) >= step
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run} has not come to step {step} in {limit_s:g} s; it is at {last_step(run)}.")
        time.sleep(LOOK_S)
    return True


# ---- what must hold ---------------------------------------------------------------------------------


def ledger_faults(ledger: Mapping[str, Any]) -> Iterator[str]:
    """Where a ledger does not add up."""
    for unit in ("trajectories", "tokens"):
        account = ledger[unit]
        out = sum(account["evicted"].values()) + sum(account["rejected"].values())
        if account["delivered"] != account["in_buffer"] + out:
            yield f"{unit}: delivered {account['delivered']} is not {account['in_buffer']} in the buffer + {out}"
    prompts = ledger["prompts"]
    if prompts["leased"] != prompts["delivered"] + prompts["open"] + prompts["lost"]:
        yield f"prompts: {prompts} do not add up"


def prompt_faults(state: Mapping[str, Any]) -> Iterator[str]:
    """Which prompts of the order are lost, by the leases of a checkpoint.

    A number below `next` was handed out; its prompt is delivered (once: that closes its lease), or under a lease that
    is open, or waits to be leased again.
    """
    out = [number for number, _ in (*state["open"], *state["again"])]
    if len(set(out)) != len(out) or any(number >= state["next"] for number in out):
        yield f"open and waiting prompts {sorted(out)} are not distinct numbers below {state['next']}"
    if state["next"] != state["delivered"] + len(out):
        yield (f"{state['next']} prompts of the order were handed out, and {state['delivered']} are delivered, "
               f"{len(state['open'])} open, {len(state['again'])} waiting")


def _counters(depot: Mapping[str, Any], ledger: Mapping[str, Any] | None = None) -> dict[str, int]:
    leases = depot["leases"]
    found = {name: leases[name] for name in ("next", "delivered", "lost")}
    return {**found, **{name: depot[name] for name in ("attempt", "unscored", "completions")},
            **({} if ledger is None else {"tokens": ledger["tokens"]["delivered"]})}


def checkpoint_faults(run: Path) -> Iterator[str]:
    """What is wrong with the complete checkpoints of a run, each by itself and one after the other."""
    before: dict[str, int] = {}
    for step, folder in checkpoint.complete(run):
        depot = json.loads((folder / "depot.json").read_text())
        yield from (f"checkpoint {step}: {fault}" for fault in prompt_faults(depot["leases"]))
        now = _counters(depot)
        yield from (f"checkpoint {step}: {name} fell from {value} to {now[name]}"
                    for name, value in before.items() if now[name] < value)
        before = now


def log_faults(run: Path, steps: int) -> Iterator[str]:
    """What is wrong with the log of a finished run of `steps` steps."""
    logged = steps_of(run)
    if [line[m.STEP] for line in logged] != list(range(1, steps + 1)):
        yield f"the log has {len(logged)} steps, and not 1 to {steps}, each once"
    for name in (m.INSERTED, m.DELIVERED_TOKENS, m.UNSCORED):
        values = [line[name] for line in logged]
        yield from (f"{name} falls from {a} to {b}" for a, b in itertools.pairwise(values) if b < a)
    stamps = [(line[m.ATTEMPT], line[m.VERSION]) for line in logged]
    yield from (f"(attempt, version) goes from {a} to {b}" for a, b in itertools.pairwise(stamps) if b < a)


def without_clocks(run: Path) -> list[dict[str, Any]]:
    """What was logged of steps, but for what a clock or a restart changes."""
    return [{name: value for name, value in line.items() if name not in OF_A_CLOCK} for line in steps_of(run)]


def differences(run: Path, whole: Path) -> Iterator[str]:
    """In what a resumed lockstep run differs from one that nothing interrupted; nothing is the bar."""
    files = [folder / "final" / "model.safetensors" for folder in (run, whole)]
    if files[0].read_bytes() != files[1].read_bytes():
        yield "the final weights"
    for one, other in zip(without_clocks(run), without_clocks(whole), strict=False):
        if one != other:
            yield f"the metrics of step {one[m.STEP]}: {sorted(name for name in one if one[name] != other.get(name))}"
            break
    ledgers = [json.loads((folder / "ledger.json").read_text()) for folder in (run, whole)]
    if ledgers[0] != ledgers[1]:
        yield f"the ledger: {ledgers[0]['prompts']} and {ledgers[1]['prompts']}"
