"""A JSON-lines file, read as it grows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tba.report.text import count, visible

BAD_JSON = (ValueError, RecursionError)


class Log:
    """Gives the objects of a JSON-lines file, each whole line once; what is not an object is counted."""

    def __init__(self, path: Path, consequence: str) -> None:
        """`consequence` is what it means if the file is missing."""
        self._path, self._consequence = path, consequence
        self._restart()

    def _restart(self) -> None:
        self._offset, self._last, self._bad = 0, b"", 0
        self._is_cut, self._trouble = False, ""

    def goes_on(self) -> bool:
        """Whether the file still begins with all that was read of it; if not, `lines` begins at its start again.

        A resumed run cuts its logs back to the checkpoint, and writes on. That what was read is still there is seen
        from the last line: it holds the time at which it was written.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                is_same = file.read(len(self._last)) == self._last
        except OSError:
            is_same = False
        if not is_same:
            self._restart()
        return is_same

    def lines(self) -> Iterator[tuple[Mapping[str, Any], bool]]:
        """What came since the last call, and whether the line is whole: one that is not may come again."""
        self._is_cut, self._trouble = False, ""
        try:
            if not self._path.is_file() or self._path.stat().st_size == 0:
                self._trouble = f"is {'empty' if self._path.is_file() else 'missing'}"
                return
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for raw in file:
                    is_whole = raw.endswith(b"\n")
                    value = parse(raw) if raw.strip() else None
                    if is_whole:
                        self._offset, self._last = self._offset + len(raw), raw
                    if value is not None:
                        yield value, is_whole
                    elif raw.strip():
                        self._bad += is_whole
                        self._is_cut = not is_whole
        except OSError as error:
            self._trouble = f"cannot be read ({visible(error.strerror, 200)})"

    def notes(self) -> list[str]:
        """What is missing or could not be read so far, one sentence each."""
        name, found = self._path.name, []
        if self._trouble:
            return [f"{name} {self._trouble}: {self._consequence}."]
        if self._bad:
            lines = "line is" if self._bad == 1 else "lines are"
            found.append(f"{name}: {count(self._bad)} {lines} not a JSON object; skipped.")
        if self._is_cut:
            found.append(f"{name} ends in a half-written line; skipped.")
        return found


def parse(raw: bytes) -> Mapping[str, Any] | None:
    """The JSON object that `raw` is, else None."""
    try:
        value = json.loads(raw.decode("utf-8", errors="replace"))
    except BAD_JSON:
        return None
    return value if isinstance(value, Mapping) else None
