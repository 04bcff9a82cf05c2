"""Processes that score for all searchers, and how a searcher asks them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import cycle
from typing import TYPE_CHECKING, Any

from tba.cluster.start import use_threads
from tba.records import Completion, Prompt

if TYPE_CHECKING:
    from tba.scoring import Outcomes


class ScorerProcess:
    """Holds reward models, judges and victims once for all searchers; the same pair has the same score in each.

    consumes: prompts with completions
    waits for: nothing
    woken by: searchers
    produces: outcomes
    """

    def __init__(self, tree: dict[str, Any], threads: int, brought: object = None) -> None:
        """`tree` is the resolved settings tree; `brought` is what a script hands over for scoring."""
        use_threads(threads)
        from tba import assembly
        from tba.reading import check_settings

        self._threads = threads
        self._task = assembly.make_task_of(check_settings(tree), brought)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Outcomes:
        """One outcome per completion, in order."""
        from tba.tasks.protocol import outcomes

        use_threads(self._threads)  # Ray calls from threads of its own
        return outcomes(self._task, prompt, completions)


class RemoteScoring:
    """What `Scoring` is in one process: prompts go to the processes by turns."""

    def __init__(self, scorers: Sequence[Any]) -> None:
        """`scorers` are handles of at least one such process."""
        self._next = cycle(scorers)

    def begin(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[Outcomes]:
        """The scores of a prompt's completions, once they are there; raises in their place if the process is lost."""
        return next(self._next).score.remote(prompt, list(completions)).future()
