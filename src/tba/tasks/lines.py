"""Rows of JSONL and Parquet files, with the file and line of everything that is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tba.settings import SettingsError

MAX_PROBLEMS = 20
"""Bad lines that are reported at once."""

Row = tuple[str, dict[str, Any]]
"""Place, as `file:line`, and columns."""


def json_rows(path: Path, problem_of: Callable[[Any], str]) -> list[Row]:
    """Every non-blank line of a JSONL file; a byte-order mark is skipped. `problem_of` says what a row lacks.

    Raises:
        SettingsError: with the file and line of every malformed one.
    """
    rows: list[Row] = []
    problems: list[str] = []
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{path} cannot be read as UTF-8 text: {error}."]) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{place} (line {number}) is not JSON: {error}.")
            continue
        wrong = odd_row(row) or problem_of(row)
        if wrong:
            problems.append(f"{place} (line {number}) {wrong}")
        else:
            rows.append((place, row))
    refuse(problems)
    return rows


def parquet_rows(path: Path, problem_of: Callable[[Any], str]) -> list[Row]:
    """Every row of a Parquet file, numbered from 1.

    Raises:
        SettingsError: it is no such file, or with the number of every malformed row.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        listed = parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise SettingsError([f"{path} cannot be read as a Parquet file: {error}."]) from error
    return checked_rows(((f"{path}:{number}", row) for number, row in enumerate(listed, 1)), problem_of)


def dataset_rows(
    name: str, config: str | None, split: str, refusal: Callable[[str, str], str]
) -> list[dict[str, Any]]:
    """Rows of one split of a Hugging Face data set, or of a folder of data files; fetched if there is no copy here.

    Raises:
        SettingsError: it cannot be had; `refusal` makes the message of the error's kind and what it says.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded: Any = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        refused = refusal(type(error).__name__, " ".join(str(error).split())[:300])
        raise SettingsError([refused]) from error
    return [dict(row) for row in loaded]


def checked_rows(rows: Iterable[Row], problem_of: Callable[[Any], str]) -> list[Row]:
    """`rows`, if nothing is wrong with any.

    Raises:
        SettingsError: with the place of every malformed one.
    """
    listed = list(rows)
    refuse([f"{place} {wrong}" for place, row in listed if (wrong := problem_of(row))])
    return listed


def odd_row(row: Any) -> str:
    """What keeps a line's value from being a row of text; '' if nothing does."""
    if not isinstance(row, dict):
        return f"holds a {type(row).__name__}; it must hold an object of columns."
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which is no text; write the whole character."
    return ""


def refuse(problems: list[str]) -> None:
    """Raises SettingsError with the first of many `problems` and the number of the others, if there are any."""
    if len(problems) > MAX_PROBLEMS + 1:
        problems = [*problems[:MAX_PROBLEMS], f"... and {len(problems) - MAX_PROBLEMS} more."]
    if problems:
        raise SettingsError(problems)
