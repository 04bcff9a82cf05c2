"""Run directory to records, whatever state its files are in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tba import metrics
from tba.report.logs import Log, parse
from tba.report.text import count, mapping, number, rounded, visible, whole

MAX_COMPLETIONS = 2000
MAX_VERSIONS = 20
MAX_COMPLETIONS_JSON = 6_000_000
"""Characters of JSON that all completions together may take on the page."""
MAX_SETTINGS = 40_000

Signature = tuple[int, int, int] | None
"""Of a file: inode, bytes, nanoseconds of its last change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prompt of an evaluation and its completions, cut and made visible. Not yet escaped for HTML."""

    version: int
    """Weights that were evaluated."""
    prompt_id: str
    prompt: str
    completions: tuple[tuple[str, float | None, float | None, str], ...]
    """Text, reward (reward units), log-prob (nats), why it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run directory says, and what it does not."""

    name: str
    summary: Mapping[str, Any]
    settings_text: str
    settings: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    """Training steps, in order, one of each number; the line written last wins."""
    evaluations: Sequence[Mapping[str, Any]]
    """Evaluations in order of version, one of each; the line written last wins."""
    ledger: Mapping[str, Any]
    answered: Sequence[Answered]
    """Newest version first."""
    notes: Sequence[str]
    """What is missing or could not be read, one sentence each."""

    @property
    def held_out(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Held-out numbers at the start and at the end: the summary's, and the evaluations' where it lacks them."""
        first, last = (self.evaluations[0], self.evaluations[-1]) if self.evaluations else ({}, {})
        return ({**first, **mapping(self.summary.get("start"))}, {**last, **mapping(self.summary.get("final"))})


def read_run(run_dir: Path) -> RunRecord:
    """Everything that `run_dir` holds for the page; files that are missing or broken become notes."""
    return RunReader(run_dir).read()


class RunReader:
    """A run directory, read as often as one likes: what has not changed is not read again."""

    def __init__(self, run_dir: Path) -> None:
        """Nothing is read yet."""
        self._run_dir = run_dir
        self._log = Log(run_dir / "metrics.jsonl", "there are no curves")
        self._steps: dict[int, Mapping[str, Any]] = {}
        self._evaluations: dict[int, Mapping[str, Any]] = {}
        self._kept: dict[str, tuple[Signature, Any, list[str]]] = {}
        self._record: RunRecord | None = None

    def read(self) -> RunRecord:
        """What the directory holds now: the same object as before, if no file has changed."""
        before = {name: kept[0] for name, kept in self._kept.items()}
        notes: list[str] = []
        summary = self._of("summary.json", notes, _json("the run is still going, or was killed"))
        settings_text, settings = self._of("config.yaml", notes, read_settings)
        steps, evaluations = self._of("metrics.jsonl", notes, self._read_metrics)
        ledger = self._of(
            "ledger.json", notes, _json("the ledger is taken from summary.json, if that has one")
        )
        answered = self._of("completions.jsonl", notes, _read_completions)
        if self._record is None or before != {name: kept[0] for name, kept in self._kept.items()}:
            self._record = RunRecord(
                name=visible(summary.get("run") or self._run_dir.resolve().name, 200),
                summary=summary,
                settings_text=settings_text,
                settings=settings,
                steps=steps,
                evaluations=evaluations,
                ledger=ledger or mapping(summary.get("ledger")),
                answered=answered,
                notes=notes,
            )
        return self._record

    def _of(self, name: str, notes: list[str], read: Callable[[Path, list[str]], Any]) -> Any:
        """What `read` makes of a file, and its notes; of a file that has not changed what it made before."""
        path = self._run_dir / name
        now = signature(path)
        if name not in self._kept or self._kept[name][0] != now:
            own: list[str] = []
            self._kept[name] = (now, read(path, own), own)
        notes += self._kept[name][2]
        return self._kept[name][1]

    def _read_metrics(
        self, path: Path, notes: list[str]
    ) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        """Steps and evaluations; only what is new is read, unless the file was cut back in between."""
        del path
        if not self._log.goes_on():
            self._steps, self._evaluations = {}, {}
        unfinished: tuple[dict[int, Mapping[str, Any]], ...] = ({}, {})
        for line, is_whole in self._log.lines():
            into = (self._steps, self._evaluations) if is_whole else unfinished
            for key, places in zip((metrics.STEP, metrics.EVAL_STEP), into, strict=True):
                place = whole(line.get(key))
                if place is not None:
                    places[place] = line
        notes += self._log.notes()
        steps, evaluations = (
            {**known, **late} for known, late in zip((self._steps, self._evaluations), unfinished, strict=True)
        )
        return [steps[place] for place in sorted(steps)], [evaluations[place] for place in sorted(evaluations)]


def signature(path: Path) -> Signature:
    """What changes whenever a file does; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_bytes(path: Path, notes: list[str], consequence: str) -> bytes | None:
    try:
        data = path.read_bytes() if path.is_file() else None
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({visible(error.strerror, 200)}): {consequence}.")
        return None
    if data is None:
        notes.append(f"{path.name} is missing: {consequence}.")
    elif not data.strip():
        notes.append(f"{path.name} is empty: {consequence}.")
    return data


def _json(consequence: str) -> Callable[[Path, list[str]], Mapping[str, Any]]:
    """Reads a file that holds a JSON object; an empty one if it does not."""

    def read(path: Path, notes: list[str]) -> Mapping[str, Any]:
        data = _read_bytes(path, notes, consequence)
        if data is None or not data.strip():
            return {}
        value = parse(data)
        if value is None:
            notes.append(f"{path.name} is not a JSON object: {consequence}.")
        return value or {}

    return read


def read_settings(path: Path, notes: list[str]) -> tuple[str, Mapping[str, Any]]:
    """A run's `config.yaml` as text and as a tree; what is wrong with it is added to `notes`."""
    data = _read_bytes(path, notes, "the settings are not known")
    text = (data or b"").decode("utf-8", errors="replace")
    if len(text) > MAX_SETTINGS:
        notes.append(f"{path.name} is long: only its beginning is shown.")
    try:
        # Only scalars are taken from the tree, so that YAML aliases cannot make it grow.
        tree = yaml.safe_load(text) if len(text) <= MAX_SETTINGS else None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        notes.append(f"{path.name} is not YAML; it is shown as it stands.")
        tree = None
    return visible(text.strip().replace("\r\n", "\n"), MAX_SETTINGS), mapping(tree)


def _read_completions(path: Path, notes: list[str]) -> list[Answered]:
    """Prompts of the first and the newest evaluations, an equal share of each, newest version first."""
    kept: dict[int, dict[str, Answered]] = {}
    held: Counter[int] = Counter()
    odd = total = 0
    log = Log(path, "there are no completions to browse")
    for line, _ in log.lines():
        answered, strays = _answered(line)
        odd += strays
        if answered is None:
            continue
        version, num_completions = answered.version, len(answered.completions)
        total += num_completions
        of_version = kept.setdefault(version, {})
        if answered.prompt_id in of_version or held[version] < MAX_COMPLETIONS:
            held[version] += num_completions
            of_version[answered.prompt_id] = answered
        if len(kept) > MAX_VERSIONS:
            del kept[sorted(kept)[1]]
    notes += log.notes()
    if odd:
        notes.append(
            f"{path.name}: {count(odd)} {'entry lacks' if odd == 1 else 'entries lack'} the expected "
            "fields; skipped."
        )
    chosen = _within_bounds(kept)
    shown = sum(len(answered.completions) for answered in chosen)
    if shown < total:
        notes.append(
            f"{path.name}: {count(shown)} of {count(total)} completions are on this page: the first prompts "
            f"of the first and the newest versions ({len(kept)} in all)."
        )
    return chosen


def _within_bounds(kept: Mapping[int, Mapping[str, Answered]]) -> list[Answered]:
    share = MAX_COMPLETIONS // max(1, len(kept))
    characters = MAX_COMPLETIONS_JSON // max(1, len(kept))
    chosen: list[Answered] = []
    for version in sorted(kept, reverse=True):
        num_left, characters_left = share, characters
        for answered in kept[version].values():
            characters_left -= len(json.dumps(answered.prompt))
            fitting = []
            for completion in answered.completions[:num_left]:
                characters_left -= len(json.dumps(completion))
                if characters_left < 0:
                    break
                fitting.append(completion)
            num_left -= len(fitting)
            if characters_left >= 0 or fitting:
                chosen.append(replace(answered, completions=tuple(fitting)))
            if num_left <= 0 or characters_left < 0:
                break
    return chosen


def _answered(line: Mapping[str, Any]) -> tuple[Answered | None, int]:
    """One line of `completions.jsonl`, and how many of its entries had to be left out."""
    version, entries = whole(line.get("version")), line.get("completions")
    if version is None or not isinstance(entries, list):
        return None, 1
    completions = tuple(
        (
            visible(entry["text"]),
            rounded(entry.get("reward")),
            rounded(entry.get("logp")),
            visible(entry.get("finish") or "", 40),
        )
        for entry in entries
        if isinstance(entry, Mapping) and isinstance(entry.get("text"), str)
    )
    prompt_id = visible(line.get("prompt_id", ""), 200)
    answered = Answered(
        version=version, prompt_id=prompt_id, prompt=visible(line.get("prompt", "")), completions=completions
    )
    return answered, len(entries) - len(completions)


def setting(settings: Mapping[str, Any], path: str) -> str | int | float | bool | None:
    """The scalar at a dotted path of the settings; None where there is none."""
    value: Any = settings
    for key in path.split("."):
        value = mapping(value).get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return value if isinstance(value, (str, bool)) else None
