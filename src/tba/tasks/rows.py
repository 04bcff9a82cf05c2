"""Rows with the columns that a task asks for: of files, or of what the datasets library loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tba.tasks.lines import Row, checked_rows, dataset_rows, json_rows, parquet_rows


def rows_of_file(path: str, columns: Mapping[str, str]) -> list[Row]:
    """Rows of a .jsonl or .parquet file, each of which has `columns`: column to the setting that asks for it.

    Raises:
        SettingsError: it cannot be read, or rows lack columns.
    """
    read = parquet_rows if Path(path).suffix == ".parquet" else json_rows
    return read(Path(path), _lacking(columns))


def rows_of_dataset(name: str, split: str, columns: Mapping[str, str], place: str) -> list[Row]:
    """Rows of one split of a Hugging Face data set, or of a folder of data files; `place` is the setting of `name`.

    Raises:
        SettingsError: the data set cannot be loaded, or rows lack columns.
    """
    rows = dataset_rows(name, None, split, lambda kind, said: (
        f"{place} = {name!r}, split {split!r}, cannot be loaded: {kind}: {said}"))
    return checked_rows([(f"{split}:{n}", row) for n, row in enumerate(rows)], _lacking(columns))


def _lacking(columns: Mapping[str, str]) -> Callable[[Any], str]:
    """Says which column a row has not."""
    def problem_of(row: Any) -> str:
        return next((f"has no column {column!r}, only {', '.join(map(repr, row))}; set {setting} to the right one."
                     for column, setting in columns.items() if column not in row), "")

    return problem_of
