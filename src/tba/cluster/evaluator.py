"""The evaluator's process, where a core is left for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tba.cluster.scorers import RemoteScoring
from tba.cluster.start import YIELDS, settle, start_process
from tba.records import Prompt
from tba.weights import Tensors

if TYPE_CHECKING:
    from tba.evaluate import Evaluation


class EvaluatorProcess:
    """Evaluates weights beside training; neither side waits for it.

    consumes: held-out prompts, once; weights
    waits for: nothing
    woken by: the driver
    produces: evaluations
    """

    def __init__(
        self, tree: dict[str, Any], threads: int, brought: object = None, scorers: Sequence[Any] = ()
    ) -> None:
        """`tree` is the resolved settings tree; `brought` is what a script hands over for scoring.

        `scorers` are the processes that score; none: it does so itself.
        """
        self._scorers = scorers
        self._settings, self._task, self._policy = start_process(tree, threads, brought)
        settle(nicer_by=YIELDS)

    def ask(self, held_out: Sequence[Prompt]) -> None:
        """Takes the prompts that it is to ask."""
        from tba import assembly

        questions = assembly.Questions(task=self._task, training=(), held_out=held_out)
        self._evaluator = assembly.make_evaluator(self._settings, questions, self._policy)
        if self._scorers:
            self._evaluator.scoring = RemoteScoring(self._scorers)

    def evaluate(self, tensors: Tensors, version: int, options: Mapping[str, Any]) -> Evaluation:
        """See `Evaluator.evaluate`."""
        return self._evaluator.evaluate(tensors, version, **options)
