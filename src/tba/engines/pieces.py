"""Completions that a foreign engine samples piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tba.limits import Limits
from tba.records import Completion, Prompt


class Piece:
    """One completion as it grows."""

    def __init__(self, prompt: Prompt, of_prompt: int, sample: int, longest: int, stop_ids: frozenset[int]) -> None:
        """Sample `sample` of prompt number `of_prompt`, of at most `longest` ids."""
        self.prompt, self.of_prompt, self.sample = prompt, of_prompt, sample
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.behaviour: list[float] = []
        self.versions: list[int] = []
        self._longest, self._stop_ids = longest, stop_ids

    @property
    def room(self) -> int:
        """Ids that it may still get."""
        return self._longest - len(self.ids)

    @property
    def has_stopped(self) -> bool:
        """Whether its last id is one that stops."""
        return bool(self.ids) and self.ids[-1] in self._stop_ids

    def add(self, ids: Sequence[int], logps: Sequence[float], version: int) -> None:
        """Takes further ids, drawn with the weights `version`, with their log-probs.

        Raises:
            ValueError: they are none, too many, or go on after a stop.
        """
        stops = [place for place, id in enumerate(ids[:-1]) if id in self._stop_ids]
        if not 1 <= len(ids) <= self.room or len(ids) != len(logps) or stops:
            raise ValueError(
                f"the engine gave {len(ids)} ids with {len(logps)} log-probs, {len(stops)} of them stops before the "
                f"end, where 1 to {self.room} were asked for."
            )
        self.ids += ids
        self.logps += logps
        self.versions += [version] * len(ids)

    def behave(self, logps: Sequence[float], *, is_greedy: bool) -> None:
        """Log-probs of the ids that were added last become behaviour log-probs, beside the policy's own, of which
        `logps` are those of all ids. Where the likeliest was taken, nothing else could be drawn: they are zero."""
        first = len(self.behaviour)
        self.behaviour += [0.0] * (len(self.ids) - first) if is_greedy else self.logps[first:]
        self.logps[first:] = logps[first:]


class Pieces:
    """All completions of a call."""

    def __init__(
        self, prompts: Sequence[Prompt], num_samples: int, limits: Limits, stop_ids: frozenset[int], max_new_tokens: int
    ) -> None:
        """With a forced stop the id that stops is not sampled: it is added to what has not stopped before."""
        self._num_samples, self._forced_at = num_samples, limits.last
        longest = max_new_tokens if limits.last is None else min(max_new_tokens, limits.last)
        self.all = [
            Piece(prompt, number, sample, longest, stop_ids)
            for number, prompt in enumerate(prompts) for sample in range(num_samples)
        ]

    def open(self) -> list[Piece]:
        """Those that go on."""
        return [piece for piece in self.all if piece.room and not piece.has_stopped]

    def completions(self, decode: Callable[[Sequence[int]], str], forced: int) -> list[list[Completion]]:
        """The finished ones, in the order of their prompts; `forced` is the id that ends one for certain."""
        made: list[Completion] = []
        for piece in self.all:
            if self._forced_at is not None and not piece.has_stopped:
                piece.ids.append(forced)
                piece.logps.append(0.0)
                piece.versions.append(piece.versions[-1])
                if piece.behaviour:
                    piece.behaviour.append(0.0)
            oldest, newest = min(piece.versions), max(piece.versions)
            made.append(Completion(
                tokens=tuple(piece.ids), text=decode(piece.ids), logps=tuple(piece.logps), version=oldest,
                finish="stop" if piece.has_stopped else "length", behaviour_logps=tuple(piece.behaviour),
                token_versions=tuple(piece.versions) if newest > oldest else (),
            ))
        return [made[at : at + self._num_samples] for at in range(0, len(made), self._num_samples)]
