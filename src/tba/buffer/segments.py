"""What a trajectory holds besides its place: runs of trajectories as columns that only grow."""

# Shape legend: N trajectories of a segment.

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from tba.records import Completion, Finish, Trajectory, unchecked

MOST_TOKENS = 1 << 21
"""Tokens at which a segment is closed: 8 MiB of ids."""
MOST_ROWS = 1 << 16
"""Trajectories at which a segment is closed."""
FINISHES: tuple[Finish, ...] = ("stop", "length")
ROW_BYTES = 160
"""Bytes that a trajectory is counted with besides what varies: its number, links, places and scores."""


class Ragged:
    """Lists of unequal length in one array. Empty lists cost nothing until the first one that is not."""

    __slots__ = ("_rows", "_starts", "_used", "_values")

    def __init__(self, kind: str) -> None:
        """`kind` is a numpy dtype; float32 widens to float64 when a value needs it."""
        self._values = np.empty(0, kind)
        self._starts = array("i")
        self._rows, self._used = 0, 0

    def __len__(self) -> int:
        return self._rows

    @property
    def total(self) -> int:
        """Values of all lists together."""
        return self._used

    @property
    def values(self) -> np.ndarray:
        """All lists, one after another."""
        return self._values[: self._used]

    @property
    def starts_N1(self) -> np.ndarray:
        """Where each list begins, and where the last ends."""
        if not self._starts:
            return np.zeros(self._rows + 1, np.int32)
        return np.append(np.frombuffer(self._starts, np.int32), np.int32(self._used))

    def extend(self, lists: Sequence[Sequence[Any]]) -> None:
        """Adds lists of numbers, or words."""
        lengths = [len(one) for one in lists]
        total = sum(lengths)
        if not total:
            self._note_empty(len(lengths))
            return
        kind = self._values.dtype
        exact = np.float64 if kind == np.float32 else kind
        self.extend_flat(np.fromiter(chain.from_iterable(lists), exact, total), lengths)

    def extend_bytes(self, lists: Sequence[bytes]) -> None:
        """Adds lists of bytes."""
        self.extend_flat(np.frombuffer(b"".join(lists), np.uint8), [len(one) for one in lists])

    def extend_flat(self, values: np.ndarray, lengths: Sequence[int]) -> None:
        """Adds lists that lie one after another in `values`."""
        if self._values.dtype == np.float32 and values.dtype == np.float64:
            narrow = values.astype(np.float32)
            if (narrow == values).all() or np.array_equal(narrow, values, equal_nan=True):
                values = narrow
            else:
                wide = np.empty(len(self._values), np.float64)
                wide[: self._used] = self.values  # what lies beyond was never written, and need not be a number
                self._values = wide
        if not len(values):
            self._note_empty(len(lengths))
            return
        self._note(lengths)
        if self._used + len(values) > len(self._values):
            room = np.empty(max(1024, self._used + len(values), len(self._values) * 3 // 2), self._values.dtype)
            room[: self._used] = self.values
            self._values = room
        self._values[self._used : self._used + len(values)] = values
        self._used += len(values)

    def _note(self, lengths: Sequence[int]) -> None:
        if not self._starts:
            self._starts = array("i", bytes(4 * self._rows))
        starts, at = self._starts, self._used
        for length in lengths:
            starts.append(at)
            at += length
        self._rows += len(lengths)

    def _note_empty(self, count: int) -> None:
        if self._starts:
            self._starts.extend([self._used] * count)
        self._rows += count

    def __getitem__(self, at: int) -> np.ndarray:
        if not self._starts:
            return self._values[:0]
        end = self._starts[at + 1] if at + 1 < self._rows else self._used
        return self._values[self._starts[at] : end]

    def values_of(self, at: int) -> tuple[Any, ...]:
        """The list at a place."""
        return tuple(self[at].tolist()) if self._starts else ()

    def length(self, at: int) -> int:
        """Of the list at a place."""
        if not self._starts:
            return 0
        return (self._starts[at + 1] if at + 1 < self._rows else self._used) - self._starts[at]

    def take(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lists at `places` one after another, and their lengths."""
        if not self._starts:
            return self.values, np.zeros(len(places), np.int64)
        starts, last = np.frombuffer(self._starts, np.int32), self._rows - 1
        first = starts[places].astype(np.int64)
        lengths = np.where(places < last, starts[np.minimum(places + 1, last)], self._used) - first
        ends = np.cumsum(lengths)
        flat = np.repeat(first - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
        return self._values[flat], lengths

    def lists_at(self, places: np.ndarray) -> list[Any]:
        """The list at each of `places`, as a tuple, or as bytes where values are bytes."""
        is_bytes = self._values.dtype == np.uint8
        if not self._starts:
            return [b"" if is_bytes else ()] * len(places)
        values, lengths = self.take(places)
        flat = values.tobytes() if is_bytes else tuple(values.tolist())
        ends = np.cumsum(lengths)
        return [flat[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]

    def close(self) -> None:
        """Gives back what was set aside for more."""
        self._values = self.values.copy()

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._values.nbytes + self._starts.itemsize * len(self._starts)


RAGGED = {
    "tokens": "int32", "logps": "float32", "behaviour_logps": "float32", "token_versions": "int32", "text": "uint8",
    "reward_parts": "uint8", "ref_logps": "float32",
}
"""Columns of lists, with their kinds; text is UTF-8, parts of the reward are JSON."""
BYTES = {name: 1 if kind == "uint8" else 4 for name, kind in RAGGED.items()}
"""What one value of a list is counted with, whatever it takes."""
IN_RECORDS = ("tokens", "text", "logps", "behaviour_logps", "token_versions", "reward_parts", "ref_logps")
"""Columns of lists in the order of the fields of a completion, then of a trajectory."""
PLAIN = {"ref_logp": "d", "ref_version": "q", "finish": "b"}
"""Columns of numbers, as array codes."""


class Segment:
    """Trajectories in the order in which they came; those that leave the buffer stay until it is rewritten."""

    __slots__ = ("file", "lists", "live", "live_tokens", "logp", "numbers", "open", "rows")

    def __init__(self) -> None:
        self.lists = {name: Ragged(kind) for name, kind in RAGGED.items()}
        self.numbers = {name: array(code) for name, code in PLAIN.items()}
        self.logp = array("d")
        """Sum of the log-probs, for trajectories whose own were not kept; else empty."""
        self.rows = array("i")
        """Row of each trajectory in the buffer; -1 once it has left."""
        self.live, self.live_tokens = 0, 0
        self.open = True
        self.file: Any = None
        """Where it is on disk, if it is."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Tokens, those of trajectories that left included."""
        return self.lists["tokens"].total

    @property
    def full(self) -> bool:
        """Whether it takes no more."""
        return self.tokens >= MOST_TOKENS or len(self) >= MOST_ROWS

    def extend(
        self, trajectories: Sequence[Trajectory], ids: np.ndarray, *, keeps_logps: bool, keeps_text: bool
    ) -> None:
        """Adds trajectories, whose ids lie one after another in `ids`; the caller sets their rows."""
        completions = [t.completion for t in trajectories]
        lists, numbers = self.lists, self.numbers
        count, lengths = len(completions), [len(c.tokens) for c in completions]
        lists["tokens"].extend_flat(ids, lengths)
        if keeps_logps:
            lists["logps"].extend([c.logps for c in completions])
            lists["behaviour_logps"].extend([c.behaviour_logps for c in completions])
        else:
            lists["logps"].extend([()] * count)
            lists["behaviour_logps"].extend([()] * count)
            self.logp.extend([c.logp for c in completions])
        lists["ref_logps"].extend([t.ref_logps for t in trajectories])
        lists["token_versions"].extend([c.token_versions for c in completions])
        texts = [c.text.encode("utf-8", "surrogatepass") for c in completions] if keeps_text else [b""] * count
        lists["text"].extend_bytes(texts)
        lists["reward_parts"].extend_bytes(
            [json.dumps(dict(t.reward_parts)).encode() if t.reward_parts else b"" for t in trajectories]
        )
        numbers["ref_logp"].extend([t.ref_logp for t in trajectories])
        numbers["ref_version"].extend([t.ref_version for t in trajectories])
        numbers["finish"].extend([FINISHES.index(c.finish) for c in completions])
        self.rows.extend([-1] * count)
        self.live += count
        self.live_tokens += sum(lengths)

    def trajectory(self, at: int, prompt_id: str, version: int, reward: float) -> Trajectory:
        """The trajectory at a place, as it was added; with equal log-probs if only their sum was kept."""
        return self.trajectories(np.array([at]), [prompt_id], [version], [reward])[0]

    def trajectories(
        self, places: np.ndarray, prompt_ids: Sequence[str], versions: Sequence[int], rewards: Sequence[float]
    ) -> list[Trajectory]:
        """`trajectory` at each of many places; what is equal among them may be one object."""
        columns = {name: one.lists_at(places) for name, one in self.lists.items()}
        at_N = places.tolist()
        if self.logp:
            columns["logps"] = [
                own or (self.logp[at] / len(ids),) * len(ids)
                for own, ids, at in zip(columns["logps"], columns["tokens"], at_N, strict=True)
            ]
        parts = {own: json.loads(own) if own else {} for own in set(columns["reward_parts"])}
        finish, ref_logp, ref_version = (self.numbers[name] for name in ("finish", "ref_logp", "ref_version"))
        found = []
        for at, prompt_id, version, reward, ids, text, logps, behaviour, versions_T, own, ref in zip(
            at_N, prompt_ids, versions, rewards, *(columns[name] for name in IN_RECORDS), strict=True
        ):
            completion = unchecked(
                Completion, ids, text.decode("utf-8", "surrogatepass"), logps, version, FINISHES[finish[at]],
                behaviour, versions_T,
            )
            found.append(unchecked(
                Trajectory, prompt_id, completion, reward, parts[own], ref_logp[at], ref_version[at], ref
            ))
        return found

    def bytes_of(self, at: int) -> int:
        """Bytes that the trajectory at a place is counted with."""
        return ROW_BYTES + sum(BYTES[name] * one.length(at) for name, one in self.lists.items())

    def bytes_N(self) -> np.ndarray:
        """`bytes_of` every trajectory."""
        total = np.full(len(self), ROW_BYTES, np.int64)
        for name, one in self.lists.items():
            total += BYTES[name] * np.diff(one.starts_N1)
        return total

    @property
    def counted(self) -> int:
        """Bytes that all its trajectories together are counted with."""
        return ROW_BYTES * len(self) + sum(BYTES[name] * one.total for name, one in self.lists.items())

    def leave(self, at: int) -> None:
        """Notes that the trajectory at a place has left the buffer."""
        self.rows[at] = -1
        self.live -= 1
        self.live_tokens -= self.lists["tokens"].length(at)

    def close(self) -> None:
        """Ends its growth."""
        self.open = False
        for one in self.lists.values():
            one.close()

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        numbers = [self.logp, self.rows, *self.numbers.values()]
        return sum(r.num_bytes for r in self.lists.values()) + sum(a.itemsize * len(a) for a in numbers)


def merged(segments: Sequence[Segment]) -> Segment:
    """One closed segment with what is left of several, in their order."""
    whole = Segment()
    has_sums = any(segment.logp for segment in segments)
    for segment in segments:
        rows = np.frombuffer(segment.rows, np.int32)
        places = np.flatnonzero(rows >= 0)
        for name, one in segment.lists.items():
            values, lengths = one.take(places)
            whole.lists[name].extend_flat(values, lengths.tolist())
        for name, column in segment.numbers.items():
            whole.numbers[name].extend(array(column.typecode, [column[at] for at in places.tolist()]))
        if has_sums:
            sums = segment.logp or [math.nan] * len(segment)
            whole.logp.extend([sums[at] for at in places.tolist()])
        whole.rows.extend(rows[places].tolist())
        whole.live += segment.live
        whole.live_tokens += segment.live_tokens
    whole.close()
    return whole
