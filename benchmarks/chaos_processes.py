"""Processes by descent and files by place: what runs, and what is left of it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.25
"""Seconds between two looks at the processes."""
AGENTS, AGENTS_GONE_S = ("ray::DashboardAgent", "ray::RuntimeEnvAgent"), 90.0
"""Ray's own agents first tell a control store that is gone, with their limit of 60 s, that their node has died."""
SHARED = Path("/dev/shm")
TEMPORARY = Path("/tmp")

CACHE = "torchinductor_"
"""Torch's own cache, one for all runs of a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of this machine, at one moment."""

    pid: int
    parent: int
    started: int
    """Clock ticks since the machine's start: with the pid it names a process for good."""
    is_ended: bool
    """Whether it only waits for its parent to ask how it ended."""
    title: str


def processes() -> dict[int, Process]:
    """All processes by pid."""
    found: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (OSError, IndexError):  # it has ended meanwhile
            continue
        pid = int(entry.name)
        found[pid] = Process(
            pid=pid, parent=int(fields[1]), started=int(fields[19]), is_ended=fields[0] in "ZX", title=title
        )
    return found


def below(root: int, among: dict[int, Process]) -> list[Process]:
    """The descendants of a process that have not ended."""
    def descends(process: Process) -> bool:
        parent = process.parent
        while parent in among and parent != root:
            parent = among[parent].parent
        return parent == root

    return [process for process in among.values() if not process.is_ended and descends(process)]


def titled(root: int, title: str) -> list[int]:
    """Descendants whose title begins with `title`, by pid."""
    return sorted(process.pid for process in below(root, processes()) if process.title.startswith(title))


class Watch:
    """Remembers every descendant of this process that it sees, since an orphan has another parent."""

    def __init__(self) -> None:
        """Begins to look; descendants that are there already are not counted."""
        self._before = {(p.pid, p.started) for p in below(os.getpid(), processes())}
        self._known: set[tuple[int, int]] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Takes in what runs now, and what descends from what was seen before."""
        among = processes()
        seen = below(os.getpid(), among)
        for pid, started in list(self._known):
            if pid in among and among[pid].started == started:
                seen += below(pid, among)
        self._known |= {(p.pid, p.started) for p in seen} - self._before

    def living(self) -> list[Process]:
        """Those that still run."""
        among = processes()
        return [among[pid] for pid, started in self._known
                if pid in among and among[pid].started == started and not among[pid].is_ended]

    def left_after(self, limit_s: float, but: tuple[str, ...] = ()) -> list[str]:
        """Pids and titles of what still runs after at most `limit_s` seconds, those with words of `but` left out."""
        deadline = time.monotonic() + limit_s
        while True:
            self.look()
            left = [p for p in self.living() if not any(word in p.title for word in but)]
            if not left or time.monotonic() > deadline:
                return [f"{p.pid} {p.title[:120]}" for p in left]
            time.sleep(LOOK_S)

    def end(self) -> None:
        """Ends what still runs, and the looking."""
        for process in self.living():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._is_over.set()
        self._thread.join()


@contextmanager
def watched() -> Iterator[Watch]:
    """A watch for as long as it is needed; nothing that it knows of outlives it."""
    watch = Watch()
    try:
        yield watch
    finally:
        watch.end()


class Places:
    """Where runs may leave files: a folder for temporary ones of their own, Ray's usual one, shared memory."""

    def __init__(self) -> None:
        """The folder's name is short, since sockets lie below it."""
        self.folder = Path(tempfile.mkdtemp(prefix="c-", dir=TEMPORARY))
        self._shared, self._ray = self._now()

    def _now(self) -> tuple[set[str], set[str]]:
        ray = TEMPORARY / "ray"
        return (set(os.listdir(SHARED)) if SHARED.is_dir() else set(),
                set(os.listdir(ray)) if ray.is_dir() else set())

    @property
    def environment(self) -> dict[str, str]:
        """The environment of what is started."""
        return {**os.environ, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"}

    def left(self) -> list[str]:
        """Files and folders that nobody has open, made since and not by others."""
        own = [str(path) for path in self.folder.iterdir() if not path.name.startswith(CACHE)]
        shared = [str(SHARED / name) for name in self._now()[0] - self._shared if not _is_open(SHARED / name)]
        return own + shared

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_open(path: Path) -> bool:
    """Whether a process has a file mapped or open; it may be somebody else's."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(path) in (entry / "maps").read_text():
                    return True
                if any(os.readlink(link) == str(path) for link in (entry / "fd").iterdir()):
                    return True
            except OSError:
                continue
    return False
