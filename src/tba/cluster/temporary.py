"""Ray's temporary folder: it goes with its run, or with the next one if its run was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from tba.cluster.searchers import RunFailedError
from tba.metrics import Say

START_TRIES = 3
PREFIX = "tba-"
LOCK = "in-use"
"""Locked by the process that made the folder: the system lets go of it when that ends, however it ends."""


class TemporaryFolder:
    """A folder for one run's Ray, in the system's place for temporary files."""

    def __init__(self) -> None:
        """Makes it, and removes those of runs that are no more."""
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        making = self.path / f"{LOCK}.partial"
        self._lock = making.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(making, self.path / LOCK)  # so that nobody finds it unlocked

    def remove(self) -> None:
        """Ends what still runs with it, as after a start that Ray gave up half-way, and removes it with all in it."""
        for pid in _users_of(self.path):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def start_in_folder(init: Callable[[str], object], say: Say) -> TemporaryFolder:
    """Has `init` start Ray in a new folder, and in another if it fails: on a busy machine Ray gives itself up.

    Raises:
        RunFailedError: it has failed `START_TRIES` times.
    """
    tries = 0
    while True:
        folder = TemporaryFolder()
        try:
            init(str(folder.path))
            return folder
        except Exception as error:  # Ray has no class for it
            folder.remove()
            tries += 1
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if tries < START_TRIES:
                say("note", {"text": f"Ray did not start ({said}); it is started again"})
                continue
            raise RunFailedError(
                f"Ray did not start on this machine in {tries} tries ({said}); it may be too busy, so try again later."
            ) from error


def _users_of(folder: Path) -> list[int]:
    """Processes whose command line names a folder; none where the system does not tell."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def remove_abandoned() -> None:
    """Removes the folders whose process is gone; those of others, or without a lock, stay."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is in use, somebody else's, or no such folder
            continue
