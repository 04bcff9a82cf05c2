"""What tasks of a user's own share: prompts of rows, and reward functions looked at beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tba.preference_settings import RewardSettings
from tba.records import Prompt
from tba.rewards.parts import WeightedSum, reward_of
from tba.rewards.sandbox import TimedScorer
from tba.rewards.shapes import MESSAGES
from tba.tasks.lines import Row, refuse
from tba.tasks.protocol import Encode


def prompts_of(rows: Sequence[Row], column: str, encode: Encode, limit: int, *, id_column: str | None) -> list[Prompt]:
    """The prompts of rows, whose `column` is text or chat messages.

    Raises:
        SettingsError: with the place of every prompt that is empty, or longer than `limit` tokens.
    """
    found: list[Prompt] = []
    problems: list[str] = []
    for place, row in rows:
        tokens = encode(row[column])
        if not 1 <= len(tokens) <= limit:
            problems.append(
                f"{place}: the prompt has {len(tokens)} tokens; allowed are 1 to task.max_prompt_tokens = "
                f"{limit}; change it, or raise the limit."
            )
            continue
        found.append(prompt_of(place, row, column, tokens, id_column))
    refuse(problems)
    return found


def prompt_of(place: str, row: dict[str, Any], column: str, tokens: tuple[int, ...], id_column: str | None) -> Prompt:
    """The prompt of one row, with its other columns; of a chat, with its messages."""
    asked = row[column]
    columns = {name: value for name, value in row.items() if name != column}
    if isinstance(asked, str):
        text = asked
    else:
        columns[MESSAGES] = [dict(message) for message in asked]
        text = "\n".join(f"{m['role']}: {m['content']}" for m in asked)
    name = None if id_column is None else row.get(id_column)
    return Prompt(id=place if name is None else str(name), tokens=tokens, text=text, columns=columns)


class OwnRewards:
    """The reward of a user's functions, models and endpoints, and what is wrong with the functions."""

    def __init__(
        self, reward: str | None, rewards: Sequence[RewardSettings], *, limit_s: float,
        carried: TimedScorer | None = None,
    ) -> None:
        """One function `reward`, or the weighted sum of `rewards`, whose functions may be those of `carried`.

        `limit_s` bounds each call of a function, in seconds.
        """
        self._rewards, self._limit_s, self._carried = rewards, limit_s, carried
        self._alone = None if reward is None else TimedScorer(reward, limit_s=limit_s)
        self.score: TimedScorer | WeightedSum = (
            reward_of(rewards, limit_s=limit_s, carried=carried) if self._alone is None else self._alone
        )
        self.notes: list[str] = []
        """Why a trial was not scored, one line a function."""

    def look(self, prompt: Prompt) -> list[str]:
        """What is wrong with the functions: found by their shapes, and by what they return for made-up completions.

        A function that raises is no mistake: such completions stay unscored. It is noted.
        """
        problems: list[str] = []
        self.notes = []
        for scorer, name, shown in self._functions():
            problem, unscored = scorer.problem(list(prompt.columns), name=name), ""
            if not problem:
                problem, unscored = scorer.tried(prompt, name=name)
            if problem:
                problems.append(problem if shown in problem else f"{shown}: {problem}")
            if unscored:
                self.notes.append(f"{shown} gave a made-up completion no reward ({unscored}); such ones stay unscored")
            if self._carried is None and self._alone is None:
                scorer.close()
        return problems

    def _functions(self) -> list[tuple[TimedScorer, str, str]]:
        """Scorer, name in it, and what messages call it, of each function."""
        if self._alone is not None:
            return [(self._alone, "", "task.reward")]
        found = []
        for number, reward in enumerate(self._rewards):
            if reward.function is None:
                continue
            if self._carried is not None:
                found.append((self._carried, reward.function, f"reward function {reward.function!r}"))
            else:
                scorer = TimedScorer(reward.function, limit_s=self._limit_s)
                found.append((scorer, "", f"task.rewards.{number}.function = {reward.function!r}"))
        return found

    def close(self) -> None:
        """Ends the processes that score."""
        self.score.close()
        if self._carried is not None:
            self._carried.close()
