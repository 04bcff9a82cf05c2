"""Prompts and reward functions that a Python script hands over: what `TBATrainer` is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tba.records import Completion, Prompt
from tba.rewards.carried import Carried
from tba.rewards.sandbox import TimedScorer
from tba.settings import SettingsError, TaskSettings
from tba.tasks.lines import Row
from tba.tasks.own import OwnRewards, prompt_of, prompts_of
from tba.tasks.protocol import Encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What no settings can name."""

    training: tuple[Row, ...]
    held_out: tuple[Row, ...]
    """Rows to evaluate on; none: the run is not evaluated."""
    carried: Carried
    """The functions that `task.rewards` names."""

    def for_scoring(self) -> Brought:
        """The same without rows, for processes that are told their prompts."""
        return dataclasses.replace(self, training=(), held_out=())


class Script:
    """One prompt per row: a string, or chat messages, in `task.prompt_column`; the other columns travel with it."""

    characters = ""

    def __init__(
        self, settings: TaskSettings, *, max_new_tokens: int, score_limit_s: float, brought: Brought | None = None
    ) -> None:
        """Without `brought` there is nothing to ask or to score; a model of the run may still be talked to."""
        del max_new_tokens
        self._settings, self._brought = settings, brought
        self._rewards: OwnRewards | None = None
        if brought is not None:
            self._rewards = OwnRewards(
                None, settings.rewards, limit_s=score_limit_s,
                carried=TimedScorer(brought.carried, limit_s=score_limit_s),
            )

    @property
    def notes(self) -> Sequence[str]:
        """See `Examines.notes`."""
        return self._own().notes

    def examine(self) -> str:
        """Looks at the reward functions; see `Examines.examine`."""
        brought, rewards = self._handed(), self._own()
        (place, row), *_ = brought.training
        problems = rewards.look(prompt_of(place, row, self._settings.prompt_column, (0,), None))
        if problems:
            self.close()
            raise SettingsError(problems)
        return f"{len(brought.training)} prompts for training, {len(brought.held_out)} held out"

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """Training prompts, in the order of the rows."""
        return self._encoded(self._handed().training, encode)

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """Held-out prompts, in the order of the rows."""
        return self._encoded(self._handed().held_out, encode)

    def _encoded(self, rows: Sequence[Row], encode: Encode) -> list[Prompt]:
        column, limit = self._settings.prompt_column, self._settings.max_prompt_tokens
        return prompts_of(rows, column, encode, limit, id_column=None)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        """What the reward functions give, or why they gave nothing."""
        return self._own().score(prompt, completions)

    def gold(self, prompt: Prompt) -> None:
        """Unknown: only the reward function knows what is right."""
        del prompt

    def close(self) -> None:
        """Ends the processes that score."""
        if self._rewards is not None:
            self._rewards.close()

    def _handed(self) -> Brought:
        if self._brought is None:
            raise SettingsError([
                "task.name = 'script': the prompts and rewards of this run were handed over by a Python script, and "
                "are in no file; run that script again (train(resume_from_checkpoint=True) goes on), or name another "
                "task with --task."
            ])
        return self._brought

    def _own(self) -> OwnRewards:
        self._handed()
        assert self._rewards is not None, "what was handed over has rewards"
        return self._rewards
