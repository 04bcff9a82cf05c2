"""Rows of a user's data: JSON lines, Parquet, or what the datasets library loads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.sections import SettingsError
from tba.tasks.custom import MAX_PROBLEMS, read_rows

Row = tuple[str, dict[str, Any]]
"""(place: file and line, or split and row; columns)"""


def rows_of_file(path: str, columns: Mapping[str, str]) -> list[Row]:
    """Rows of a .jsonl or .parquet file, each of which has `columns`: column to the setting that asks for it.

    Raises:
        SettingsError: it cannot be read, or rows lack columns.
    """
    if Path(path).suffix == ".parquet":
        rows = _parquet(Path(path))
    else:
        rows = read_rows(Path(path), *next(iter(columns.items())))
    return _with_columns(rows, columns)


def rows_of_dataset(name: str, split: str, columns: Mapping[str, str], place: str) -> list[Row]:
    """Rows of one split of a Hugging Face data set, or of a folder of data files; `place` is the setting of `name`.

    Raises:
        SettingsError: the library is missing, the data set cannot be loaded, or rows lack columns.
    """
    try:
        import datasets
    except ImportError as error:
        raise SettingsError([
            f"{place} = {name!r} is loaded by the package datasets, which is not installed; install it, or "
            f"give a JSONL or Parquet file instead."
        ]) from error
    datasets.disable_progress_bars()
    try:
        loaded: Any = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SettingsError([
            f"{place} = {name!r}, split {split!r}, cannot be loaded: {type(error).__name__}: {reason}"
        ]) from error
    return _with_columns([(f"{split}:{n}", dict(row)) for n, row in enumerate(loaded)], columns)


def _parquet(path: Path) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise SettingsError([f"{path} cannot be read as Parquet: {error}."]) from error
    return [(f"{path}:{n}", row) for n, row in enumerate(table.to_pylist(), 1)]


def _with_columns(rows: list[Row], columns: Mapping[str, str]) -> list[Row]:
    bad = (
        f"{where} has no column {column!r}, only {', '.join(map(repr, row))}; set {setting} to the right one."
        for where, row in rows for column, setting in columns.items() if column not in row
    )
    problems = list(itertools.islice(bad, MAX_PROBLEMS))
    if problems:
        raise SettingsError(problems)
    return rows
