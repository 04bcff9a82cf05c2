"""Run directory to records, whatever state its files are in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tba import metrics
from tba.report.text import count, mapping, number, rounded, visible, whole

MAX_COMPLETIONS = 2000
MAX_VERSIONS = 20
MAX_COMPLETIONS_JSON = 6_000_000
"""Characters of JSON that all completions together may take on the page."""
MAX_SETTINGS = 40_000
_BAD_JSON = (ValueError, RecursionError)


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
    notes: list[str] = []
    summary = _read_json(run_dir / "summary.json", notes, "the run is still going, or was killed")
    settings_text, settings = _read_settings(run_dir / "config.yaml", notes)
    steps: dict[int, Mapping[str, Any]] = {}
    evaluations: dict[int, Mapping[str, Any]] = {}
    for line in _read_lines(run_dir / "metrics.jsonl", notes, "there are no curves"):
        for key, into in ((metrics.STEP, steps), (metrics.EVAL_STEP, evaluations)):
            place = whole(line.get(key))
            if place is not None:
                into[place] = line
    ledger = _read_json(
        run_dir / "ledger.json", notes, "the ledger is taken from summary.json, if that has one"
    )
    return RunRecord(
        name=visible(summary.get("run") or run_dir.resolve().name, 200),
        summary=summary,
        settings_text=settings_text,
        settings=settings,
        steps=[steps[place] for place in sorted(steps)],
        evaluations=[evaluations[place] for place in sorted(evaluations)],
        ledger=ledger or mapping(summary.get("ledger")),
        answered=_read_completions(run_dir / "completions.jsonl", notes),
        notes=notes,
    )


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


def _read_json(path: Path, notes: list[str], consequence: str) -> Mapping[str, Any]:
    data = _read_bytes(path, notes, consequence)
    if data is None or not data.strip():
        return {}
    try:
        value = json.loads(data.decode("utf-8", errors="replace"))
    except _BAD_JSON:
        value = None
    if not isinstance(value, Mapping):
        notes.append(f"{path.name} is not a JSON object: {consequence}.")
    return mapping(value)


def _read_lines(path: Path, notes: list[str], consequence: str) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON-lines file, one at a time; what is not one is counted in a note."""
    try:
        if not path.is_file() or path.stat().st_size == 0:
            notes.append(f"{path.name} is {'empty' if path.is_file() else 'missing'}: {consequence}.")
            return
        bad, cut = 0, False
        with path.open("rb") as file:
            for raw in file:
                if not raw.strip():
                    continue
                value = _parse_line(raw)
                if value is not None:
                    yield value
                elif raw.endswith(b"\n"):
                    bad += 1
                else:
                    cut = True
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({visible(error.strerror, 200)}): {consequence}.")
        return
    if bad:
        notes.append(
            f"{path.name}: {count(bad)} {'line is' if bad == 1 else 'lines are'} not a JSON object; skipped."
        )
    if cut:
        notes.append(f"{path.name} ends in a half-written line; skipped.")


def _parse_line(raw: bytes) -> Mapping[str, Any] | None:
    try:
        value = json.loads(raw.decode("utf-8", errors="replace"))
    except _BAD_JSON:
        return None
    return value if isinstance(value, Mapping) else None


def _read_settings(path: Path, notes: list[str]) -> tuple[str, Mapping[str, Any]]:
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
    for line in _read_lines(path, notes, "there are no completions to browse"):
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
