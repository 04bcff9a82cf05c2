"""Puts rows, pools, links and trees back into an empty storage."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np

from tba.buffer.rows import places_by
from tba.buffer.storage import Storage


def restore(storage: Storage, rows: Mapping[int, Mapping[str, np.ndarray]], index: Mapping[str, np.ndarray]) -> None:
    """Fills `storage`, which has its prompts and segments, with what the index calls alive.

    `rows` are the columns of each segment, by its key.

    Raises:
        KeyError: the index names numbers that no segment holds.
    """
    held = _columns(rows, index)
    count = len(held["number"])
    held.update(_links(held["pool"]))
    storage.rows.fill(held)
    for key, row in places_by(held["segment"]):
        segment = storage.segments[key]
        places = held["at"][row]
        np.frombuffer(segment.rows, np.int32)[places] = row  # shares the array's memory
        segment.live = len(row)
        segment.live_tokens = int(held["length"][row].sum())
        storage.bytes += int(segment.bytes_N()[places].sum())
    for key in [key for key, segment in storage.segments.items() if not segment.live]:
        del storage.segments[key]
    storage.count, storage.tokens = count, int(held["length"].sum())
    storage.oldest, storage.newest = (0, count - 1) if count else (-1, -1)
    _fill_pools(storage, held)
    storage.list_versions(int(held["version"].min(initial=0)))
    if storage.worst is not None:
        for row in range(count):
            storage.worst.put(row, row)


def _columns(
    rows: Mapping[int, Mapping[str, np.ndarray]], index: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """All columns of what is alive, in order of insertion."""
    names = ("number", "pool", "version", "reward", "digest", "copy", "length")
    whole = {
        name: np.concatenate([part[name] for part in rows.values()]) if rows else np.empty(0, np.int64)
        for name in names
    }
    whole["segment"] = np.repeat(list(rows), [len(p["number"]) for p in rows.values()]).astype(np.int64)
    whole["at"] = np.concatenate([np.arange(len(p["number"])) for p in rows.values()] or [np.empty(0, np.int64)])
    order = np.argsort(whole["number"], kind="stable")
    order = order[np.isin(whole["number"][order], index["number"])]
    if not np.array_equal(whole["number"][order], index["number"]):
        raise KeyError(f"{len(index['number'])} are alive, {len(order)} of them in the files")
    held = {name: column[order] for name, column in whole.items()}
    return {**held, **{name: column for name, column in index.items() if name != "number"}}


def _links(pool: np.ndarray) -> dict[str, np.ndarray]:
    """Neighbours in order of insertion, over all and within each pool."""
    count = len(pool)
    older = np.arange(-1, count - 1)
    newer = np.append(np.arange(1, count), -1)[:count]
    pool_older, pool_newer = np.full(count, -1), np.full(count, -1)
    order = np.argsort(pool, kind="stable")
    same = pool[order][1:] == pool[order][:-1]
    pool_older[order[1:][same]] = order[:-1][same]
    pool_newer[order[:-1][same]] = order[1:][same]
    return {"older": older, "newer": newer, "pool_older": pool_older, "pool_newer": pool_newer}


def _fill_pools(storage: Storage, held: Mapping[str, np.ndarray]) -> None:
    order = np.lexsort((held["slot"], held["pool"]))
    for number, places in places_by(held["pool"][order]):
        pool, row = storage.pools[number], order[places]
        pool.rows = array("i", row.astype(np.int32).tobytes())
        pool.oldest, pool.newest = int(row.min()), int(row.max())
        pool.trees = tuple(
            storage.new_tree(name, [storage.leaf(name, r) for r in pool.rows]) for name in storage.trees
        )
        storage.num_prompts += 1
    recent = np.flatnonzero(held["window"] >= 0)
    order = recent[np.lexsort((held["window"][recent], held["pool"][recent]))]
    for number, places in places_by(held["pool"][order]):
        storage.pools[number].window = array("i", order[places].astype(np.int32).tobytes())
