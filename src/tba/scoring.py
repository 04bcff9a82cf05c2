"""Scores completions beside what else is done: prompts wait for their scores, and nobody else does."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, Score
from tba.tasks.protocol import Task, outcomes

Outcomes = list[Score | Failure]
"""One of each completion of a prompt."""


class Scores(Protocol):
    """What completions are scored by, here or elsewhere."""

    def begin(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[Outcomes]:
        """The scores of a prompt's completions, once they are there."""
        ...


class Scoring:
    """Threads that ask a task for scores; what they are asked first they begin first."""

    def __init__(self, task: Task, scorers: int = 1) -> None:
        """`scorers` prompts are scored at the same time; more than one needs a task that bears it."""
        self._task = task
        self._threads = ThreadPoolExecutor(scorers, "scorer")

    def begin(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[Outcomes]:
        """The scores of a prompt's completions, once they are there."""
        return self._threads.submit(outcomes, self._task, prompt, completions)
