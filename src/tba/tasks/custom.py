"""Prompts from a JSONL file, scored by a user's reward functions in killable processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.records import Completion, Prompt
from tba.settings import SettingsError, TaskSettings
from tba.tasks.lines import Row, json_rows
from tba.tasks.own import OwnRewards, prompt_of, prompts_of
from tba.tasks.protocol import Encode


class Custom:
    """One prompt per line of `task.path`: a string, or chat messages, in `task.prompt_column`.

    The other columns travel with the prompt, for the reward function. An `id` column names the prompt;
    without it the line number does.
    """

    characters = ""

    def __init__(self, settings: TaskSettings, *, max_new_tokens: int, score_limit_s: float) -> None:
        """Reads the files; `score_limit_s` bounds each call of a reward function.

        Raises:
            SettingsError: a line is malformed (file and line named), or no prompts are left to train on.
        """
        del max_new_tokens
        assert settings.path is not None, "settings refuse a custom task without a path"
        rows = read_rows(Path(settings.path), settings.prompt_column)
        if settings.held_out_path is not None:
            self._training, self._held_out = rows, read_rows(Path(settings.held_out_path), settings.prompt_column)
        else:
            cut = len(rows) - settings.held_out
            self._training, self._held_out = rows[: max(0, cut)], rows[max(0, cut) :]
        if not self._training or not self._held_out:
            raise SettingsError([
                f"task.path = {settings.path!r} has {len(rows)} prompts, which task.held_out = {settings.held_out} "
                f"splits into {len(self._training)} for training and {len(self._held_out)} held out; both need one."
            ])
        self._column, self._path, self._limit = settings.prompt_column, settings.path, settings.max_prompt_tokens
        self._rewards = OwnRewards(settings.reward, settings.rewards, limit_s=score_limit_s)

    @property
    def notes(self) -> Sequence[str]:
        """See `Examines.notes`."""
        return self._rewards.notes

    def examine(self) -> str:
        """Looks at the reward functions, whose prompts are read already; see `Examines.examine`."""
        place, row = self._training[0]
        problems = self._rewards.look(prompt_of(place, row, self._column, (0,), "id"))
        if problems:
            self.close()
            raise SettingsError(problems)
        return f"{len(self._training)} prompts for training, {len(self._held_out)} held out; columns {', '.join(row)}"

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """Training prompts, in the file's order."""
        return prompts_of(self._training, self._column, encode, self._limit, id_column="id")

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """Held-out prompts, in the file's order."""
        return prompts_of(self._held_out, self._column, encode, self._limit, id_column="id")

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        """What the reward functions give, or why they gave nothing."""
        return self._rewards.score(prompt, completions)

    def gold(self, prompt: Prompt) -> None:
        """Unknown: only the reward function knows what is right."""
        del prompt

    def close(self) -> None:
        """Ends the processes that score."""
        self._rewards.close()


def read_rows(path: Path, column: str, setting: str = "task.prompt_column") -> list[Row]:
    """(file:line, row) of every non-blank line of a JSONL file; a byte-order mark is skipped.

    Raises:
        SettingsError: with the file and line of every malformed one.
    """
    return json_rows(path, lambda row: row_problem(row, column, setting))


def row_problem(row: Any, column: str, setting: str) -> str:
    """What is wrong with the prompt of a row; '' if nothing is. `setting` says where `column` is chosen."""
    if column not in row:
        return f"has no column {column!r}, only {', '.join(map(repr, row))}; set {setting} to the right one."
    asked = row[column]
    if isinstance(asked, str):
        return "" if asked else f"has an empty {column!r}."
    if is_chat(asked):
        return ""
    return f"has a {column!r} that is neither text nor a list of messages with role and content."


def is_chat(asked: Any) -> bool:
    """Whether it is a list of messages with role and content, one at least."""
    return isinstance(asked, list) and bool(asked) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in asked
    )
