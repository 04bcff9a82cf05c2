"""Storage of the replay buffer: rows in pools by prompt; what is eligible, recent, oldest, worst."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tba.buffer.rows import Pool, Rows, places_by
from tba.buffer.samplers import logit
from tba.buffer.segments import MOST_ROWS, MOST_TOKENS, Segment, merged
from tba.buffer.trees import Ranks, Tree, log_add
from tba.records import Prompt, Trajectory

TREES = {"reward": ("up",), "advantage": ("up", "down", "mean"), "novelty": ("rarity",)}
"""Trees over the slots of a pool that a sampler draws from."""
DEAD_SHARE = 0.25
"""Share of a closed segment's tokens that may belong to trajectories that have left, before it is rewritten."""
FAN = 8
"""Small segments of about one size that are joined into one."""


class Storage:
    """Trajectories, found by row; every operation costs at most the logarithm of what is held, amortised."""

    def __init__(
        self, *, samplers: Iterable[str], temperature: float, eviction: str, keeps_logps: bool, keeps_text: bool
    ) -> None:
        """Keeps only the trees that `samplers` and `eviction` need."""
        self.rows = Rows()
        self.pools: list[Pool] = []
        self.by_id: dict[str, Pool] = {}
        self.segments: dict[int, Segment] = {}
        self.next_segment, self._open = 0, -1
        self.next_number = 0
        self.tokens = self.bytes = self.count = self.num_prompts = 0
        self.oldest = self.newest = -1
        self.ready: dict[int, Ranks] = {}
        """By group size: pools with as many trajectories."""
        self.recent: dict[int, Ranks] = {}
        """By group size: pools with as many recent ones."""
        self.window_from = -(1 << 31)
        """Oldest version that is recent."""
        self.versions: dict[int, array[int]] = {}
        """Rows by version, rows that have left or moved among them."""
        self.changed: set[int] | None = None
        """Pools whose size or window has changed, since a set was put here; None where nobody asks."""
        self._in_versions = 0
        self._keeps = {"keeps_logps": keeps_logps, "keeps_text": keeps_text}
        self._temperature = temperature
        names = dict.fromkeys(name for sampler in samplers for name in TREES.get(sampler, ()))
        self._combine_worst = self._worse(eviction)
        self.worst = None if eviction == "oldest" else Tree(self._combine_worst, -1)
        """Rows, of which the root is the first to evict; none where that is the oldest."""
        if self.worst is not None:
            names["worst"] = None
        self.trees = tuple(names)

    # ---- reading ----

    def trajectory(self, row: int) -> Trajectory:
        """The trajectory in a row."""
        return self.trajectories([row])[0]

    def trajectories(self, rows: Sequence[int]) -> list[Trajectory]:
        """`trajectory` of each of many rows, in one pass over each segment."""
        of, found = self.rows, {}
        places: dict[int, list[int]] = {}
        for row in rows:
            places.setdefault(of.segment[row], []).append(row)
        for key, own in places.items():
            made = self.segments[key].trajectories(
                np.array([of.at[row] for row in own]), [self.pools[of.pool[row]].prompt.id for row in own],
                [of.version[row] for row in own], [of.reward[row] for row in own],
            )
            found.update(zip(own, made, strict=True))
        return [found[row] for row in rows]

    def ids(self, row: int) -> np.ndarray:
        """Completion ids of the trajectory in a row."""
        return self.segments[self.rows.segment[row]].lists["tokens"][self.rows.at[row]]

    def tree(self, pool: Pool, name: str) -> Tree:
        """A tree over the slots of a pool that is not empty."""
        return pool.trees[self.trees.index(name)]

    def first_out(self, pool: Pool | None = None) -> int:
        """The row that leaves first, of a pool or of all."""
        if self.worst is None:
            return self.oldest if pool is None else pool.oldest
        return int(self.worst.root if pool is None else self.tree(pool, "worst").root)

    def ready_for(self, size: int) -> Ranks:
        """Pools with at least `size` trajectories."""
        if size not in self.ready:
            self.ready[size] = Ranks([p.number for p in self.pools if len(p.rows) >= size])
        return self.ready[size]

    def recent_for(self, size: int) -> Ranks:
        """Pools with at least `size` recent trajectories."""
        if size not in self.recent:
            self.recent[size] = Ranks([p.number for p in self.pools if len(p.window) >= size])
        return self.recent[size]

    # ---- changing ----

    def pool_of(self, prompt: Prompt) -> Pool:
        """The pool of a prompt, made when it is first seen."""
        pool = self.by_id.get(prompt.id)
        if pool is None:
            pool = self.by_id[prompt.id] = Pool(len(self.pools), prompt)
            self.pools.append(pool)
        return pool

    def insert(
        self, pool: Pool, trajectories: Sequence[Trajectory], ids: np.ndarray, digests: Sequence[int],
        copies: Sequence[int],
    ) -> list[int]:
        """Stores trajectories of the pool's prompt, newest last, their int32 ids in one piece; returns rows."""
        key, segment = self._open_segment()
        first, counted = len(segment), segment.counted
        segment.extend(trajectories, ids, **self._keeps)
        rows = self.rows.new(len(trajectories))
        segment.rows[first:] = array("i", rows)
        self._fill(pool, rows, trajectories, key, first)
        for row, digest, copy in zip(rows, digests, copies, strict=True):
            self.rows.digest[row], self.rows.copy[row] = digest, copy
        self._link(pool, rows)
        self._put_into_pool(pool, rows)
        self.count += len(rows)
        self.bytes += segment.counted - counted
        if self._in_versions > 2 * self.count + 1024:
            self.list_versions(min(self.versions))
        if segment.full:
            segment.close()
            self.merge_small()
        return rows

    def remove(self, row: int) -> None:
        """Forgets a row."""
        rows = self.rows
        pool, key, at = self.pools[rows.pool[row]], rows.segment[row], rows.at[row]
        segment = self.segments[key]
        self.bytes -= segment.bytes_of(at)
        self.tokens -= rows.length[row]
        self.count -= 1
        self._unlink(pool, row)
        self._leave_pool(pool, row)
        segment.leave(at)
        rows.free(row)
        if not segment.open:
            if not segment.live:
                del self.segments[key]
            elif segment.live_tokens < (1 - DEAD_SHARE) * segment.tokens:
                self.rewrite([key])

    def use(self, row: int) -> None:
        """Counts that a row was drawn."""
        self.rows.uses[row] += 1
        if self.worst is not None:
            self.worst.put(row, row)
            self.tree(self.pools[self.rows.pool[row]], "worst").put(self.rows.slot[row], row)

    def advance(self, window_from: int) -> None:
        """Moves the window: recent are rows sampled at `window_from` or later."""
        if window_from < self.window_from:
            self.window_from = window_from
            self._refill_window()
        for version in sorted(v for v in self.versions if self.window_from <= v < window_from):
            for row in self.rows_of_version(version):
                if self.rows.window[row] >= 0:
                    self._leave_window(self.pools[self.rows.pool[row]], row)
        self.window_from = max(window_from, self.window_from)

    def rows_of_version(self, version: int) -> list[int]:
        """Rows held that `version` sampled, oldest first."""
        rows = self.rows
        kept = {r for r in self.versions.get(version, ()) if rows.segment[r] >= 0 and rows.version[r] == version}
        return sorted(kept, key=rows.number.__getitem__)

    def forget_versions(self, before: int) -> None:
        """Lets go of the lists of versions that neither the window nor an age bound will ask for."""
        for version in [v for v in self.versions if v < before]:
            self._in_versions -= len(self.versions.pop(version))

    def close_segment(self) -> None:
        """Ends the growth of the newest segment, so that it can be written."""
        key = self._open
        segment = self.segments.get(key)
        if segment is None or not segment.open:
            return
        segment.close()
        if not segment.live:
            del self.segments[key]

    def whole(self, key: int) -> Segment:
        """A closed segment, rewritten if something has left it."""
        if self.segments[key].live < len(self.segments[key]):
            self.rewrite([key])
            key = self.next_segment - 1
        return self.segments[key]

    def merge_small(self) -> None:
        """Joins small closed segments of about one size, so that their number stays small."""
        tiers: dict[int, list[int]] = {}
        for key, segment in self.segments.items():
            weight = max(segment.live_tokens, segment.live * (MOST_TOKENS // MOST_ROWS))
            if not segment.open and weight < MOST_TOKENS // 2:
                tiers.setdefault(weight.bit_length() // 2, []).append(key)
        for keys in tiers.values():
            if len(keys) >= FAN:
                self.rewrite(keys)

    # ---- inside ----

    def _open_segment(self) -> tuple[int, Segment]:
        segment = self.segments.get(self._open)
        if segment is None or not segment.open:
            self._open = self.next_segment
            segment = self.segments[self._open] = Segment()
            self.next_segment += 1
        return self._open, segment

    def rewrite(self, keys: Sequence[int]) -> None:
        """Replaces segments by one with what is left of them."""
        new = merged([self.segments.pop(key) for key in keys])
        rows = np.frombuffer(new.rows, np.int32)
        self.rows.view("segment")[rows] = self.next_segment
        self.rows.view("at")[rows] = np.arange(len(rows), dtype=np.int32)
        self.segments[self.next_segment] = new
        self.next_segment += 1

    def _fill(self, pool: Pool, new: Sequence[int], trajectories: Sequence[Trajectory], segment: int, at: int) -> None:
        rows, number, owner = self.rows, self.next_number, pool.number
        for place, (row, trajectory) in enumerate(zip(new, trajectories, strict=True)):
            length = len(trajectory.completion.tokens)
            rows.number[row], rows.reward[row] = number + place, trajectory.reward
            rows.version[row] = trajectory.completion.version
            rows.pool[row], rows.segment[row], rows.at[row], rows.length[row] = owner, segment, at + place, length
            rows.uses[row], rows.window[row], rows.next_copy[row] = 0, -1, -1
            self.tokens += length
        self.next_number += len(new)

    def _link(self, pool: Pool, new: Sequence[int]) -> None:
        rows = self.rows
        older, newer, pool_older, pool_newer = rows.older, rows.newer, rows.pool_older, rows.pool_newer
        last, pool_last = self.newest, pool.newest
        for row in new:
            older[row], pool_older[row] = last, pool_last
            if last >= 0:
                newer[last] = row
            if pool_last >= 0:
                pool_newer[pool_last] = row
            last = pool_last = row
        newer[last] = pool_newer[pool_last] = -1
        self.newest, pool.newest = last, pool_last
        self.oldest = self.oldest if self.oldest >= 0 else new[0]
        pool.oldest = pool.oldest if pool.oldest >= 0 else new[0]
        if self.worst is not None:
            for row in new:
                self.worst.put(row, row)

    def _unlink(self, pool: Pool, row: int) -> None:
        rows = self.rows
        for ends, older_of, newer_of in ((self, rows.older, rows.newer), (pool, rows.pool_older, rows.pool_newer)):
            older, newer = older_of[row], newer_of[row]
            if older >= 0:
                newer_of[older] = newer
            else:
                ends.oldest = newer
            if newer >= 0:
                older_of[newer] = older
            else:
                ends.newest = older
        if self.worst is not None:
            self.worst.clear(row)

    def _put_into_pool(self, pool: Pool, new: Sequence[int]) -> None:
        rows, first = self.rows, len(pool.rows)
        if self.changed is not None:
            self.changed.add(pool.number)
        if self.trees and not pool.trees:
            pool.trees = tuple(self.new_tree(name) for name in self.trees)
        self.num_prompts += not first
        pool.rows.extend(new)
        for slot, row in enumerate(new, first):
            rows.slot[row] = slot
        for name, tree in zip(self.trees, pool.trees, strict=False):
            for slot, row in enumerate(new, first):
                tree.put(slot, self.leaf(name, row))
        for size, ranks in self.ready.items():
            if first < size <= len(pool.rows):
                ranks.add(pool.number)
        versions = [rows.version[row] for row in new]
        self._enter_window(pool, [row for row, v in zip(new, versions, strict=True) if v >= self.window_from])
        for version in dict.fromkeys(versions):
            if version not in self.versions:
                self.versions[version] = array("i")
        for row, version in zip(new, versions, strict=True):
            self.versions[version].append(row)
        self._in_versions += len(new)

    def _leave_pool(self, pool: Pool, row: int) -> None:
        rows = self.rows
        if self.changed is not None:
            self.changed.add(pool.number)
        slot, last = rows.slot[row], pool.rows.pop()
        for tree in pool.trees:
            moved = tree[len(pool.rows)]
            tree.clear(len(pool.rows))
            if last != row:
                tree.put(slot, moved)
        if last != row:
            pool.rows[slot], rows.slot[last] = last, slot
        self.num_prompts -= not pool.rows
        for size, ranks in self.ready.items():
            if len(pool.rows) == size - 1:
                ranks.discard(pool.number)
        if rows.window[row] >= 0:
            self._leave_window(pool, row)
        if not pool.rows:
            pool.trees = ()

    def _enter_window(self, pool: Pool, new: Sequence[int]) -> None:
        first = len(pool.window)
        if self.changed is not None:
            self.changed.add(pool.number)
        pool.window.extend(new)
        for place, row in enumerate(new, first):
            self.rows.window[row] = place
        for size, ranks in self.recent.items():
            if first < size <= len(pool.window):
                ranks.add(pool.number)

    def _leave_window(self, pool: Pool, row: int) -> None:
        rows = self.rows
        if self.changed is not None:
            self.changed.add(pool.number)
        place, last = rows.window[row], pool.window.pop()
        if last != row:
            pool.window[place], rows.window[last] = last, place
        rows.window[row] = -1
        for size, ranks in self.recent.items():
            if len(pool.window) == size - 1:
                ranks.discard(pool.number)

    def _refill_window(self) -> None:
        for row in self.rows.held().tolist():
            if self.rows.window[row] < 0 and self.rows.version[row] >= self.window_from:
                self._enter_window(self.pools[self.rows.pool[row]], [row])
        self.list_versions(int(self.rows.view("version").min(initial=0)))

    def list_versions(self, first: int) -> None:
        """Lists the rows of every version from `first` on anew."""
        self.versions = {}
        held = self.rows.held()
        versions = self.rows.view("version")[held]
        held, versions = held[versions >= first], versions[versions >= first]
        for version, places in places_by(versions):
            self.versions[version] = array("i", held[places].astype(np.int32).tobytes())
        self._in_versions = len(held)

    def new_tree(self, name: str, values: Sequence[float] = ()) -> Tree:
        """A tree over the slots of a pool."""
        if name == "worst":
            return Tree(self._combine_worst, -1, values)
        if name == "mean":
            return Tree(lambda a, b: a + b, 0.0, values)
        return Tree(log_add, -math.inf, values)

    def leaf(self, name: str, row: int) -> float:
        """What a tree keeps of a row."""
        if name == "worst":
            return row
        if name == "rarity":
            return -math.log(self.rows.copy[row])
        value = logit(self.rows.reward[row], self._temperature)
        return -value if name == "down" else value

    def _worse(self, eviction: str) -> Callable[[float, float], float]:
        rows = self.rows

        def key(row: int) -> tuple[float, int]:
            worth = rows.reward[row] if eviction == "lowest_reward" else -rows.uses[row]
            return worth, rows.number[row]

        def worse(a: float, b: float) -> float:
            one, other = int(a), int(b)
            if one < 0 or other < 0:
                return max(one, other)
            return one if key(one) <= key(other) else other

        return worse
