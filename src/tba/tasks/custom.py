"""Prompts from a JSONL file, scored by a user's reward function in a killable process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.records import Completion, Prompt
from tba.rewards.sandbox import TimedScorer
from tba.settings import SettingsError, TaskSettings
from tba.tasks.lines import Row, json_rows, refuse
from tba.tasks.protocol import Encode


class Custom:
    """One prompt per line of `task.path`: a string, or chat messages, in `task.prompt_column`.

    The other columns travel with the prompt, for the reward function. An `id` column names the prompt;
    without it the line number does.
    """

    characters = ""

    def __init__(self, settings: TaskSettings, *, max_new_tokens: int, score_limit_s: float) -> None:
        """Reads the files; `score_limit_s` bounds each call of the reward function.

        Raises:
            SettingsError: a line is malformed (file and line named), or no prompts are left to train on.
        """
        del max_new_tokens
        assert settings.path is not None, "settings refuse a custom task without a path"
        assert settings.reward is not None, "settings refuse a custom task without a reward"
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
        self._scorer = TimedScorer(settings.reward, limit_s=score_limit_s)

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """Training prompts, in the file's order."""
        return self._encoded(self._training, encode)

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """Held-out prompts, in the file's order."""
        return self._encoded(self._held_out, encode)

    def _encoded(self, rows: Sequence[Row], encode: Encode) -> list[Prompt]:
        found: list[Prompt] = []
        problems: list[str] = []
        for place, row in rows:
            asked = row[self._column]
            tokens = encode(asked)
            if not 1 <= len(tokens) <= self._limit:
                problems.append(
                    f"{place}: the prompt has {len(tokens)} tokens; allowed are 1 to task.max_prompt_tokens = "
                    f"{self._limit}; change it, or raise the limit."
                )
                continue
            columns = {name: value for name, value in row.items() if name != self._column}
            text = asked if isinstance(asked, str) else "\n".join(f"{m['role']}: {m['content']}" for m in asked)
            found.append(Prompt(id=str(row.get("id", place)), tokens=tokens, text=text, columns=columns))
        refuse(problems)
        return found

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        """What the reward function gives, or why it gave nothing."""
        return self._scorer(prompt, completions)

    def gold(self, prompt: Prompt) -> None:
        """Unknown: only the reward function knows what is right."""
        del prompt


def read_rows(path: Path, column: str, setting: str = "task.prompt_column") -> list[Row]:
    """(file:line, row) of every non-blank line of a JSONL file; a byte-order mark is skipped.

    Raises:
        SettingsError: with the file and line of every malformed one.
    """
    return json_rows(path, lambda row: _row_problem(row, column, setting))


def _row_problem(row: Any, column: str, setting: str) -> str:
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
