"""A task so small that every completion can be listed and the exact target written down."""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Sequence
from typing import Any

from tba.records import Completion, Prompt
from tba.settings import TaskSettings
from tba.tasks.protocol import Encode


class Enumerable:
    """Prompts are words over `a`, `b`, ... of one length; a completion is any sequence of ids.

    One length, so that no prompt with the start of a completion reads like another prompt.
    Special ids may be sampled too and count as themselves, so that a mask taken from `== pad` shows.
    The reward of every (prompt, ids) is a fixed normal draw of standard deviation `task.reward_scale`.
    """

    def __init__(self, settings: TaskSettings, *, max_new_tokens: int, score_limit_s: float) -> None:
        """Uses task.prompts, task.symbols, task.reward_scale and task.seed."""
        del score_limit_s
        self.characters = string.ascii_lowercase[: settings.symbols]
        length = 1
        while settings.symbols**length < settings.prompts and settings.symbols > 1:
            length += 1
        words = ("".join(letters) for letters in itertools.product(self.characters, repeat=length))
        self._words = list(itertools.islice(words, settings.prompts))
        self._seed, self._scale, self._limit = settings.seed, settings.reward_scale, max_new_tokens

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """One prompt per word."""
        return [Prompt(id=word, tokens=encode(word), text=word) for word in self._words]

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """The same words: the question here is the distribution, not generalisation."""
        return self.prompts(encode)

    def reward(self, prompt_id: str, tokens: Sequence[int]) -> float:
        """The fixed reward of a completion's ids."""
        return random.Random(f"enumerable {self._seed} {prompt_id} {tuple(tokens)}").gauss(0.0, self._scale)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        """The fixed reward of each completion."""
        return [self.reward(prompt.id, c.tokens) for c in completions]

    def gold(self, prompt: Prompt) -> None:
        """No completion has full marks: each has its own reward."""
        del prompt

    def completions(self, vocabulary: int, stop: int) -> list[tuple[int, ...]]:
        """Every completion: ids up to and with the stop token, or as many as the limit allows without it."""
        others = [token for token in range(vocabulary) if token != stop]
        ended = [
            (*ids, stop) for length in range(self._limit) for ids in itertools.product(others, repeat=length)
        ]
        return ended + list(itertools.product(others, repeat=self._limit))


def log_target(log_reference: Sequence[float], rewards: Sequence[float], beta: float) -> tuple[list[float], float]:
    """Log of pi* ~ pi_ref exp(r / beta) over listed completions, and log Z, in nats (DESIGN section 4).

    `log_reference` and `rewards` list the same completions, all of them.
    """
    raw = [lp + r / beta for lp, r in zip(log_reference, rewards, strict=True)]
    top = max(raw)
    log_z = top + math.log(math.fsum(math.exp(x - top) for x in raw))
    return [x - log_z for x in raw], log_z
