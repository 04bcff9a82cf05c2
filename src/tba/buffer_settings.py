"""The branch of the settings tree about the replay buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tba.catalog import BUFFER_PRESETS, name_problems
from tba.sections import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

Sampler = Literal["recent", "reward", "uniform", "advantage", "novelty"]
Eviction = Literal["oldest", "lowest_reward", "most_used"]
Dedup = Literal["exact", "near", "none"]


class Course(Section):
    """A number that moves in a line over the first steps, then stays."""

    from_: NonNegativeFloat = Field(alias="from")
    """At step 0."""
    to: NonNegativeFloat
    """From step `steps` on."""
    steps: PositiveInt
    """Optimizer steps."""


class BufferSettings(Section):
    """What the replay buffer keeps and how it is drawn from."""

    preset: str | None = None
    """Named values for the keys of this section that are not given: see docs/buffer.md."""
    capacity: PositiveInt = 100_000
    """Trajectories held in total."""
    capacity_per_prompt: PositiveInt = 100
    """Trajectories held per prompt (the paper's pool size)."""
    capacity_tokens: PositiveInt | None = None
    """Completion tokens held in total; no bound if null."""
    capacity_bytes: PositiveInt | None = None
    """Bytes held in total, as docs/buffer.md counts them; no bound if null."""
    eviction: Eviction = "oldest"
    """Which trajectory leaves when a capacity is exceeded; of equals, the oldest."""
    initial: NonNegativeInt = 0
    """Trajectories searched for before the first step."""
    reuse: PositiveFloat = 1.0
    """Trajectories consumed per trajectory inserted that the trainer may reach before it waits."""
    max_uses: PositiveInt | None = None
    """Times one trajectory may be trained on; then it is evicted as used up."""
    max_age: NonNegativeInt | None = None
    """Oldest age, in steps, that may be consumed; older ones are evicted as too old."""
    recent_age: NonNegativeInt | None = None
    """Largest age, in steps, that counts as recent; 2 x sync_every - 1 if left out."""
    mix: dict[Sampler, NonNegativeFloat | Course] = Field(default_factory=lambda: {"recent": 1.0})
    """Share of groups that each sampler draws: recent, reward, uniform, advantage, novelty. Normalised. A share may
    move in a line: {from: 0.9, to: 0.5, steps: 200}."""
    reward_temperature: PositiveFloat = 1.0
    """Temperature of the reward and advantage samplers, in reward units."""
    dedup: Dedup = "exact"
    """exact: a trajectory replaces copies of the same ids that earlier deliveries left. near: of two whose n-grams
    are `near_similarity` alike, the higher reward stays."""
    near_similarity: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of common 3-grams of ids (Jaccard) from which two completions of a prompt are near copies."""
    shards: PositiveInt = 1
    """Parts that prompts are split into by hash: in async mode a process each; draws are as from one."""
    keep_logps: bool | None = None
    """Keep the log-prob of every token; if false, only their sum, and draws carry its mean at every token. If null,
    keep them where the objective reads them."""
    keep_text: bool = True
    """Keep the text of completions beside their ids."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        """Fills what is not given from the preset."""
        name = given.get("preset") if isinstance(given, Mapping) else None
        if not isinstance(name, str) or name not in BUFFER_PRESETS:
            return given
        return {**BUFFER_PRESETS[name], **given}

    @property
    def shares(self) -> dict[str, float | tuple[float, float, int]]:
        """The mixture as the buffer takes it."""
        return {n: (s.from_, s.to, s.steps) if isinstance(s, Course) else s for n, s in self.mix.items()}


def buffer_problems(buffer: BufferSettings, sync_every: int) -> Iterator[str]:
    """What each key of the branch allows but all together do not, given the steps between publications."""
    if buffer.preset is not None:
        yield from name_problems("buffer.preset", buffer.preset, BUFFER_PRESETS)
    if buffer.initial > buffer.capacity:
        yield (f"buffer.initial = {buffer.initial} exceeds buffer.capacity = {buffer.capacity}, so training "
               f"would never start; lower buffer.initial.")
    if buffer.max_uses is not None and buffer.reuse > buffer.max_uses:
        yield (f"buffer.reuse = {buffer.reuse:g} exceeds buffer.max_uses = {buffer.max_uses}, so the trainer would "
               f"wait for ever; lower buffer.reuse or raise buffer.max_uses.")
    if buffer.max_age is not None and buffer.max_age < sync_every - 1:
        yield (f"buffer.max_age = {buffer.max_age} drops the newest data before the round's last step, whose age is "
               f"trainer.sync_every - 1 = {sync_every - 1}; raise it, or lower trainer.sync_every.")
    ends = [(s.from_, s.to) if isinstance(s, Course) else (s, s) for s in buffer.mix.values()]
    if not all(math.fsum(at_end) > 0 for at_end in zip(*ends, strict=True)) or not ends:
        yield f"buffer.mix = {buffer.shares} has no positive share; give one of recent, reward, uniform."
    alone = [n for n, (first, last) in zip(buffer.mix, ends, strict=True) if max(first, last) > 0] == ["recent"]
    if alone and buffer.recent_age is not None and buffer.recent_age < sync_every - 1:
        yield (f"buffer.recent_age = {buffer.recent_age} leaves nothing recent at the round's last step, when the "
               f"newest data has age trainer.sync_every - 1 = {sync_every - 1}, and buffer.mix draws nothing else; "
               f"raise it, or give uniform a share.")
