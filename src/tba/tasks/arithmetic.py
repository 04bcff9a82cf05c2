"""Problems `a±b±c=` answered with one line of working and a result."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from tba.records import Completion, Prompt
from tba.settings import SettingsError, TaskSettings
from tba.tasks.protocol import Encode

_PROBLEM = re.compile(r"(\d+)([+-])(\d+)([+-])(\d+)=")
_SIGN = {"+": 1, "-": -1}


def solve(text: str) -> tuple[str, int]:
    """The working and the result of a problem: `3+15-7=` gives `("18-7", 11)`."""
    match = _PROBLEM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a problem of the form a±b±c=.")
    a, first, b, second, c = match.groups()
    so_far = int(a) + _SIGN[first] * int(b)
    return f"{so_far}{second}{c}", so_far + _SIGN[second] * int(c)


class Arithmetic:
    """Every problem with operands 0..max_value, split once by `task.seed`; reward 1 for the exact result."""

    characters = "0123456789+-=\n"

    def __init__(self, settings: TaskSettings, *, max_new_tokens: int, score_limit_s: float) -> None:
        """Uses task.max_value, task.held_out and task.seed; the limits do not concern it."""
        del max_new_tokens, score_limit_s
        top = settings.max_value
        problems = [
            f"{a}{p}{b}{q}{c}="
            for a in range(top + 1) for p in "+-" for b in range(top + 1) for q in "+-" for c in range(top + 1)
        ]
        if settings.held_out >= len(problems):
            raise SettingsError([
                f"task.held_out = {settings.held_out} leaves nothing of the {len(problems)} problems with "
                f"task.max_value = {top}; lower it."
            ])
        random.Random(f"arithmetic {settings.seed}").shuffle(problems)
        self._held_out, self._training = problems[: settings.held_out], problems[settings.held_out :]

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """Training problems, in an order that `task.seed` fixes."""
        return [_prompt(text, encode) for text in self._training]

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """The problems that never occur in training."""
        return [_prompt(text, encode) for text in self._held_out]

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        """1 if the completion stopped by itself and its last line is the exact result, else 0."""
        right = str(prompt.columns["result"])
        return [
            float(c.finish == "stop" and c.text.count("\n") == 1 and c.text.split("\n")[1] == right)
            for c in completions
        ]

    def gold(self, prompt: Prompt) -> str:
        """Right working and right result."""
        return f"{prompt.columns['working']}\n{prompt.columns['result']}"

    def answer_of(self, prompt: Prompt, completion: Completion) -> str | None:
        """The last line, if there are two."""
        del prompt
        lines = completion.text.split("\n")
        return lines[1] if len(lines) == 2 else None

    def same_answer(self, prompt: Prompt, one: str, other: str) -> bool:
        """Answers are one if their text is."""
        del prompt
        return one == other

    @property
    def varies(self) -> bool:
        """The two signs of a problem are its template."""
        return True

    def variants(self, prompts: Sequence[Prompt], number: int, encode: Encode) -> list[list[Prompt]]:
        """`number` other held-out problems with the signs of each prompt; none where there are fewer."""
        found: list[list[Prompt]] = []
        for prompt in prompts:
            signs = _signs(prompt.id)
            others = [text for text in self._held_out if _signs(text) == signs and text != prompt.id]
            rng = random.Random(f"variants {prompt.id}")
            chosen = rng.sample(others, number) if len(others) >= number else []
            found.append([_prompt(text, encode) for text in chosen])
        return found

    def demonstration(self, prompt: Prompt, rng: random.Random, wrong_share: float) -> str:
        """What a careless teacher writes: right working, and a wrong result in `wrong_share` of the cases."""
        result = int(str(prompt.columns["result"]))
        if rng.random() < wrong_share:
            result += rng.choice((-3, -2, -1, 1, 2, 3))
        return f"{prompt.columns['working']}\n{result}"


def _signs(text: str) -> str:
    return re.sub(r"\d+", "", text)


def _prompt(text: str, encode: Encode) -> Prompt:
    working, result = solve(text)
    return Prompt(id=text, tokens=encode(text), text=text, columns={"working": working, "result": result})
