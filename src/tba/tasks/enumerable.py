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

FIRST_LETTER = 3
"""Id of `a` in a vocabulary made from scratch: pad, bos and eos come first."""


class Enumerable:
    """Prompts are words over `a`, `b`, ... of one length; a completion is any sequence of ids.

    One length, so that no prompt with the start of a completion reads like another prompt.
    Special ids may be sampled too and count as themselves, so that a mask taken from `== pad` shows.
    `task.kind` says what is rewarded. `random`: every (prompt, ids), by a fixed normal draw of standard deviation
    `task.reward_scale`. Otherwise a few *modes* of each prompt, by `task.reward_scale` each, and nothing else:
    one for `one_mode` and `sparse`, `task.modes` for `many_modes`. A mode has the greatest length, and its ids
    are those of the letters in a vocabulary made from scratch.
    """

    def __init__(self, settings: TaskSettings, *, max_new_tokens: int, score_limit_s: float) -> None:
        """Uses task.kind, task.modes, task.prompts, task.symbols, task.reward_scale and task.seed."""
        del score_limit_s
        self.characters = string.ascii_lowercase[: settings.symbols]
        length = 1
        while settings.symbols**length < settings.prompts and settings.symbols > 1:
            length += 1
        words = ("".join(letters) for letters in itertools.product(self.characters, repeat=length))
        self._words = list(itertools.islice(words, settings.prompts))
        self._seed, self._scale, self._limit = settings.seed, settings.reward_scale, max_new_tokens
        self._is_random = settings.kind == "random"
        count = settings.modes if settings.kind == "many_modes" else 1
        self._modes = {} if self._is_random else {word: self._draw_modes(word, count) for word in self._words}

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """One prompt per word."""
        return [Prompt(id=word, tokens=encode(word), text=word) for word in self._words]

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """The same words: the question here is the distribution, not generalisation."""
        return self.prompts(encode)

    def reward(self, prompt_id: str, tokens: Sequence[int]) -> float:
        """The fixed reward of a completion's ids."""
        if not self._is_random:
            return self._scale if tuple(tokens) in self._modes[prompt_id] else 0.0
        return random.Random(f"enumerable {self._seed} {prompt_id} {tuple(tokens)}").gauss(0.0, self._scale)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        """The fixed reward of each completion."""
        return [self.reward(prompt.id, c.tokens) for c in completions]

    def gold(self, prompt: Prompt) -> None:
        """No completion has full marks: each has its own reward."""
        del prompt

    def modes(self, prompt_id: str) -> frozenset[tuple[int, ...]]:
        """The rewarded completions of a prompt; none for kind `random`, where each has its own reward."""
        return self._modes.get(prompt_id, frozenset())

    def _draw_modes(self, word: str, count: int) -> frozenset[tuple[int, ...]]:
        """`count` distinct completions of letters only, as ids."""
        letters = len(self.characters)
        places = random.Random(f"modes {self._seed} {word}").sample(range(letters**self._limit), count)
        return frozenset(
            tuple(FIRST_LETTER + place // letters**at % letters for at in range(self._limit)) for place in places
        )

    def completions(self, vocabulary: int, stop: int) -> list[tuple[int, ...]]:
        """Every completion: ids up to and with the stop token, or as many as the limit allows without it."""
        return listed(vocabulary, stop, longest=self._limit)


def listed(
    vocabulary: int, stop: int, *, longest: int, shortest: int = 0, is_forced: bool = False
) -> list[tuple[int, ...]]:
    """Every completion of at most `longest` ids, stop token included: ended ones, then those that the limit cuts.

    An ended one has `shortest` ids or more before its stop token. With `is_forced` none is cut.
    """
    others = [token for token in range(vocabulary) if token != stop]
    ended = [
        (*ids, stop) for length in range(shortest, longest) for ids in itertools.product(others, repeat=length)
    ]
    return ended if is_forced else ended + list(itertools.product(others, repeat=longest))


def log_target(
    log_reference: Sequence[float], rewards: Sequence[float], beta: float, prior: float = 1.0
) -> tuple[list[float], float]:
    """Log of pi* ~ pi_ref^prior exp(r / beta) over listed completions, and log Z, in nats.

    `log_reference` and `rewards` list the same completions, all of them.
    """
    raw = [prior * lp + r / beta for lp, r in zip(log_reference, rewards, strict=True)]
    top = max(raw)
    log_z = top + math.log(math.fsum(math.exp(x - top) for x in raw))
    return [x - log_z for x in raw], log_z
