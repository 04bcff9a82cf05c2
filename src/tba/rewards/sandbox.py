"""Timed, killable scoring: a user's reward function in a process of its own."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, RewardFunction, Score, score_safely

START_LIMIT_S = 60.0
"""Seconds that the process may take to import the function's module."""
ORPHAN_S = 5.0
"""Seconds beyond its limit after which a scoring process ends itself: who waited for it is gone too."""


def load_function(spec: str) -> RewardFunction:
    """The function that `module:function` or `file.py:function` names.

    Raises:
        ValueError: the module, file or function does not exist, or importing it fails.
    """
    where, _, name = spec.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        function = getattr(module, name)
    except Exception as error:
        # Importing runs the user's own code, which may raise anything.
        raise ValueError(f"task.reward = {spec!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"task.reward = {spec!r} is a {type(function).__name__}; it must be a function.")
    return cast(RewardFunction, function)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _serve(connection: Connection, function_spec: str, limit_s: float) -> None:
    """Body of the scoring process: one answer per request, until the pipe closes.

    A function that hangs is ended from outside; if nobody is left to do it, by a clock that needs nothing of Python,
    which the function may hold.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    function = load_function(function_spec)
    connection.send("ready")
    while True:
        try:
            prompt, completions = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(limit_s + ORPHAN_S, exit=True, file=nowhere)
        scored = score_safely(function, prompt, completions)
        faulthandler.cancel_dump_traceback_later()
        connection.send(scored)


class TimedScorer:
    """Runs a reward function in a killable process, each call within a limit.

    A call that outlasts `limit_s` or whose process dies is a recorded failure; the process is replaced.
    """

    def __init__(self, function_spec: str, *, limit_s: float) -> None:
        """`function_spec` is `module:function` or `file.py:function`; `limit_s` is per call, in seconds."""
        self._spec = function_spec
        self._limit_s = limit_s
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self.replaced = 0
        """Processes that were killed or died."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score | Failure]:
        """One outcome per completion, in order."""
        pipe = self._connect()
        try:
            pipe.send((prompt, list(completions)))
            if pipe.poll(self._limit_s):
                return pipe.recv()
            failure = Failure(reason="timeout", detail=f"no reward within {self._limit_s:g} s")
        except (EOFError, OSError) as error:
            failure = Failure(reason="raised", detail=f"the scoring process died ({type(error).__name__})")
        self.close()
        self.replaced += 1
        return [failure] * len(completions)

    def _connect(self) -> Connection:
        if self._pipe is not None:
            return self._pipe
        context: Any = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._spec, self._limit_s), daemon=True)
        process.start()
        theirs.close()
        self._process, self._pipe = process, pipe
        try:
            is_ready = pipe.poll(START_LIMIT_S) and pipe.recv() == "ready"
        except EOFError:
            is_ready = False
        if not is_ready:
            self.close()
            raise ValueError(f"task.reward = {self._spec!r}: its process did not start within {START_LIMIT_S:g} s.")
        return pipe

    def close(self) -> None:
        """Ends the process; the next call starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None
