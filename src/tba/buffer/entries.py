"""What the buffer holds and what it gives out."""

from __future__ import annotations

from dataclasses import dataclass, field

from tba.records import Prompt, Trajectory


class EmptyBufferError(RuntimeError):
    """Nothing can be drawn: no prompt has a whole group of scored trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One group drawn, and where it came from."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    """K trajectories of the prompt, drawn without replacement."""
    sampler: str
    """recent, reward or uniform."""
    prompt_probability: float
    """Of this prompt, given the sampler and the groups drawn before it in the batch."""
    item_probabilities: tuple[float, ...]
    """[K] of each trajectory to be drawn first."""
    ages: tuple[int, ...]
    """[K] steps."""
    uses: tuple[int, ...]
    """[K] times drawn before."""


@dataclass(slots=True)
class Entry:
    """A trajectory in storage."""

    number: int
    """Place in the order of insertion, over the whole run."""
    trajectory: Trajectory
    uses: int = 0

    @property
    def size(self) -> int:
        """Completion tokens."""
        return len(self.trajectory.completion.tokens)


@dataclass(frozen=True, slots=True)
class Pool:
    """The trajectories of one prompt, oldest first."""

    number: int
    """Place in the order in which prompts were first seen."""
    prompt: Prompt
    entries: dict[int, Entry] = field(default_factory=dict[int, Entry])
    copies: dict[tuple[int, ...], list[int]] = field(default_factory=dict[tuple[int, ...], list[int]])
    """Entry numbers by ids."""
