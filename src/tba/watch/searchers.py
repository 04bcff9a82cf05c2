"""The searchers of a run under way, asked of the run now and then, by nobody who would have to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba import control
from tba.report.text import figure, mapping, number, visible
from tba.settings import SettingsError

EVERY_S = 5.0
"""Seconds between an answer and the next question, at least."""
LIMIT_S = 3.0
"""Seconds that the run may take to answer: during a checkpoint it takes longer, and then it is said so."""
MAX_SHOWN = 256

Ask = Callable[..., Mapping[str, Any]]
"""`control.ask`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the searchers. Not yet escaped for HTML."""

    lines: Sequence[Mapping[str, str]] = ()
    """One a searcher: name, state, delivered, heard, held, where."""
    said_at: float | None = None
    """When the run said so, seconds since 1970; None if it has not."""
    trouble: str = ""
    """Why there is no newer answer."""


class SearcherList:
    """Asks a run for its searchers on a thread of its own.

    consumes: answers of the run
    waits for: an answer, at most `LIMIT_S`, on its thread; `known` waits for nothing
    woken by: whoever looks
    produces: what is known
    """

    def __init__(
        self, run_dir: Path, *, ask: Ask = control.ask, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` asks the run; `clock` gives seconds."""
        self._run_dir, self._ask, self._clock = run_dir, ask, clock
        self._known = Known()
        self._asking: threading.Thread | None = None
        self._due_at = clock()

    def known(self) -> Known:
        """What the run said last; it is asked again if that is due."""
        if (self._asking is None or not self._asking.is_alive()) and self._clock() >= self._due_at:
            self._asking = threading.Thread(target=self._look, name="searchers", daemon=True)
            self._asking.start()
        return self._known

    def wait(self) -> None:
        """Until the question that is open, if one is, has its answer or its limit has passed."""
        if self._asking is not None:
            self._asking.join()

    def _look(self) -> None:
        try:
            answer = self._ask(self._run_dir, {"do": "list", "count": 1}, limit_s=LIMIT_S)
            lines = answer.get("searchers")
            shown = [_line(mapping(line)) for line in (lines if isinstance(lines, list) else [])[:MAX_SHOWN]]
            self._known = Known(lines=shown, said_at=time.time())
        except (SettingsError, OSError, ValueError, KeyError) as error:
            before = self._known
            said = error.problems[0] if isinstance(error, SettingsError) else f"the run cannot be asked: {error}"
            self._known = Known(lines=before.lines, said_at=before.said_at, trouble=visible(said, 400))
        self._due_at = self._clock() + EVERY_S


def _line(line: Mapping[str, Any]) -> dict[str, str]:
    heard = number(line.get("heard_s"))
    return {
        "name": visible(line.get("name", ""), 80), "state": visible(line.get("state", ""), 80),
        "delivered": figure(number(line.get("delivered")) or 0), "held": figure(number(line.get("held")) or 0),
        "heard": "never" if heard is None else f"{heard:.0f} s before", "where": visible(line.get("where") or "", 120),
    }
