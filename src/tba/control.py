"""A run under way, seen from outside: that it is, and what it is asked for."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from tba.settings import SettingsError

LOCK = ".lock"
REQUESTS = ".requests"
ANSWER_LIMIT_S = 30.0
"""Seconds that a run may take to answer: it looks several times a second, but not during a checkpoint."""
LOOK_S = 0.1


class Hold:
    """A run directory in use by this process, which the system lets go of when the process ends, however it ends."""

    def __init__(self, run: Path) -> None:
        """Takes hold of `run`.

        Raises:
            SettingsError: another process has it.
        """
        self._file = (run / LOCK).open("a+", encoding="utf-8")
        if not _lock(self._file, LOOK_S):
            self._file.close()
            check_free(run)
            raise SettingsError([f"run {str(run)!r} was held a moment ago; try again."])
        self._file.truncate(0)
        self._file.write(json.dumps({"host": os.uname().nodename, "pid": os.getpid()}))
        self._file.flush()

    def close(self) -> None:
        """Lets go."""
        self._file.close()


def _owner(run: Path) -> str:
    """Who holds a run, in words."""
    try:
        owner = json.loads((run / LOCK).read_text("utf-8"))
        return f" (process {owner['pid']} on {owner['host']})"
    except (OSError, ValueError, KeyError):
        return ""


def check_free(run: Path) -> None:
    """SettingsError if a process has hold of `run`."""
    if is_under_way(run):
        raise SettingsError([f"run {str(run)!r} is under way{_owner(run)}; wait for its end, or stop it first."])


def is_under_way(run: Path) -> bool:
    """Whether a process has hold of `run`."""
    try:
        with (run / LOCK).open("r+", encoding="utf-8") as file:
            return not _lock(file, 0.0)
    except OSError:
        return False


def _lock(file: TextIO, limit_s: float) -> bool:
    """Locks a file until it is closed; False if it is locked for `limit_s` seconds. Who only looks locks it briefly."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(limit_s / 10)
        except OSError:  # a file system that has no locks
            return True
        else:
            return True


class Requests:
    """What others ask of the run in a directory: a file each, and a file for the answer."""

    def __init__(self, run: Path) -> None:
        """`run` is held by this process; what was asked of an earlier one is dropped."""
        self._folder = run / REQUESTS
        for left in self._folder.glob("*") if self._folder.is_dir() else ():
            left.unlink(missing_ok=True)

    def serve(self, do: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Has `do` answer what is waiting; a ValueError of it is the answer to that request."""
        try:
            waiting = sorted(self._folder.glob("*.ask"))
        except OSError:
            return
        for file in waiting:
            try:
                answer = {"answer": dict(do(json.loads(file.read_text("utf-8"))))}
            except ValueError as error:
                answer = {"refused": str(error)}
            except OSError:
                continue
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # who asked may be gone, and the disk may be full
                _write(file.with_suffix(".answer"), answer)


def ask(run: Path, request: Mapping[str, Any], *, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
    """What the run in `run` answers to `request`.

    Raises:
        SettingsError: no run is under way there, it refuses, or it has not answered within `limit_s` seconds.
    """
    if not is_under_way(run):
        raise SettingsError([f"no run is under way in {str(run)!r}; start it with: tba resume {run}"])
    folder = run / REQUESTS
    folder.mkdir(exist_ok=True)
    file = folder / f"{time.time_ns()}-{uuid.uuid4().hex}.ask"
    _write(file, dict(request))
    answer, deadline = file.with_suffix(".answer"), time.monotonic() + limit_s
    while not answer.exists():
        if time.monotonic() > deadline or not is_under_way(run):
            file.unlink(missing_ok=True)
            raise SettingsError([
                f"run {str(run)!r} did not answer within {limit_s:g} s; it may be on its way up or down: try again."
            ])
        time.sleep(LOOK_S)
    found = json.loads(answer.read_text("utf-8"))
    answer.unlink(missing_ok=True)
    if "refused" in found:
        raise SettingsError([f"run {str(run)!r}: {found['refused']}"])
    return found["answer"]


def _write(file: Path, value: Mapping[str, Any]) -> None:
    """Writes a file that appears whole."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(value), "utf-8")
    os.replace(partial, file)
