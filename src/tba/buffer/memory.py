"""Storage, mixture, eviction and ledger of the replay buffer."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.entries import Draw, EmptyBufferError, Entry, Pool
from tba.buffer.files import read_files, write_files
from tba.buffer.samplers import draw_by_reward, draw_prompt, draw_uniform
from tba.records import Group, Prompt, Trajectory


class ReplayBuffer:
    """Bounded storage of trajectories by prompt id, with draws that say where they came from.

    Memory is bounded by `capacity` trajectories in total and `capacity_per_prompt` in each pool; beyond
    either, the oldest by insertion is evicted. Delivered = in buffer + evicted + rejected at any moment.
    """

    def __init__(
        self,
        *,
        capacity: int = 100_000,
        capacity_per_prompt: int = 100,
        recent_age: int = 1,
        mix: Mapping[str, float] | None = None,
        reward_temperature: float = 1.0,
        max_uses: int | None = None,
        max_age: int | None = None,
        dedup: str = "exact",
    ) -> None:
        """See `settings.BufferSettings` for each value; `recent_age` and `max_age` are in steps.

        Raises:
            ValueError: a bound below 1, or a mixture without a positive share.
        """
        if capacity < 1 or capacity_per_prompt < 1:
            raise ValueError(
                f"buffer.capacity = {capacity} and buffer.capacity_per_prompt = {capacity_per_prompt} must be >= 1."
            )
        shares = dict(mix or {"recent": 1.0})
        unknown = sorted(set(shares) - {"recent", "reward", "uniform"})
        if unknown or min(shares.values()) < 0 or sum(shares.values()) <= 0:
            raise ValueError(f"buffer.mix = {shares} must give recent, reward, uniform shares >= 0, one of them > 0.")
        self.capacity, self.capacity_per_prompt = capacity, capacity_per_prompt
        self.recent_age, self.max_uses, self.max_age = recent_age, max_uses, max_age
        self.mix, self.reward_temperature = shares, reward_temperature
        self._dedups = dedup == "exact"
        self._entries: dict[int, Pool] = {}
        self._pools: dict[str, Pool] = {}
        self._pool_order: list[str] = []
        self._by_version: dict[int, dict[int, Pool]] = {}
        self._ready: dict[int, list[int]] = {}
        self._next_entry = 0
        self._held_prompts = 0
        self._count = {name: Counter[str]() for name in ("delivered", "evicted", "rejected")}
        self._count_tokens = {name: Counter[str]() for name in ("delivered", "evicted", "rejected")}
        self.consumed = 0
        """Trajectories drawn so far, over the whole run."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_prompts(self) -> int:
        """Prompts with a trajectory in the buffer."""
        return self._held_prompts

    @property
    def inserted(self) -> int:
        """Trajectories that entered the buffer so far."""
        return self._count["delivered"].total() - self._count["rejected"].total()

    @property
    def delivered_tokens(self) -> int:
        """Completion tokens delivered so far, rejected ones included."""
        return self._count_tokens["delivered"].total()

    def add(self, group: Group) -> None:
        """Takes a delivered group in: scored trajectories enter, unscored ones are counted by reason."""
        self._count_delivered(group)
        for lost in group.unscored:
            self._note("rejected", f"unscored: {lost.reason}", len(lost.completion.tokens))
        pool = self._pool_of(group.prompt)
        if self._dedups:
            for ids in dict.fromkeys(t.completion.tokens for t in group.trajectories):
                for number in pool.copies.get(ids, [])[:]:
                    self._evict(number, "duplicate")
        for trajectory in group.trajectories:
            self._insert(pool, trajectory)
        while len(pool.entries) > self.capacity_per_prompt:
            self._evict(next(iter(pool.entries)), "prompt capacity")
        while len(self._entries) > self.capacity:
            self._evict(next(iter(self._entries)), "capacity")

    def reject(self, group: Group, reason: str) -> None:
        """Counts a delivered group that must not be trained on."""
        self._count_delivered(group)
        for completion in group.completions:
            self._note("rejected", reason, len(completion.tokens))

    def sample(self, num_groups: int, group_size: int, *, version: int, rng: np.random.Generator) -> list[Draw]:
        """Groups of `group_size` trajectories of one prompt each, for a trainer at `version`.

        Prompts are drawn without replacement until each has been drawn once, then again; trajectories of
        a group without replacement. Prompts with fewer than `group_size` trajectories are not eligible.
        A sampler of the mixture for which no prompt is eligible leaves its share to the others.

        Fewer groups come back if `max_uses` leaves no prompt eligible on the way.

        Raises:
            EmptyBufferError: no prompt is eligible at all.
        """
        self._evict_too_old(version)
        candidates = self._candidates(group_size, version)
        if not candidates:
            raise EmptyBufferError(
                f"no prompt has {group_size} trajectories to draw a group from: {self.num_prompts} prompts hold "
                f"{len(self)}; delivered {self._count['delivered'].total()}, rejected {dict(self._count['rejected'])}, "
                f"evicted {dict(self._count['evicted'])}."
            )
        drawn: set[int] = set()
        draws: list[Draw] = []
        while candidates and len(draws) < num_groups:
            names = list(candidates)
            shares = np.array([self.mix[name] for name in names])
            name = names[int(rng.choice(len(names), p=shares / shares.sum()))]
            number, chance = draw_prompt(candidates[name], drawn, rng)
            pool = self._pools[self._pool_order[number]]
            draws.append(self._draw_group(name, pool, group_size, version, chance, rng))
            if self._evict_used_up(pool):
                candidates = self._candidates(group_size, version)
        return draws

    def ledger(self) -> dict[str, dict[str, Any]]:
        """Delivered, in buffer, evicted and rejected by reason; in trajectories and in tokens."""
        tokens = sum(pool.entries[number].size for number, pool in self._entries.items())
        return {
            unit: {
                "delivered": count["delivered"].total(),
                "in_buffer": held,
                "evicted": dict(count["evicted"]),
                "rejected": dict(count["rejected"]),
            }
            for unit, count, held in (("trajectories", self._count, len(self)), ("tokens", self._count_tokens, tokens))
        }

    def entries(self) -> Iterator[tuple[Prompt, Entry]]:
        """Everything held, in order of insertion."""
        for number, pool in self._entries.items():
            yield pool.prompt, pool.entries[number]

    # ---- inside ----

    def _count_delivered(self, group: Group) -> None:
        self._count["delivered"]["all"] += len(group.completions)
        self._count_tokens["delivered"]["all"] += group.num_tokens

    def _note(self, what: str, reason: str, tokens: int) -> None:
        self._count[what][reason] += 1
        self._count_tokens[what][reason] += tokens

    def _pool_of(self, prompt: Prompt) -> Pool:
        pool = self._pools.get(prompt.id)
        if pool is None:
            pool = self._pools[prompt.id] = Pool(number=len(self._pool_order), prompt=prompt)
            self._pool_order.append(prompt.id)
        return pool

    def _insert(self, pool: Pool, trajectory: Trajectory) -> None:
        entry = Entry(number=self._next_entry, trajectory=trajectory)
        self._next_entry += 1
        self._store(pool, entry)

    def _store(self, pool: Pool, entry: Entry) -> None:
        completion = entry.trajectory.completion
        self._held_prompts += not pool.entries
        pool.entries[entry.number] = entry
        pool.copies.setdefault(completion.tokens, []).append(entry.number)
        self._entries[entry.number] = pool
        self._by_version.setdefault(completion.version, {})[entry.number] = pool
        for size, ready in self._ready.items():
            if len(pool.entries) == size:
                bisect.insort(ready, pool.number)

    def _evict(self, number: int, reason: str) -> None:
        pool = self._entries.pop(number)
        entry = pool.entries.pop(number)
        self._held_prompts -= not pool.entries
        completion = entry.trajectory.completion
        for index, key in ((pool.copies, completion.tokens), (self._by_version, completion.version)):
            left: Any = index[key]  # type: ignore[index]
            left.remove(number) if isinstance(left, list) else left.pop(number)
            if not left:
                del index[key]  # type: ignore[arg-type]
        for size, ready in self._ready.items():
            if len(pool.entries) == size - 1:
                del ready[bisect.bisect_left(ready, pool.number)]
        self._note("evicted", reason, entry.size)

    def _evict_too_old(self, version: int) -> None:
        if self.max_age is not None:
            for old in sorted(v for v in self._by_version if v < version - self.max_age):
                for number in list(self._by_version[old]):
                    self._evict(number, "too old")

    def _evict_used_up(self, pool: Pool) -> bool:
        if self.max_uses is None:
            return False
        spent = [e.number for e in pool.entries.values() if e.uses >= self.max_uses]
        for number in spent:
            self._evict(number, "used up")
        return bool(spent)

    def _candidates(self, group_size: int, version: int) -> dict[str, list[int]]:
        """Numbers of the eligible pools, ascending, for each sampler that has any."""
        found: dict[str, list[int]] = {}
        for name, share in self.mix.items():
            if share > 0:
                numbers = self._recent_pools(group_size, version) if name == "recent" else self._ready_pools(group_size)
                if numbers:
                    found[name] = numbers
        return found

    def _ready_pools(self, group_size: int) -> list[int]:
        if group_size not in self._ready:
            self._ready[group_size] = sorted(p.number for p in self._pools.values() if len(p.entries) >= group_size)
        return self._ready[group_size]

    def _recent_pools(self, group_size: int, version: int) -> list[int]:
        held = Counter(
            pool.number
            for sampled, entries in self._by_version.items() if sampled >= version - self.recent_age
            for pool in entries.values()
        )
        return sorted(number for number, count in held.items() if count >= group_size)

    def _items(self, sampler: str, pool: Pool, version: int) -> list[Entry]:
        """The pool's entries that the sampler may draw."""
        oldest = version - self.recent_age if sampler == "recent" else None
        return [e for e in pool.entries.values() if oldest is None or e.trajectory.completion.version >= oldest]

    def _draw_group(
        self, sampler: str, pool: Pool, size: int, version: int, chance: float, rng: np.random.Generator
    ) -> Draw:
        entries = self._items(sampler, pool, version)
        if sampler == "reward":
            places, probabilities = draw_by_reward(entries, size, rng, self.reward_temperature)
        else:
            places, probabilities = draw_uniform(entries, size, rng)
        chosen = [entries[place] for place in places]
        draw = Draw(
            prompt=pool.prompt,
            trajectories=tuple(e.trajectory for e in chosen),
            sampler=sampler,
            prompt_probability=chance,
            item_probabilities=tuple(probabilities),
            ages=tuple(version - e.trajectory.completion.version for e in chosen),
            uses=tuple(e.uses for e in chosen),
        )
        for entry in chosen:
            entry.uses += 1
        self.consumed += size
        return draw

    # ---- saving ----

    def save(self, path: Path) -> None:
        """Writes contents, order and counters into the folder `path`, which must exist."""
        prompts = [self._pools[key].prompt for key in self._pool_order]
        state = {
            "next_entry": self._next_entry,
            "consumed": self.consumed,
            "count": {name: dict(counter) for name, counter in self._count.items()},
            "count_tokens": {name: dict(counter) for name, counter in self._count_tokens.items()},
        }
        write_files(path, (entry for _, entry in self.entries()), prompts, state)

    def load(self, path: Path) -> ReplayBuffer:
        """Replaces the contents by those that `save` wrote into `path`, and returns the buffer.

        Raises:
            ValueError: the files are of another schema version.
        """
        state, prompts, entries = read_files(path)
        self._entries, self._by_version, self._ready = {}, {}, {}
        self._pools, self._pool_order, self._held_prompts = {}, [], 0
        for prompt in prompts:
            self._pool_of(prompt)
        for prompt_id, entry in entries:
            self._store(self._pools[prompt_id], entry)
        self._next_entry, self.consumed = state["next_entry"], state["consumed"]
        self._count = {name: Counter(count) for name, count in state["count"].items()}
        self._count_tokens = {name: Counter(count) for name, count in state["count_tokens"].items()}
        return self
