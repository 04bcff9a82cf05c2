"""Evaluations beside training: one at a time, on a thread of its own, within a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tba.evaluate import Evaluation
from tba.signals import MAY_BE_LEFT


class EvaluationLateError(RuntimeError):
    """An evaluation has taken longer than it may."""


class EvaluatorLostError(RuntimeError):
    """The process that evaluates is gone."""


class Beside:
    """Evaluates on a thread that nothing waits for at the end of the process, so that one that hangs can be left."""

    def __init__(self, evaluate: Callable[..., Evaluation], limit_s: float) -> None:
        """`evaluate` is called with what `start` is given; `limit_s` is `evaluation.limit_s`."""
        self._evaluate, self._limit_s = evaluate, limit_s
        self._under_way: Future[Evaluation] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether one has been started and not been taken."""
        return self._under_way is not None

    def start(self, *arguments: Any, **options: Any) -> None:
        """Starts one; it is pinned to the weights that it is given."""
        future: Future[Evaluation] = Future()
        self._under_way = future

        def work() -> None:
            try:
                future.set_result(self._evaluate(*arguments, **options))
            except BaseException as error:
                future.set_exception(error)  # who takes it raises it

        threading.Thread(target=work, name=MAY_BE_LEFT, daemon=True).start()

    def take(self, *, wait: bool) -> Evaluation | None:
        """The one under way once it is done; None while it is not, or if there is none.

        Raises:
            EvaluationLateError: it was waited for, longer than the limit; it is given up.
        """
        future = self._under_way
        if future is None or not (wait or future.done()):
            return None
        try:
            return future.result(timeout=self._limit_s)
        except TimeoutError as error:
            raise EvaluationLateError(
                f"an evaluation was not done within evaluation.limit_s = {self._limit_s:g} s; raise it, or evaluate "
                f"less: evaluation.prompts, evaluation.samples."
            ) from error
        finally:
            self._under_way = None
