"""A process of our own that can be ended at any moment: asked over a pipe, within a limit."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from typing import Any

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tba.rewards.child import main; main()"
"""A fresh interpreter that imports what this one can; unlike `multiprocessing` it never imports the caller's script
again and may be started by a daemonic process."""

ORPHAN_S = 5.0
"""Seconds after which a child notices that its parent has gone: an idle one at once, a busy one after its limit."""


class Child:
    """A process that runs `module:function(connection, *arguments)` and may be killed."""

    def __init__(self, entry: str, *arguments: str) -> None:
        """Starts it; `entry` must send "ready" before it answers anything."""
        self._pipe, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-c", BOOT, json.dumps(sys.path), str(theirs.fileno()), entry, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._has_greeted = False
        self.complaint = ""
        """What it said instead of "ready"."""
        self.close = weakref.finalize(self, _end, self._process, self._pipe)
        """Ends it, whatever it is doing; happens by itself when nothing refers to it, and at exit."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def is_ready(self, limit_s: float) -> bool:
        """Whether it has said so, or does within `limit_s` seconds."""
        with contextlib.suppress(EOFError, OSError):
            if not self._has_greeted and self._pipe.poll(limit_s):
                said = self._pipe.recv()
                self._has_greeted = said == "ready"
                self.complaint = "" if self._has_greeted else str(said)
        return self._has_greeted

    def give(self, payload: bytes) -> None:
        """Sends what it reads before it is ready.

        Raises:
            OSError: it died.
        """
        self._pipe.send_bytes(payload)

    def ask(self, request: Any, limit_s: float) -> Any:
        """Its answer to `request`.

        Raises:
            TimeoutError: there is none within `limit_s` seconds; the child is still busy and must be closed.
            EOFError, OSError: it died.
        """
        self._pipe.send(request)
        if not self._pipe.poll(limit_s):
            raise TimeoutError(f"no answer within {limit_s:g} s from process {self.pid}")
        return self._pipe.recv()


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    process.kill()
    process.wait()
    pipe.close()


def requests(connection: Connection, limit_s: float) -> Any:
    """Body of a child: says that it is ready, then yields each request until the parent closes the pipe or dies.

    One that takes longer than `limit_s` seconds is ended from outside; if nobody is left to do it, `ORPHAN_S` later by
    a clock that needs nothing of Python, which the request may hold.
    """
    parent, nowhere = os.getppid(), os.open(os.devnull, os.O_WRONLY)
    connection.send("ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not connection.poll(ORPHAN_S):
                if os.getppid() != parent:
                    return
            request = connection.recv()
            faulthandler.dump_traceback_later(limit_s + ORPHAN_S, exit=True, file=nowhere)
            yield request
            faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """What the fresh interpreter runs."""
    _, descriptor, entry, *arguments = sys.argv[1:]
    module, _, name = entry.partition(":")
    getattr(importlib.import_module(module), name)(Connection(int(descriptor)), *arguments)
