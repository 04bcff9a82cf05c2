"""Tables that a benchmark writes into a page, between two marks."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Puts `text` between the marks of a page; what is written by hand stays. SystemExit if it has not both marks."""
    whole = page.read_text("utf-8")
    before, first, rest = whole.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise SystemExit(f"{str(page)!r} has not both {begin} and {end}, between which the table goes; write them in.")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")
