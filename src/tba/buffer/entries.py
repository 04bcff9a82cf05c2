"""What the buffer holds and what it gives out."""

from __future__ import annotations

from dataclasses import dataclass

from tba.records import Prompt, Trajectory


class EmptyBufferError(RuntimeError):
    """Nothing can be drawn: no prompt has a whole group of scored trajectories."""


class TooOldError(RuntimeError):
    """A draw holds what is older than the settings allow: a fault of the buffer, never of the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One group drawn, and where it came from."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    """K trajectories of the prompt, drawn without replacement."""
    sampler: str
    """recent, reward, uniform, advantage or novelty."""
    prompt_probability: float
    """Of this prompt, given the sampler and the groups drawn before it in the batch."""
    item_probabilities: tuple[float, ...]
    """[K] of each trajectory to be drawn first."""
    ages: tuple[int, ...]
    """[K] steps."""
    uses: tuple[int, ...]
    """[K] times drawn before."""
    numbers: tuple[int, ...] = ()
    """[K] places in the order of insertion, over the whole run: what names a trajectory in the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A trajectory in storage, as it is at this moment."""

    number: int
    """Place in the order of insertion, over the whole run."""
    trajectory: Trajectory
    uses: int
    """Times drawn."""
