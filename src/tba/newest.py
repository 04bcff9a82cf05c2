"""A few completions of the batch that was trained on last, for who watches a run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who reads the file needs no torch
    from tba.batch import Batch, MicroBatch
    from tba.recorder import Source

FILE = "newest.json"
"""In a run directory."""
GROUPS, COMPLETIONS, CHARACTERS = 4, 8, 2000
"""Groups in the file, completions of each, and characters of each text, at most."""
EVERY_S = 2.0
"""Seconds between two writings, at least."""
REST = 200
"""Times what a writing took that pass before the next: half a percent of the trainer's time, at most."""


class Newest:
    """Keeps `newest.json` of a run: the newest-sampled groups of the batch that was trained on last."""

    def __init__(
        self, run_dir: Path, decode: Callable[[Sequence[int]], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`decode` turns completion ids into text; `clock` gives seconds."""
        self._run_dir, self._decode, self._clock = run_dir, decode, clock
        self._due_at = clock()

    def tell(self, step: int, version: int, batch: Batch, sources: Sequence[Source]) -> float:
        """Writes the file if that is due; returns the seconds it took.

        `version` is that of the policy before `step`. What cannot be written is left out: nothing depends on it.
        """
        started = self._clock()
        if started < self._due_at:
            return 0.0
        found = {"step": step, "version": version, "groups": newest_groups(batch, sources, version, self._decode)}
        partial = self._run_dir / f".{FILE}.partial"
        try:
            partial.write_text(json.dumps(found, allow_nan=False), "utf-8")
            os.replace(partial, self._run_dir / FILE)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
        ended = self._clock()
        self._due_at = ended + max(EVERY_S, REST * (ended - started))
        return ended - started


def newest_groups(
    batch: Batch, sources: Sequence[Source], version: int, decode: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """The groups with the newest trajectory first, as plain data; of equally new ones those drawn first."""
    found = []
    for micro in batch.micro_batches:
        places: dict[int, list[int]] = {}
        for place, group in enumerate(micro.group_N.tolist()):
            places.setdefault(group, []).append(place)
        versions = micro.version_N.tolist()
        found += [(-max(versions[n] for n in own), group, micro, own) for group, own in places.items()]
    found.sort(key=lambda one: one[:2])
    shown = []
    for _, group, micro, own in found[:GROUPS]:
        source = sources[group] if sources else None
        shown.append({
            "prompt_id": micro.prompt_ids[own[0]][:CHARACTERS], "prompt": source.text[:CHARACTERS] if source else "",
            "sampler": source.sampler if source else "", "size": len(own),
            "completions": [_completion(micro, place, version, decode) for place in own[:COMPLETIONS]],
        })
    return shown


def _completion(
    micro: MicroBatch, place: int, version: int, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    row = int(micro.row_N[place])
    rows = next(iter(micro.rows))
    for rows in micro.rows:  # the distinct ones lie in pieces, one after another
        if row < len(rows.target_NT):
            break
        row -= len(rows.target_NT)
    tokens = rows.target_NT[row][rows.completion_NT[row]].tolist()
    text = decode(tokens[:CHARACTERS])
    sampled_by = int(micro.version_N[place])
    return {
        "text": text[:CHARACTERS], "cut": len(text) > CHARACTERS or len(tokens) > CHARACTERS,
        "reward": float(micro.reward_N[place]), "version": sampled_by, "age": version - sampled_by,
    }
