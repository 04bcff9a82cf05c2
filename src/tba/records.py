"""Prompt, Completion, Trajectory and Group: what travels between the rooms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal, TypeVar

Finish = Literal["stop", "length"]
R = TypeVar("R")


def _travels(record: type[R]) -> type[R]:
    """Pickles a frozen record as the tuple of its fields, in half the time that dataclasses take."""
    names = [f.name for f in fields(record)]  # type: ignore[arg-type]
    values = attrgetter(*names)

    def reduce(self: R) -> tuple[Any, ...]:
        return unchecked, (record, *values(self))

    record.__reduce__ = reduce  # type: ignore[method-assign]
    _PUT[record] = [getattr(record, name).__set__ for name in names]
    return record


_PUT: dict[type, list[Any]] = {}
"""By record: what sets each of its fields, frozen or not."""


def unchecked(record: type[R], *values: Any) -> R:
    """A record of this module from its fields in order, all of them, which were checked when it was first made."""
    made = object.__new__(record)
    for put, value in zip(_PUT[record], values, strict=True):
        put(made, value)
    return made


@_travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a task."""

    id: str
    """Unique within the task; groups are keyed by it, never by the text."""
    tokens: tuple[int, ...]
    """[T] token ids, templated once, with the BOS that the model's template defines."""
    text: str
    """The same prompt as text, without special tokens, for people and reward functions."""
    columns: Mapping[str, object] = field(default_factory=dict[str, object])
    """The task's own columns (gold answer, level, ...)."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"prompt {self.id!r} has no tokens; give it text or a BOS token.")


@_travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled ids after a prompt, as the engine drew them."""

    tokens: tuple[int, ...]
    """[T] sampled ids, prompt excluded, stop token included."""
    text: str
    """The ids decoded once, special tokens removed. Untrusted."""
    logps: tuple[float, ...]
    """[T] nats, of each id under weights `version`, at `policy.temperature`, over the full vocabulary."""
    version: int
    """Weights that sampled it, as optimizer steps; the oldest if it straddles an update."""
    finish: Finish
    """`stop` if the stop token was sampled, `length` if the limit cut it."""
    behaviour_logps: tuple[float, ...] = ()
    """[T] nats, under the distribution it was drawn from; empty where that is the one of `logps`."""
    token_versions: tuple[int, ...] = ()
    """[T] version of each token; empty where all equal `version`."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"a completion has at least its stop token; this one ({self.finish!r}) has none.")
        for name in ("logps", "behaviour_logps", "token_versions"):
            values = getattr(self, name)
            if len(values) != len(self.tokens) and (values or name == "logps"):
                raise ValueError(f"{name} has {len(values)} entries for {len(self.tokens)} tokens.")
        if self.token_versions and min(self.token_versions) != self.version:
            raise ValueError(f"version is {self.version}, the oldest token's is {min(self.token_versions)}.")

    @property
    def logp(self) -> float:
        """Log p(tokens | prompt), nats, stop token included."""
        return math.fsum(self.logps)


@_travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A completion with its reward and its reference log-prob."""

    prompt_id: str
    completion: Completion
    reward: float
    """Reward units; finite."""
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the reward is made of, by name."""
    ref_logp: float
    """Log p_ref(tokens | prompt), nats, at `policy.temperature`, stop token included; finite."""
    ref_version: int = 0
    """Version of the reference that gave `ref_logp`."""
    ref_logps: tuple[float, ...] = ()
    """[T] nats, `ref_logp` by token; kept only where the objective reads it, else empty."""

    def __post_init__(self) -> None:
        if len(self.ref_logps) not in (0, len(self.completion.tokens)):
            raise ValueError(f"ref_logps has {len(self.ref_logps)} entries for {len(self.completion.tokens)} tokens.")
        if not (math.isfinite(self.reward) and math.isfinite(self.ref_logp)):
            raise ValueError(
                f"reward {self.reward} and ref_logp {self.ref_logp} of a trajectory of prompt "
                f"{self.prompt_id!r} must be finite; record it as unscored instead."
            )


@_travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """A completion that no reward could be given to: no gradient, not in the group mean."""

    completion: Completion
    reason: str
    """What went wrong: one of `rewards.functions.Failure.reason`, `ref_non_finite` or `logp_non_finite`."""
    detail: str = ""
    """What the scorer said, cut to 200 characters. Untrusted."""


@_travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A prompt handed to a searcher, with all that its completions' randomness depends on."""

    prompt: Prompt
    visit: int
    attempt: int
    number: int
    """Place in the run's prompt order; unique per visit."""
    round: int
    """The round this prompt is searched for."""


@_travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What one lease of a prompt delivers: its scored and its unscored completions."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    unscored: tuple[Unscored, ...] = ()
    version: int = 0
    """Weights version that the searcher's engine held when the completions were dispatched."""
    digest: str = ""
    """Digest of those weights, recomputed by the searcher from what its engine holds."""
    number: int = 0
    """Number of the lease that it answers."""
    attempt: int = 0
    """Attempt of that lease."""
    searcher: str = "searcher-0"
    run_attempt: int = 0
    """Restarts of the run before this group was leased."""
    echoes: tuple[tuple[int, str], ...] = ()
    """(version, digest) of all further weights that its tokens were sampled with, recomputed in the same way."""

    def __post_init__(self) -> None:
        strays = {t.prompt_id for t in self.trajectories} - {self.prompt.id}
        if strays:
            raise ValueError(f"group of prompt {self.prompt.id!r} holds trajectories of {sorted(strays)}.")

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Everything delivered, scored and unscored."""
        return (*(t.completion for t in self.trajectories), *(u.completion for u in self.unscored))

    @property
    def num_tokens(self) -> int:
        """Completion tokens delivered, scored and unscored."""
        return sum(len(completion.tokens) for completion in self.completions)


def visible(text: str) -> str:
    """Untrusted text with everything that could steer a terminal shown as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
