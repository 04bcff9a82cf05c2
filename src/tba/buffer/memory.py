"""The replay buffer: what enters, what leaves and why, what is drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.copies import Copies, Counts, NearCopies, digests_of
from tba.buffer.entries import Draw, EmptyBufferError, Entry
from tba.buffer.ledger import Ledger, Tally, fairness, length_class, nothing_to_draw, served
from tba.buffer.options import Options
from tba.buffer.rows import Pool
from tba.buffer.samplers import Pick, advantage_shifts, draw_uniform, draw_weighted, pick_prompts
from tba.buffer.storage import TREES, Storage
from tba.records import Group, Prompt, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A group that was drawn, before its trajectories are read."""

    prompt: Prompt
    pool: int
    rows: list[int]
    lengths: list[int]
    trajectories: list[Trajectory]
    """Empty where they may still be read when the whole batch has been drawn."""
    provenance: dict[str, Any]
    """Fields of the draw."""


def may_enter(trajectory: Trajectory) -> bool:
    """Whether its numbers are finite."""
    return math.isfinite(trajectory.reward) and math.isfinite(trajectory.ref_logp)


class ReplayBuffer:
    """Bounded storage of trajectories by prompt id, with draws that say where they came from.

    Delivered = in buffer + evicted + rejected at any moment. A draw, an addition and an eviction cost the
    logarithm of what is held.
    """

    def __init__(self, options: Options | None = None, **changes: Any) -> None:
        """`options`, or their defaults, with `changes`: `ReplayBuffer(capacity=1000)`.

        Raises:
            ValueError: a bound below 1, an unknown name, or a mixture without a positive share.
        """
        self.options = options = (options or Options()).changed(**changes)
        self.consumed = 0
        """Trajectories drawn so far, over the whole run."""
        self.unmet = Counter[str]()
        """Groups of the last batch that a sampler without an eligible prompt left to the others, by its name."""
        self._files: Any = None
        self._offered = 0
        self._empty()

    def _empty(self) -> None:
        options = self.options
        self.storage = Storage(
            samplers=options.samplers, temperature=options.reward_temperature, eviction=options.eviction,
            keeps_logps=options.keep_logps, keeps_text=options.keep_text,
        )
        self.fates, self.prompt_sums, self.length_sums = Ledger(), Tally(), Tally()
        self._copies = Copies(self.storage.rows) if options.dedup == "exact" else None
        self._counts = Counts() if "novelty" in options.samplers else None
        self._near = NearCopies(options.near_similarity) if options.dedup == "near" else None

    def __len__(self) -> int:
        return self.storage.count

    @property
    def num_prompts(self) -> int:
        """Prompts with a trajectory in the buffer."""
        return self.storage.num_prompts

    @property
    def counted_bytes(self) -> int:
        """Bytes held, as docs/buffer.md counts them."""
        return self.storage.bytes

    @property
    def inserted(self) -> int:
        """Trajectories that entered the buffer so far."""
        return self.fates.total("delivered") - self.fates.total("rejected")

    @property
    def delivered_tokens(self) -> int:
        """Completion tokens delivered so far, rejected ones included."""
        return self.fates.total("delivered", "tokens")

    # ---- coming in ----

    def add(self, group: Group) -> None:
        """Takes a delivered group in: scored trajectories enter, unscored ones are counted by reason."""
        pool = self.storage.pool_of(group.prompt)
        self._count_delivered(pool, group)
        for lost in group.unscored:
            self.fates.note("rejected", f"unscored: {lost.reason}", len(lost.completion.tokens))
        entering: list[Trajectory] = []
        for trajectory in group.trajectories:
            if may_enter(trajectory):
                entering.append(trajectory)
            else:
                self.fates.note("rejected", "non-finite", len(trajectory.completion.tokens))
        if entering:
            self._insert(pool, entering)
            self._keep_bounds(pool)

    def reject(self, group: Group, reason: str) -> None:
        """Counts a delivered group that must not be trained on."""
        self._count_delivered(self.storage.pool_of(group.prompt), group)
        for completion in group.completions:
            self.fates.note("rejected", reason, len(completion.tokens))

    def _count_delivered(self, pool: Pool, group: Group) -> None:
        completions = group.completions
        self.fates.note("delivered", "all", group.num_tokens, len(completions))
        self.prompt_sums.add(pool.number, delivered=len(completions))
        for length, times in Counter(len(completion.tokens) for completion in completions).items():
            self.length_sums.add(length_class(length), delivered=times)

    def _insert(self, pool: Pool, entering: list[Trajectory]) -> None:
        storage, count = self.storage, len(entering)
        digests, copies = [0] * count, [0] * count
        lengths = [len(t.completion.tokens) for t in entering]
        ids = np.fromiter(chain.from_iterable(t.completion.tokens for t in entering), np.int32, sum(lengths))
        if self._copies is not None or self._counts is not None:
            digests = digests_of(pool.number, ids, lengths)
        if self._copies is not None:
            for one in dict.fromkeys(digests):
                for row in reversed(self._copies.of(one)):
                    self._evict(row, "duplicate")
        if self._counts is not None:
            copies = [self._counts.add(one) for one in digests]
        rows = storage.insert(pool, entering, ids, digests, copies)
        by_class: dict[int, list[float]] = {}
        for length, trajectory in zip(lengths, entering, strict=True):
            by_class.setdefault(length_class(length), []).append(trajectory.reward)
        for place, rewards in by_class.items():
            self.length_sums.add(place, accepted=len(rewards), reward=sum(rewards))
        self.prompt_sums.add(pool.number, accepted=count, reward=sum(t.reward for t in entering))
        if self._copies is not None:
            for row in rows:
                self._copies.add(row)
        if self._near is not None:
            self._drop_near_copies(self._near, pool, rows)

    def _drop_near_copies(self, near: NearCopies, pool: Pool, rows: list[int]) -> None:
        """Of a newcomer and an earlier near copy the higher reward stays; of equals, the newcomer."""
        storage, staying = self.storage, list[int]()
        for row in rows:
            ids, stays = storage.ids(row), True
            for other in near.candidates(pool.number, ids):
                if not near.near(ids, storage.ids(other)):
                    continue
                if storage.rows.reward[other] > storage.rows.reward[row]:
                    stays = False
                else:
                    self._evict(other, "near duplicate")
            if stays:
                staying.append(row)
            else:
                self._evict(row, "near duplicate", is_noted=False)
        for row in staying:
            near.add(row, storage.rows.number[row], pool.number, storage.ids(row))

    # ---- going out ----

    def _evict(self, row: int, reason: str, *, is_noted: bool = True) -> None:
        """Removes a row; `is_noted` tells whether it may be found as a near copy."""
        storage = self.storage
        rows = storage.rows
        if self._copies is not None:
            self._copies.remove(row)
        if self._counts is not None:
            self._counts.remove(rows.digest[row])
        if self._near is not None and is_noted:
            self._near.remove(row, rows.number[row], rows.pool[row], storage.ids(row))
        self.fates.note("evicted", reason, rows.length[row])
        storage.remove(row)

    def _keep_bounds(self, pool: Pool) -> None:
        storage, options = self.storage, self.options
        while len(pool.rows) > options.capacity_per_prompt:
            self._evict(storage.first_out(pool), "prompt capacity")
        while storage.count > options.capacity:
            self._evict(storage.first_out(), "capacity")
        while options.capacity_tokens is not None and storage.tokens > options.capacity_tokens:
            self._evict(storage.first_out(), "token capacity")
        while options.capacity_bytes is not None and storage.bytes > options.capacity_bytes:
            self._evict(storage.first_out(), "byte capacity")

    def _evict_too_old(self, version: int) -> None:
        if self.options.max_age is not None:
            oldest = version - self.options.max_age
            numbers = self.storage.rows.number
            for old in sorted(v for v in self.storage.versions if v < oldest):
                for row in self.storage.rows_of_version(old):
                    self._evict(row, "too old" if numbers[row] < self._offered else "came too old")

    # ---- drawing ----

    def sample(self, num_groups: int, group_size: int, *, version: int, rng: np.random.Generator) -> list[Draw]:
        """Groups of `group_size` trajectories of one prompt each, for a trainer at `version`.

        Prompts are drawn without replacement until each has been drawn once, then again; trajectories of
        a group without replacement. Prompts with fewer than `group_size` trajectories are not eligible.
        A sampler of the mixture for which no prompt is eligible leaves its share to the others, and is
        counted in `unmet`.

        Fewer groups come back if `max_uses` leaves no prompt eligible on the way.

        Raises:
            EmptyBufferError: no prompt is eligible at all.
        """
        self.advance(version)
        storage, shares = self.storage, self.options.shares(version)
        eligible = {
            name: storage.recent_for(group_size) if name == "recent" else storage.ready_for(group_size)
            for name in shares
        }
        self.unmet = Counter()
        with closing(pick_prompts(shares, eligible, self.unmet, rng)) as picks:
            drawn = [self._draw_group(pick, group_size, version, rng) for pick in islice(picks, num_groups)]
        if not drawn:
            raise EmptyBufferError(nothing_to_draw(group_size, self.num_prompts, len(self), self.fates))
        return self._give_out(drawn)

    def advance(self, version: int) -> None:
        """Evicts what is too old for a trainer at `version`, and moves the window of what is recent.

        What no draw could have taken, since it was too old at the first after it came, is counted apart.
        """
        storage, options = self.storage, self.options
        self._evict_too_old(version)
        self._offered = storage.next_number
        storage.advance(version - options.recent_age)
        storage.forget_versions(version - max(options.recent_age, options.max_age or 0))

    def sample_from(
        self, picks: Sequence[Pick], group_size: int, *, version: int, rng: np.random.Generator
    ) -> list[Draw]:
        """One group from each prompt picked, which must be eligible; `advance` comes first."""
        return self._give_out([self._draw_group(pick, group_size, version, rng) for pick in picks])

    def _draw_group(self, pick: Pick, size: int, version: int, rng: np.random.Generator) -> Chosen:
        storage, pool, sampler = self.storage, self.storage.pools[pick.prompt], pick.sampler
        held = pool.window if sampler == "recent" else pool.rows
        assert len(held) >= size, f"prompt {pool.prompt.id!r} was picked with {len(held)} of {size} trajectories"
        if sampler in TREES:
            trees = [storage.tree(pool, name) for name in TREES[sampler]]
            shifts = advantage_shifts(trees.pop(), len(held)) if sampler == "advantage" else (0.0,)
            places, probabilities = draw_weighted(trees, shifts, size, rng)
        else:
            places, probabilities = draw_uniform(len(held), size, rng)
        rows, chosen = storage.rows, [held[place] for place in places]
        found = Chosen(
            prompt=pool.prompt, pool=pick.prompt, rows=chosen, lengths=[rows.length[row] for row in chosen],
            trajectories=[] if self.options.max_uses is None else storage.trajectories(chosen),
            provenance={
                "sampler": sampler, "prompt_probability": pick.probability, "item_probabilities": tuple(probabilities),
                "ages": tuple([version - rows.version[row] for row in chosen]),
                "uses": tuple([rows.uses[row] for row in chosen]),
                "numbers": tuple([rows.number[row] for row in chosen]),
            },
        )
        for row in chosen:
            storage.use(row)
        if self.options.max_uses is not None:
            for row in chosen:
                if rows.uses[row] >= self.options.max_uses:
                    self._evict(row, "used up")
        return found

    def _give_out(self, drawn: list[Chosen]) -> list[Draw]:
        """Counts what was drawn, and reads in one pass the trajectories that have not been read."""
        late = [one for one in drawn if not one.trajectories]
        read = iter(self.storage.trajectories([row for one in late for row in one.rows]))
        by_class: dict[int, list[int]] = {}
        for one in drawn:
            ages = one.provenance["ages"]
            self.prompt_sums.add(one.pool, consumed=len(ages), age=sum(ages))
            for length, age in zip(one.lengths, ages, strict=True):
                by_class.setdefault(length_class(length), []).append(age)
        for place, ages in by_class.items():
            self.length_sums.add(place, consumed=len(ages), age=sum(ages))
        self.consumed += sum(len(one.rows) for one in drawn)
        return [
            Draw(
                prompt=one.prompt, trajectories=tuple(one.trajectories or islice(read, len(one.rows))),
                **one.provenance,
            )
            for one in drawn
        ]

    # ---- looking in ----

    def ledger(self) -> dict[str, dict[str, Any]]:
        """Delivered, in buffer, evicted and rejected by reason; in trajectories and in tokens."""
        return self.fates.account({"trajectories": self.storage.count, "tokens": self.storage.tokens})

    def fairness(self) -> dict[str, Any]:
        """See `ledger.fairness`: by deciles of length and of the prompts' difficulty, with warnings."""
        return fairness(self.prompt_sums, self.length_sums)

    def served(self) -> tuple[float, float]:
        """How the longest completions and the hardest prompts are served, over all: see `ledger.served`."""
        return served(self.prompt_sums, self.length_sums)

    @property
    def parts(self) -> tuple[ReplayBuffer, ...]:
        """The buffers that together hold everything: this one."""
        return (self,)

    def entries(self) -> Iterator[tuple[Prompt, Entry]]:
        """Everything held, in order of insertion."""
        yield from map(self.entry, self.storage.rows.held().tolist())

    def entry(self, row: int) -> tuple[Prompt, Entry]:
        """The trajectory in a row of the storage, and its prompt."""
        storage, rows = self.storage, self.storage.rows
        entry = Entry(number=rows.number[row], trajectory=storage.trajectory(row), uses=rows.uses[row])
        return storage.pools[rows.pool[row]].prompt, entry

    # ---- saving ----

    def save(self, path: Path) -> None:
        """Writes contents, order and counters into the folder `path`, which must exist.

        Files that an earlier `save` or `load` of this buffer knows of, in `path` or beside it, are linked
        instead of written again. What an earlier save left in `path` stays readable until this one is whole.
        """
        from tba.buffer.files import Files

        self._files = self._files or Files()
        state = {
            "consumed": self.consumed, "offered": self._offered, "ledger": self.fates.state(),
            "lengths": {name: list(column) for name, column in self.length_sums.sums.items()},
        }
        self._files.save(path, self.storage, self.prompt_sums, state)

    def load(self, path: Path) -> ReplayBuffer:
        """Replaces the contents by those that `save` wrote into `path`, and returns the buffer.

        Raises:
            ValueError: the files are of another schema version.
        """
        from tba.buffer.files import Files

        self._empty()
        self._files = Files()
        state, prompts = self._files.load(path, self.storage)
        self.consumed = state["consumed"]
        self._offered = state.get("offered", self.storage.next_number)
        self.fates.restore(state["ledger"])
        for tally, sums in ((self.prompt_sums, prompts), (self.length_sums, state["lengths"])):
            for name, column in tally.sums.items():
                column.extend(sums[name])
        storage, held = self.storage, self.storage.rows.held().tolist()
        if self._copies is not None:
            self._copies.rebuild(held)
        for row in held:
            if self._counts is not None:
                self._counts.add(storage.rows.digest[row])
            if self._near is not None:
                self._near.add(row, storage.rows.number[row], storage.rows.pool[row], storage.ids(row))
        return self
