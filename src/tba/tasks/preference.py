"""Prompts whose completions a reward model prefers or not, with humans' completions to compare with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tba.records import Completion, Prompt
from tba.rewards.functions import Failure
from tba.rewards.parts import reward_of
from tba.rewards.shapes import MESSAGES
from tba.settings import SettingsError, TaskSettings
from tba.tasks import tldr
from tba.tasks.custom import is_chat
from tba.tasks.lines import refuse
from tba.tasks.protocol import Encode
from tba.tasks.rows import Row, rows_of_dataset, rows_of_file

REFERENCE = "reference"
"""Column of a prompt with a human's completion."""


class Preference:
    """One prompt per row of `task.path` or `task.preference.dataset`; the reward is that of `task.rewards`.

    The scorers are loaded at the first score.
    """

    characters = ""

    def __init__(self, settings: TaskSettings, *, max_new_tokens: int, score_limit_s: float) -> None:
        """Reads the rows; `score_limit_s` bounds each call of a function, and endpoints have limits of their own.

        Raises:
            SettingsError: rows cannot be read or lack a column, or no prompts are left on one side.
        """
        del max_new_tokens
        self._settings = settings
        chosen = settings.preference
        self._is_tldr = chosen.format == "tldr"
        columns: dict[str, str] = (
            dict.fromkeys(tldr.COLUMNS, "task.preference.format") if self._is_tldr
            else {settings.prompt_column: "task.prompt_column"}
        )
        if chosen.reference_column is not None:
            columns[chosen.reference_column] = "task.preference.reference_column"
        if chosen.dataset is not None:
            rows = rows_of_dataset(chosen.dataset, chosen.split, columns, "task.preference.dataset")
            held_out = None if chosen.held_out_split is None else rows_of_dataset(
                chosen.dataset, chosen.held_out_split, columns, "task.preference.held_out_split"
            )
        else:
            rows = rows_of_file(str(settings.path), columns)
            held_out = (
                None if settings.held_out_path is None else rows_of_file(settings.held_out_path, columns)
            )
        if held_out is None:
            cut = max(0, len(rows) - settings.held_out)
            rows, held_out = rows[:cut], rows[cut:]
        if not rows or not held_out:
            raise SettingsError([
                f"{chosen.dataset or settings.path!r} gives {len(rows)} prompts for training and {len(held_out)} held "
                f"out (task.held_out = {settings.held_out}); both need one."
            ])
        self._training, self._held_out = rows, held_out
        self._reward = reward_of(settings.rewards, limit_s=score_limit_s)
        self.dropped = 0
        """Prompts left out as too long when they were last asked for."""

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """Training prompts, in the order of the rows."""
        return self._encoded(self._training, encode)

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """Held-out prompts, in the order of the rows."""
        return self._encoded(self._held_out, encode)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        """Weighted sum of the scorers, or why there is none."""
        if not self._settings.rewards:
            return [Failure(reason="none", detail="task.rewards is empty")] * len(completions)
        return self._reward(prompt, completions)

    def gold(self, prompt: Prompt) -> None:
        """Unknown: there are better and worse completions, none with full marks."""
        del prompt

    def reference(self, prompt: Prompt) -> str | None:
        """A human's completion of the prompt; None if the data have none."""
        found = prompt.columns.get(REFERENCE)
        return None if found is None else str(found)

    def demonstration(self, prompt: Prompt, rng: random.Random, wrong_share: float) -> str:
        """The human's completion.

        Raises:
            SettingsError: there is none for this prompt.
        """
        del rng, wrong_share
        text = self.reference(prompt)
        if text is None:
            raise SettingsError([
                f"prompt {prompt.id!r} has no completion to imitate in task.preference.reference_column = "
                f"{self._settings.preference.reference_column!r}; fill it in, or leave the row out."
            ])
        return text

    def texts(self) -> Sequence[str]:
        """Prompts that are text, each with its human's completion behind it."""
        asked, said = self._settings.prompt_column, self._settings.preference.reference_column
        return [
            row[asked] + (str(row[said]) if said is not None and row[said] is not None else "")
            for _, row in self._training if isinstance(row.get(asked), str)
        ]

    def close(self) -> None:
        """Ends the connections of its scorers."""
        self._reward.close()

    def _encoded(self, rows: Sequence[Row], encode: Encode) -> list[Prompt]:
        found: list[Prompt] = []
        problems: list[str] = []
        self.dropped = 0
        limit, drops = self._settings.max_prompt_tokens, self._settings.preference.too_long == "drop"
        for place, row in rows:
            try:
                asked = self._asked(row, encode)
            except ValueError as error:
                problems += [] if drops else [f"{place}: {error}"]
                self.dropped += drops
                continue
            tokens = encode(asked)
            if 1 <= len(tokens) <= limit:
                found.append(self._prompt(place, row, asked, tokens))
            elif drops:
                self.dropped += 1
            else:
                problems.append(
                    f"{place}: the prompt has {len(tokens)} tokens; allowed are 1 to task.max_prompt_tokens = {limit}; "
                    f"raise the limit, or set task.preference.too_long=drop."
                )
        refuse(problems)
        return found

    def _asked(self, row: dict[str, Any], encode: Encode) -> str | list[dict[str, str]]:
        """What is asked: a text, or chat messages."""
        if self._is_tldr:
            return tldr.tldr_prompt(row, lambda text: len(encode(text)), self._settings.max_prompt_tokens)
        asked = row[self._settings.prompt_column]
        if not (isinstance(asked, str) and asked) and not is_chat(asked):
            raise ValueError(f"{str(asked)[:60]!r} is neither text nor a list of messages with role and content.")
        return asked

    def _prompt(
        self, place: str, row: dict[str, Any], asked: str | list[dict[str, str]], tokens: tuple[int, ...]
    ) -> Prompt:
        chosen = self._settings.preference
        taken = {self._settings.prompt_column, *(tldr.COLUMNS if self._is_tldr else ()), chosen.reference_column}
        columns = {name: value for name, value in row.items() if name not in (*taken, MESSAGES, REFERENCE)}
        if chosen.reference_column is not None and row[chosen.reference_column] is not None:
            text = str(row[chosen.reference_column])
            columns[REFERENCE] = tldr.tldr_reference(text) if self._is_tldr else text
        if isinstance(asked, str):
            text = asked
        else:
            columns[MESSAGES] = [dict(message) for message in asked]
            text = "\n".join(f"{m['role']}: {m['content']}" for m in asked)
        name = row.get(chosen.id_column) if chosen.id_column else None
        return Prompt(id=place if name is None else str(name), tokens=tokens, text=text, columns=columns)
