"""What a replay buffer may hold and how it draws: every bound and share, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from tba.buffer_settings import Dedup, Eviction, Sampler

SAMPLERS, EVICTIONS, DEDUPS = get_args(Sampler), get_args(Eviction), get_args(Dedup)

TOTALS = ("capacity", "capacity_tokens", "capacity_bytes")
"""Bounds over all prompts."""
Share = float | tuple[float, float, int]
"""A weight, or one that moves from the first to the second in a line over the steps 0 to the third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `settings.BufferSettings` for what each value means."""

    capacity: int = 100_000
    """Trajectories in total."""
    capacity_per_prompt: int = 100
    """Trajectories of one prompt."""
    capacity_tokens: int | None = None
    """Completion tokens in total."""
    capacity_bytes: int | None = None
    """Bytes in total, as `segments.Segment.bytes_of` counts them."""
    eviction: str = "oldest"
    dedup: str = "exact"
    near_similarity: float = 0.75
    recent_age: int = 1
    """Steps."""
    mix: Mapping[str, Share] = field(default_factory=lambda: {"recent": 1.0})
    reward_temperature: float = 1.0
    max_uses: int | None = None
    max_age: int | None = None
    """Steps."""
    keep_logps: bool = True
    keep_text: bool = True

    def __post_init__(self) -> None:
        for name in ("capacity_per_prompt", *TOTALS):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"buffer.{name} = {value} must be >= 1.")
        for name, known in (("eviction", EVICTIONS), ("dedup", DEDUPS)):
            if getattr(self, name) not in known:
                raise ValueError(f"buffer.{name} = {getattr(self, name)!r} is unknown; known: {', '.join(known)}.")
        ends = [share[:2] if isinstance(share, tuple) else (share, share) for share in self.mix.values()]
        is_drawn = bool(ends) and all(min(at_end) >= 0 and sum(at_end) > 0 for at_end in zip(*ends, strict=True))
        if set(self.mix) - set(SAMPLERS) or not is_drawn:
            raise ValueError(
                f"buffer.mix = {dict(self.mix)} must give {', '.join(SAMPLERS)} shares >= 0, "
                f"one of them > 0 at any step."
            )

    def changed(self, **changes: Any) -> Options:
        """These options with some values replaced; None for `mix` leaves it.

        Raises:
            ValueError: there is no such option, or it may not have the value.
        """
        unknown = set(changes) - {f.name for f in fields(self)}
        if unknown:
            raise ValueError(f"the buffer has no option {sorted(unknown)}; it has {[f.name for f in fields(self)]}.")
        return replace(self, **{name: value for name, value in changes.items() if (name, value) != ("mix", None)})

    def shared_out(self, count: int) -> list[Options]:
        """The options of each of `count` shards: bounds over all prompts in `count` parts, that of a prompt whole."""
        return [
            replace(self, **{
                name: None if total is None else total // count + (shard < total % count)
                for name in TOTALS for total in [getattr(self, name)]
            })
            for shard in range(count)
        ]

    @property
    def samplers(self) -> tuple[str, ...]:
        """Those of the mixture that have a share at some step."""
        return tuple(n for n, s in self.mix.items() if (max(s[:2]) if isinstance(s, tuple) else s) > 0)

    def shares(self, step: int) -> dict[str, float]:
        """The positive shares of the mixture at a step."""
        found: dict[str, float] = {}
        for name, share in self.mix.items():
            if isinstance(share, tuple):
                first, last, steps = share
                done = min(1.0, step / steps) if steps else 1.0
                share = first + (last - first) * done
            if share > 0:
                found[name] = share
        return found
