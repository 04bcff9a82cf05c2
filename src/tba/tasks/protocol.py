"""The Task protocol, and what every task is checked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from tba.catalog import TASKS, make
from tba.records import Completion, Prompt
from tba.rewards.functions import FULL_MARKS, Failure, Score, judge_returned
from tba.settings import SettingsError, TaskSettings

Encode = Callable[[Any], tuple[int, ...]]
"""Text, or a list of chat messages, to token ids as the model's template defines."""


@runtime_checkable
class Task(Protocol):
    """Prompts, and a reward that depends only on (prompt, completion)."""

    characters: str
    """Every character that prompts and demonstrations use; '' if any may occur."""

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """Training prompts, ids unique, in a fixed order."""
        ...

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """Evaluation prompts; none shares its id with a training prompt."""
        ...

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        """One reward per completion: a number, a `Score`, a `Failure`, or None for unscored."""
        ...

    def gold(self, prompt: Prompt) -> str | None:
        """Text of a completion that scores full marks; None if the task knows none."""
        ...


@runtime_checkable
class Examines(Protocol):
    """A task whose data can be read and checked before a model loads."""

    notes: Sequence[str]
    """What has been left out so far, in words."""

    def examine(self) -> str:
        """Reads and checks the data; says what there is, or raises SettingsError with everything that is wrong."""
        ...


@runtime_checkable
class Answers(Protocol):
    """A task that can tell which answer a completion gives, so that completions can vote."""

    def answer_of(self, prompt: Prompt, completion: Completion) -> str | None:
        """The answer; None if there is none."""
        ...

    def same_answer(self, prompt: Prompt, one: str, other: str) -> bool:
        """Whether two answers are the same one."""
        ...


@runtime_checkable
class Varies(Protocol):
    """A task whose problems may have templates that take other numbers."""

    varies: bool
    """Whether these settings give it such problems."""

    def variants(self, prompts: Sequence[Prompt], number: int, encode: Encode) -> list[list[Prompt]]:
        """`number` problems of each prompt's template, none trained on; none at all where there are fewer."""
        ...


@runtime_checkable
class Texts(Protocol):
    """A task with texts on which a tokenizer can be trained."""

    def texts(self) -> Sequence[str]:
        """Texts of the training rows, nothing of those held out."""
        ...


def outcomes(task: Task, prompt: Prompt, completions: Sequence[Completion]) -> list[Score | Failure]:
    """What `task.score` returned, as one outcome per completion."""
    return judge_returned(task.score(prompt, completions), len(completions), type(task).__name__)


def make_task(
    settings: TaskSettings, *, max_new_tokens: int, score_limit_s: float, brought: object = None
) -> Task:
    """The task that `task.name` names; `brought` is what a script hands over, for the task that takes it.

    Raises:
        SettingsError: its data is wrong (file and line named).
    """
    more = {} if brought is None else {"brought": brought}
    return make(TASKS[settings.name], settings, max_new_tokens=max_new_tokens, score_limit_s=score_limit_s, **more)


def check_ids_unique(prompts: Iterable[Prompt]) -> None:
    """Raises ValueError if two prompts share an id."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"two prompts have the id {prompt.id!r}; ids must be unique within a task.")
        seen.add(prompt.id)


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """A digest of ids and token ids in order; a resumed run must find the one it was saved with."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id}\x00{prompt.tokens}\x01".encode())
    return digest.hexdigest()[:16]


def check_gold(task: Task, prompts: Sequence[Prompt], complete: Callable[[str], Completion]) -> None:
    """Feeds each prompt's gold answer to the scorer and demands full marks.

    Raises:
        SettingsError: naming the prompts whose gold answer does not score 1 (the first five).
    """
    wrong: list[str] = []
    for prompt in prompts:
        gold = task.gold(prompt)
        if gold is None:
            continue
        outcome = outcomes(task, prompt, [complete(gold)])[0]
        if not (isinstance(outcome, Score) and outcome.reward == FULL_MARKS):
            got = outcome.reward if isinstance(outcome, Score) else outcome.reason
            wrong.append(f"prompt {prompt.id!r}: its gold answer {gold!r} scores {got}, not 1.")
    if wrong:
        more = [f"... and {len(wrong) - 5} more."] if len(wrong) > 5 else []
        raise SettingsError(wrong[:5] + more)
