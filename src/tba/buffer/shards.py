"""The replay buffer in shards: prompts by hash, draws as from one buffer."""

from __future__ import annotations

import heapq
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tba.buffer.entries import Draw, EmptyBufferError, Entry
from tba.buffer.files import to_disk
from tba.buffer.ledger import TALLIED, Ledger, Tally, fairness, nothing_to_draw, served
from tba.buffer.memory import ReplayBuffer, may_enter
from tba.buffer.options import Options
from tba.buffer.samplers import Pick, pick_prompts
from tba.buffer.trees import Ranks
from tba.records import Group, Prompt

SCHEMA = 1
"""Version of the head."""
HEAD = "shards.json"
"""Names the folders of the shards that count."""

Call = tuple[Any, ...]
"""A method of `Shard` by name, and what it is given."""


def shard_of(prompt_id: str, count: int) -> int:
    """Which of `count` shards a prompt belongs to: the same in every process and run."""
    digest = blake2b(prompt_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % count


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What has changed in a shard since its last report."""

    prompts: list[int]
    """Numbers of the prompts that changed, in the shard's count of them."""
    sizes: list[int]
    """Trajectories of each."""
    windows: list[int]
    """Recent trajectories of each."""
    sums: list[dict[str, float]]
    """Sums of each, as in `Tally`."""
    lengths: dict[str, Sequence[float]]
    """Sums by class of length, all of them."""
    ledger: dict[str, Any]
    counts: dict[str, int]
    """Of the shard: trajectories, tokens, bytes, prompts held, consumed, next_number."""


class Shard:
    """One shard: a buffer of its own, and what it tells of it."""

    def __init__(self, options: Options) -> None:
        """`options` are the shard's own, with its share of the bounds."""
        self.buffer = ReplayBuffer(options)
        self.buffer.storage.changed = set()

    def add(self, group: Group, number: int) -> None:
        """See `ReplayBuffer.add`; `number` is the place of the first trajectory that enters, over all shards."""
        self.buffer.storage.next_number = number
        self.buffer.add(group)
        self._note(group.prompt)

    def reject(self, group: Group, reason: str) -> None:
        """See `ReplayBuffer.reject`."""
        self.buffer.reject(group, reason)
        self._note(group.prompt)

    def begin(self, version: int) -> Report:
        """Makes ready for a draw at `version`."""
        self.buffer.advance(version)
        return self.report()

    def draw(self, picks: Sequence[Pick], size: int, version: int, seed: Sequence[int]) -> tuple[list[Draw], Report]:
        """Groups of the prompts picked, which have the shard's own numbers here; items by an RNG of `seed`."""
        draws = self.buffer.sample_from(picks, size, version=version, rng=np.random.default_rng(seed))
        for draw in draws:
            self._note(draw.prompt)
        return draws, self.report()

    def report(self) -> Report:
        """What has changed since the last report."""
        buffer, storage = self.buffer, self.buffer.storage
        prompts, storage.changed = sorted(storage.changed or ()), set()
        return Report(
            prompts=prompts, sizes=[len(storage.pools[n].rows) for n in prompts],
            windows=[len(storage.pools[n].window) for n in prompts],
            sums=[buffer.prompt_sums.get(n) for n in prompts],
            lengths={name: list(column) for name, column in buffer.length_sums.sums.items()},
            ledger=buffer.fates.state(),
            counts={
                "trajectories": storage.count, "tokens": storage.tokens, "bytes": storage.bytes,
                "prompts": storage.num_prompts, "consumed": buffer.consumed, "next_number": storage.next_number,
            },
        )

    def save(self, path: str) -> None:
        """See `ReplayBuffer.save`."""
        self.buffer.save(Path(path))

    def load(self, path: str) -> Report:
        """See `ReplayBuffer.load`; the report is of everything."""
        storage = self.buffer.load(Path(path)).storage
        storage.changed = set(range(len(storage.pools)))
        return self.report()

    def _note(self, prompt: Prompt) -> None:
        storage = self.buffer.storage
        assert storage.changed is not None
        storage.changed.add(storage.by_id[prompt.id].number)


class Shards(Protocol):
    """Where the shards are: here, or in processes of their own. Each does what it is told in order."""

    def tell(self, shard: int, *call: Any) -> None:
        """Has one shard do something, without waiting for it."""
        ...

    def ask(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """Has some shards do something side by side; returns what each answered.

        Raises:
            RuntimeError: one of them is lost; what `call` itself raises.
        """
        ...


class Here:
    """Shards in this process."""

    def __init__(self, options: Sequence[Options]) -> None:
        """`options` of each shard."""
        self.shards = [Shard(one) for one in options]

    def tell(self, shard: int, *call: Any) -> None:
        """See `Shards.tell`."""
        name, *values = call
        getattr(self.shards[shard], name)(*values)

    def ask(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """See `Shards.ask`."""
        return {shard: getattr(self.shards[shard], name)(*values) for shard, (name, *values) in calls.items()}


class ShardedBuffer:
    """What `ReplayBuffer` is, over shards that each hold the prompts of their share of the hashes.

    Samplers and prompts are picked here, from how many trajectories each prompt has, so that draws have the
    distribution of one buffer; items are drawn by the shard that has them. Beside that it only mirrors what the
    shards report, so a state that was loaded is the state that was saved. The n-th prompt first seen by shard s
    of m has the number n x m + s.
    """

    def __init__(self, options: Options, count: int, shards: Shards | None = None) -> None:
        """`options` are those of the whole; `shards`, `count` empty ones, are made here unless given."""
        self.options, self.count = options, count
        self._shards = shards or Here(options.shared_out(count))
        self.unmet = Counter[str]()
        """See `ReplayBuffer.unmet`."""
        self._empty()

    def _empty(self) -> None:
        self._sizes, self._windows = array("q"), array("q")
        self._ranks: dict[tuple[bool, int], Ranks] = {}
        self._prompts = Tally()
        self._reports: dict[int, Report] = {}
        self._untold = set[int]()
        """Shards that have been told something since they last reported."""
        self._next_number = 0

    # ---- coming in ----

    def add(self, group: Group) -> None:
        """See `ReplayBuffer.add`."""
        self._tell(group, "add", self._next_number)
        self._next_number += sum(map(may_enter, group.trajectories))

    def reject(self, group: Group, reason: str) -> None:
        """See `ReplayBuffer.reject`."""
        self._tell(group, "reject", reason)

    def _tell(self, group: Group, call: str, value: Any) -> None:
        shard = shard_of(group.prompt.id, self.count)
        self._shards.tell(shard, call, group, value)
        self._untold.add(shard)

    # ---- drawing ----

    def sample(self, num_groups: int, group_size: int, *, version: int, rng: np.random.Generator) -> list[Draw]:
        """See `ReplayBuffer.sample`, whose distribution this has.

        Each shard is asked twice: to make ready, and for its groups. With `max_uses`, where a group drawn may leave
        its prompt without enough, also in between, each time all prompts have been drawn and are to be drawn again.

        Raises:
            EmptyBufferError: no prompt is eligible at all.
        """
        self._hear(dict.fromkeys(range(self.count), ("begin", version)))
        shares = self.options.shares(version)
        eligible = {name: self._eligible(name == "recent", group_size) for name in shares}
        self.unmet = Counter()
        waiting: list[Pick] = []
        draws: list[Draw] = []

        def fetch() -> None:
            draws.extend(self._fetch(waiting, group_size, version, int(rng.integers(1 << 63))) if waiting else ())
            waiting.clear()

        def settle() -> None:
            if self.options.max_uses is not None:
                fetch()

        with closing(pick_prompts(shares, eligible, self.unmet, rng, settle)) as picks:
            for pick in islice(picks, num_groups):
                waiting.append(pick)
        fetch()
        if not draws:
            raise EmptyBufferError(nothing_to_draw(group_size, self.num_prompts, len(self), self._fates()))
        return draws

    def _fetch(self, picks: Sequence[Pick], size: int, version: int, seed: int) -> list[Draw]:
        """The groups of the picks, in their order."""
        of = [pick.prompt % self.count for pick in picks]
        calls: dict[int, Call] = {}
        for shard in sorted(set(of)):
            own = [
                Pick(sampler=pick.sampler, prompt=pick.prompt // self.count, probability=pick.probability)
                for pick in picks if pick.prompt % self.count == shard
            ]
            calls[shard] = ("draw", own, size, version, (seed, shard))
        found = {shard: iter(draws) for shard, draws in self._hear(calls).items()}
        return [next(found[shard]) for shard in of]

    def _eligible(self, is_recent: bool, size: int) -> Ranks:
        """Prompts with at least `size` trajectories, or recent ones."""
        if (is_recent, size) not in self._ranks:
            have = self._windows if is_recent else self._sizes
            self._ranks[is_recent, size] = Ranks([number for number, n in enumerate(have) if n >= size])
        return self._ranks[is_recent, size]

    # ---- what the shards say ----

    def _hear(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """Asks, and takes in the report that each answer is, or ends with; returns what came before it."""
        rest: dict[int, Any] = {}
        for shard, answer in self._shards.ask(calls).items():
            rest[shard], report = answer if isinstance(answer, tuple) else (None, answer)
            self._take_in(shard, report)
        return rest

    def _take_in(self, shard: int, report: Report) -> None:
        self._reports[shard] = report
        self._untold.discard(shard)
        of = [n * self.count + shard for n in report.prompts]
        if of and (more := of[-1] + 1 - len(self._sizes)) > 0:
            self._sizes.extend([0] * more)
            self._windows.extend([0] * more)
        for number, size, window, sums in zip(of, report.sizes, report.windows, report.sums, strict=True):
            self._sizes[number], self._windows[number] = size, window
            self._prompts.put(number, sums)
        for (is_recent, size), ranks in self._ranks.items():
            for number, has in zip(of, report.windows if is_recent else report.sizes, strict=True):
                if (has >= size) != (number in ranks):
                    (ranks.add if has >= size else ranks.discard)(number)

    def _newest(self) -> list[Report]:
        """A report of each shard that has heard nothing since."""
        asked = [s for s in range(self.count) if s in self._untold or s not in self._reports]
        if asked:
            self._hear(dict.fromkeys(asked, ("report",)))
        return [self._reports[shard] for shard in range(self.count)]

    def _sum(self, name: str) -> int:
        return sum(report.counts[name] for report in self._newest())

    def _fates(self) -> Ledger:
        ledger = Ledger()
        for report in self._newest():
            ledger.join(report.ledger)
        return ledger

    def _lengths(self) -> Tally:
        tally = Tally()
        for report in self._newest():
            for key in range(len(report.lengths["delivered"])):
                tally.add(key, **{name: report.lengths[name][key] for name in TALLIED})
        return tally

    # ---- looking in ----

    def __len__(self) -> int:
        return self._sum("trajectories")

    @property
    def num_prompts(self) -> int:
        """See `ReplayBuffer.num_prompts`."""
        return self._sum("prompts")

    @property
    def counted_bytes(self) -> int:
        """See `ReplayBuffer.counted_bytes`."""
        return self._sum("bytes")

    @property
    def consumed(self) -> int:
        """See `ReplayBuffer.consumed`."""
        return self._sum("consumed")

    @property
    def inserted(self) -> int:
        """See `ReplayBuffer.inserted`."""
        ledger = self._fates()
        return ledger.total("delivered") - ledger.total("rejected")

    @property
    def delivered_tokens(self) -> int:
        """See `ReplayBuffer.delivered_tokens`."""
        return self._fates().total("delivered", "tokens")

    def ledger(self) -> dict[str, dict[str, Any]]:
        """See `ReplayBuffer.ledger`."""
        return self._fates().account({unit: self._sum(unit) for unit in ("trajectories", "tokens")})

    def fairness(self) -> dict[str, Any]:
        """See `ReplayBuffer.fairness`."""
        lengths = self._lengths()  # asks, so that the sums of prompts are the newest as well
        return fairness(self._prompts, lengths)

    def served(self) -> tuple[float, float]:
        """See `ReplayBuffer.served`."""
        lengths = self._lengths()
        return served(self._prompts, lengths)

    @property
    def parts(self) -> tuple[ReplayBuffer, ...]:
        """The buffers of the shards, which are in this process."""
        assert isinstance(self._shards, Here), "only shards in this process can be looked into"
        return tuple(shard.buffer for shard in self._shards.shards)

    def entries(self) -> Iterator[tuple[Prompt, Entry]]:
        """See `ReplayBuffer.entries`; of shards in this process."""
        return heapq.merge(*(part.entries() for part in self.parts), key=lambda one: one[1].number)

    # ---- saving ----

    def save(self, path: Path) -> None:
        """Writes each shard into a folder of its own in `path`, then the head, in one move: see `ReplayBuffer.save`."""
        earlier = _head_of(path)["save"] + 1 if (path / HEAD).exists() else 0
        folders = [f"shard-{shard}-{earlier}" for shard in range(self.count)]
        for folder in folders:
            (path / folder).mkdir(exist_ok=True)
        self._shards.ask({shard: ("save", str(path / folder)) for shard, folder in enumerate(folders)})
        partial = path / f"{HEAD}.partial"
        partial.write_text(json.dumps({"schema": SCHEMA, "save": earlier, "folders": folders}), "utf-8")
        to_disk(partial)
        os.replace(partial, path / HEAD)
        to_disk(path)
        for old in path.glob("shard-*-*"):
            if old.name not in folders:
                shutil.rmtree(old, ignore_errors=True)

    def load(self, path: Path) -> ShardedBuffer:
        """Replaces the contents by those that `save` wrote into `path`, and returns the buffer.

        Raises:
            ValueError: the files are of another schema version, or of another number of shards.
        """
        if not (path / HEAD).exists():
            raise ValueError(f"{path} holds no {HEAD}, so no buffer of buffer.shards = {self.count}; "
                             f"buffer.shards must be what it was when the buffer was saved.")
        folders = _head_of(path)["folders"]
        if len(folders) != self.count:
            raise ValueError(f"{path} holds a buffer of {len(folders)} shards, buffer.shards = {self.count}; "
                             f"set buffer.shards={len(folders)}.")
        self._empty()
        self._hear({shard: ("load", str(path / folder)) for shard, folder in enumerate(folders)})
        self._next_number = max(report.counts["next_number"] for report in self._reports.values())
        return self


def _head_of(path: Path) -> dict[str, Any]:
    """The head in a folder.

    Raises:
        ValueError: it is of another schema version.
    """
    head = json.loads((path / HEAD).read_text("utf-8"))
    if head["schema"] != SCHEMA:
        raise ValueError(f"{path} holds shards of schema {head['schema']}; this version reads schema {SCHEMA}.")
    return head
