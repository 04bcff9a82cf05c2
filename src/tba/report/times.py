"""Where the time of each side went, as bars and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tba.advice import Times, seconds_of
from tba.report.read import RunRecord, setting
from tba.report.text import count, duration, mapping, number, visible

MAX_PARTS = 8
_MEANINGS = {
    "training": "forward, backward and optimizer",
    "drawing": "waiting for a batch in the making",
    "publishing": "copying the weights for searchers",
    "sampling": "completions from the model",
    "scoring": "rewards",
    "reference": "log-probs under the reference",
    "loading": "taking weights in, and their digests",
}
_IDLE = {"trainer": "waiting for data", "searchers": "waiting for leases and weights"}
_ONE_PROCESS = "one process: while one side works, the other is idle"
_TRAINER = ("step_s", "draw_s", "publish_s", "wait_s")
_ORDER = ("sampling", "scoring", "reference", "loading", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a side's work."""

    name: str
    meaning: str
    style: str
    """Name of its colour."""
    width: str
    """Its share of the bar, as CSS has it."""
    share: str
    seconds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The trainer or all searchers."""

    name: str
    about: str
    parts: Sequence[Part]

    @property
    def caption(self) -> str:
        """The bar in words."""
        return f"{self.name}: " + ", ".join(f"{part.name} {part.share}" for part in self.parts)


def sides(run: RunRecord) -> list[Side]:
    """Both sides, as far as the summary tells; an older one may not."""
    trainer, searchers = (mapping(run.summary.get(name)) for name in ("trainer", "searchers"))
    lives = {str(name): _seconds(parts) for name, parts in searchers.items()}
    spent = seconds_of({
        "trainer": {**dict.fromkeys(_TRAINER, 0.0), **_seconds(trainer)},
        "searchers": {name: parts for name, parts in lives.items() if parts},
    })
    num_searchers = sum(1 for parts in lives.values() if parts)
    is_one = setting(run.settings, "mode") == "lockstep"
    found = [
        _side("trainer", spent, "checkpoints left out", is_one),
        _side("searchers", spent, f"{count(num_searchers)} in all, their time summed", is_one),
    ]
    return [side for side in found if side is not None]


def _seconds(parts: object) -> dict[str, float]:
    """What is a duration among untrusted numbers."""
    known = {str(name): number(value) for name, value in mapping(parts).items()}
    return {name: value for name, value in known.items() if value is not None and value >= 0}


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2f} s"


def _side(name: str, spent: Times, about: str, is_one_process: bool) -> Side | None:
    seconds: Mapping[str, float] = getattr(spent, name)
    total = sum(seconds.values())
    if not 0 < total < float("inf"):
        return None
    order = sorted(seconds, key=lambda part: (_ORDER.index(part) if part in _ORDER else len(_ORDER), part))
    shown = list(seconds) if name == "trainer" else order[:MAX_PARTS]
    parts = [
        Part(
            name=visible(part, 40), style="idle" if part == "idle" else str(place % 4),
            meaning=_IDLE[name] if part == "idle" else _MEANINGS.get(part, ""),
            width=f"{100 * seconds[part] / total:.3f}%", share=f"{100 * seconds[part] / total:.1f} %",
            seconds=_time(seconds[part]),
        )
        for place, part in enumerate(shown)
    ]
    return Side(name=name, about="; ".join(filter(None, [about, _ONE_PROCESS if is_one_process else ""])), parts=parts)
