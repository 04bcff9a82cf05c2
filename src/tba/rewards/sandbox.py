"""Timed, killable scoring: a user's reward function in a process of its own."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from tba.records import Completion, Prompt
from tba.rewards.carried import Carried, unpacked
from tba.rewards.child import Child, requests
from tba.rewards.functions import Failure, Score, score_safely
from tba.rewards.shapes import Called, shape_problem

START_LIMIT_S = 120.0
"""Seconds that the process may take to import the function's module."""
TRIAL = ("0", "")
"""Texts of the completions that a function is tried on before a model loads."""


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names.

    Raises:
        ValueError: the module, file or function does not exist, or importing it fails.
    """
    where, _, name = spec.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        # Importing runs the user's own code, which may raise anything.
        sought = f"; it is looked for in {os.getcwd()} and among the installed packages" if isinstance(
            error, ModuleNotFoundError) and error.name == where else ""
        raise ValueError(f"task.reward = {spec!r} cannot be loaded: {type(error).__name__}: {error}{sought}") from error
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"did you mean {close[0]}?" if close else "write the name of one of its functions."
        raise ValueError(f"task.reward = {spec!r} cannot be loaded: {where} has no {name!r}; {hint}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"task.reward = {spec!r} is a {type(function).__name__}; it must be a function.")
    return function


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


def serve(connection: Connection, spec: str, limit_s: str) -> None:
    """Body of the scoring process: one answer per request.

    Without `spec` the functions come over the pipe before anything else.
    """
    sys.path.insert(0, os.getcwd())
    try:
        functions = {"": load_function(spec)} if spec else unpacked(connection.recv_bytes())
    except ValueError as error:
        connection.send(str(error))
        return
    called = {name: Called(function) for name, function in functions.items()}
    for name, prompt, asked in requests(connection, float(limit_s)):
        if prompt is None:
            connection.send(shape_problem(functions[name], asked))
        else:
            connection.send(score_safely(called[name], prompt, asked))


class TimedScorer:
    """Runs a reward function in killable processes, each call within a limit; each thread that calls has one at a time.

    A call that outlasts `limit_s` or whose process dies is a recorded failure; the process is replaced.
    """

    def __init__(self, function: str | Carried, *, limit_s: float) -> None:
        """`function` is `module:function` or `file.py:function`, or functions that are carried along.

        `limit_s` is per call, in seconds.
        """
        self._function = function
        self._limit_s = limit_s
        self._idle: deque[Child] = deque()
        self.replaced = 0
        """Processes that were killed or died."""

    def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], *, name: str = ""
    ) -> list[Score | Failure]:
        """One outcome per completion, in order; `name` is that of one of the carried functions."""
        child = self._taken()
        try:
            found = child.ask((name, prompt, list(completions)), self._limit_s)
        except TimeoutError:
            failure = Failure(reason="timeout", detail=f"no reward within {self._limit_s:g} s")
        except (EOFError, OSError) as error:
            failure = Failure(reason="raised", detail=f"the scoring process died ({type(error).__name__})")
        else:
            self._idle.append(child)
            return found
        child.close()
        self.replaced += 1
        return [failure] * len(completions)

    def problem(self, columns: Collection[str], *, name: str = "") -> str:
        """What is wrong with the function, if its prompts have `columns`; '' if nothing is. It is not called."""
        try:
            child = self._taken()
        except ValueError as error:
            return str(error)
        try:
            found = child.ask((name, None, list(columns)), START_LIMIT_S)
        except (TimeoutError, EOFError, OSError) as error:
            child.close()
            return str(error) or f"its process ended ({type(error).__name__})."
        self._idle.append(child)
        return found

    def tried(self, prompt: Prompt, *, name: str = "") -> tuple[str, str]:
        """(what is wrong with what the function returns, why a trial was not scored); '' each if nothing is."""
        trial = [Completion(tokens=(0,), text=text, logps=(0.0,), version=0, finish="stop") for text in TRIAL]
        failures = [outcome for outcome in self(prompt, trial, name=name) if isinstance(outcome, Failure)]
        for failure in failures:
            if failure.reason in ("wrong_type", "wrong_length"):
                return f"{failure.detail}; return a list with one number, or None, per completion.", ""
        return "", (f"{failures[0].reason}: {failures[0].detail}" if failures else "")

    def _taken(self) -> Child:
        """A process that nobody else uses: the one that was free last, or a new one.

        Raises:
            ValueError: a new one does not start, or cannot load the function.
        """
        try:
            return self._idle.pop()
        except IndexError:
            return self._started()

    def _started(self) -> Child:
        spec = "" if isinstance(self._function, Carried) else self._function
        child = Child("tba.rewards.sandbox:serve", spec, str(self._limit_s))
        try:
            if isinstance(self._function, Carried):
                child.give(self._function.packed)
            is_ready = child.is_ready(START_LIMIT_S)
        except OSError:
            is_ready = False
        if not is_ready:
            child.close()
            raise ValueError(child.complaint or f"task.reward = {spec or 'of a script'!r}: its process did not start "
                                                f"within {START_LIMIT_S:g} s, or died.")
        return child

    def close(self) -> None:
        """Ends the processes that are free; the next call starts a new one."""
        while self._idle:
            self._idle.pop().close()
