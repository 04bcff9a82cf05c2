"""A run directory to what is shown of the run now, each file read only when it has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tba import metrics as m
from tba.advice import spent_in
from tba.control import is_under_way
from tba.newest import COMPLETIONS, FILE, GROUPS
from tba.report.logs import BAD_JSON
from tba.report.read import RunReader, RunRecord, Signature, setting, signature
from tba.report.text import mapping, number, rounded, visible, whole
from tba.settings import SettingsError

MAX_NEWEST = 2_000_000
"""Bytes of `newest.json` that are read: no run writes more."""
ENDED = ("done", "failed", "interrupted")
UNDER_WAY, CUT_OFF = "under way", "cut off"
PACE_STEPS = 50
"""Steps whose pace tells how long the rest will take."""
_SUMMARY_NOTE = "summary.json is missing"
_NEEDED = (m.WAIT_SECONDS, m.DRAW_SECONDS, m.COLLATE_SECONDS, m.PUBLISH_SECONDS, m.STEP_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A group of the batch that was trained on last, cut and made visible. Not yet escaped for HTML."""

    prompt_id: str
    prompt: str
    sampler: str
    """Of the buffer, which drew it."""
    size: int
    """Trajectories of the group; some of them are shown."""
    completions: tuple[tuple[str, float | None, int | None, int | None], ...]
    """Text, reward (reward units), version that sampled it, age (steps)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What `newest.json` says."""

    step: int
    groups: Sequence[Trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A run as it is at a moment."""

    record: RunRecord
    """Of a run under way without the summary of an earlier part; the trainer's time is summed over the steps."""
    status: str
    """`under way`, `done`, `failed`, `interrupted`, or `cut off`: ended without saying how."""
    logged_at: float | None
    """When something was logged last, seconds since 1970."""
    newest: Batch | None

    @property
    def is_under_way(self) -> bool:
        """Whether a process has hold of the run."""
        return self.status == UNDER_WAY

    @property
    def steps(self) -> tuple[int, int | None]:
        """Steps so far, and those of the whole run if the settings tell."""
        done = whole(self.record.steps[-1].get(m.STEP)) if self.record.steps else None
        return done or 0, whole(setting(self.record.settings, "trainer.steps"))

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step at the pace of the last ones; None if that is not known."""
        (done, total), last = self.steps, self.record.steps[-PACE_STEPS:]
        if total is None or len(last) < 2 or not self.is_under_way:
            return None
        first_at, last_at = (number(step.get(m.WALL)) for step in (last[0], last[-1]))
        if first_at is None or last_at is None or last_at < first_at:
            return None
        return max(0, total - done) * (last_at - first_at) / (len(last) - 1)


class Follower:
    """Looks at a run directory again and again."""

    def __init__(self, run_dir: Path) -> None:
        """Nothing is read yet."""
        self._run_dir = run_dir
        self._reader = RunReader(run_dir)
        self._newest: tuple[Signature, Batch | None] = (None, None)
        self._shown: tuple[Any, View] | None = None

    def look(self) -> View:
        """The run as it is now: the same object as before, if nothing has changed."""
        record, logged_at = self._reader.read(), self._logged_at()
        held, newest = is_under_way(self._run_dir), self._read_newest()
        seen = (record, held, logged_at, newest)
        before = self._shown
        if before is None or any(a is not b and a != b for a, b in zip(before[0], seen, strict=True)):
            said = record.summary.get("status")
            status = UNDER_WAY if held else said if said in ENDED else CUT_OFF
            self._shown = (seen, View(
                record=_under_way(record) if held else record, status=status, logged_at=logged_at, newest=newest,
            ))
        assert self._shown is not None
        return self._shown[1]

    def _logged_at(self) -> float | None:
        found = signature(self._run_dir / "metrics.jsonl")
        return None if found is None else found[2] / 1e9

    def _read_newest(self) -> Batch | None:
        path = self._run_dir / FILE
        now = signature(path)
        if now != self._newest[0]:
            self._newest = (now, _batch(path))
        return self._newest[1]


def is_hidden(settings: Mapping[str, Any]) -> bool:
    """Whether the completions of a run with these settings may offend, and are shown only to who asks for them."""
    return setting(settings, "task.name") == "redteam"


def check_run(run_dir: Path) -> None:
    """SettingsError if `run_dir` is no run directory."""
    if not any((run_dir / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise SettingsError([
            f"{str(run_dir)!r} is no run directory: it has no config.yaml and no metrics.jsonl; give the directory "
            f"that tba train writes."
        ])


def _under_way(record: RunRecord) -> RunRecord:
    """What is known of a run that has not ended: a summary would be of a part of it that was resumed since."""
    spent = dict.fromkeys(spent_in(dict.fromkeys(_NEEDED, 0.0)), 0.0)
    for step in record.steps:
        known = {name: max(0.0, number(step.get(name)) or 0.0) for name in _NEEDED}
        for part, seconds in spent_in(known).items():
            spent[part] += seconds
    notes = [note for note in record.notes if not note.startswith(_SUMMARY_NOTE)]
    return replace(record, summary={"trainer": spent}, notes=notes)


def _batch(path: Path) -> Batch | None:
    """What the file says; None if it is missing or not such a file."""
    try:
        with path.open("rb") as file:
            found = mapping(json.loads(file.read(MAX_NEWEST)))
    except (OSError, *BAD_JSON):
        return None
    step, groups = whole(found.get("step")), found.get("groups")
    if step is None or not isinstance(groups, list):
        return None
    return Batch(step=step, groups=[_trained(mapping(group)) for group in groups[:GROUPS]])


def _trained(group: Mapping[str, Any]) -> Trained:
    entries = group.get("completions")
    completions = tuple(
        (
            visible(entry.get("text", "")) + (" [cut here]" if entry.get("cut") is True else ""),
            rounded(entry.get("reward")), whole(entry.get("version")), whole(entry.get("age")),
        )
        for entry in (entries if isinstance(entries, list) else [])[:COMPLETIONS] if isinstance(entry, Mapping)
    )
    return Trained(
        prompt_id=visible(group.get("prompt_id", ""), 200), prompt=visible(group.get("prompt", "")),
        sampler=visible(group.get("sampler", ""), 40), size=whole(group.get("size")) or len(completions),
        completions=completions,
    )
