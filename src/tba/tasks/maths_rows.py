"""Problems from files and Hugging Face data sets: question, gold answer, solution, level."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.maths_settings import ColumnSettings
from tba.tasks.lines import Row, checked_rows, dataset_rows, json_rows, odd_row, parquet_rows

USUAL = {"question": ("question", "problem", "prompt"), "answer": ("answer", "solution"), "level": ("level",)}
"""Names that a column is looked for under."""
CALCULATOR = re.compile(r"<<[^<>\n]*>>")
"""What GSM8K's solutions tell a calculator between a formula and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of any source."""

    place: str
    """Where it comes from: `file:line`, or data set and row; also its id."""
    question: str
    gold: str
    """The answer alone."""
    solution: str
    """Working and answer, as they are imitated; the gold answer where there is no working."""
    level: str | None = None
    """What evaluation tells problems apart by."""
    kind: str = "number"
    """`number`: the style's rule compares; `text`: the plain rule for words does."""
    template: str = ""
    """What it has in common with its variants; '' where it has none."""
    columns: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further columns that travel with the prompt."""


def file_problems(path: Path, columns: ColumnSettings, style: str) -> list[Problem]:
    """The problems of a JSONL or Parquet file.

    Raises:
        SettingsError: with file and line of everything that is wrong.
    """
    read = parquet_rows if path.suffix == ".parquet" else json_rows
    return [_problem(row, columns, style) for row in read(path, lambda row: row_problem(row, columns))]


def dataset_problems(name: str, columns: ColumnSettings, style: str) -> list[Problem]:
    """The problems of a Hugging Face data set, `id:config:split`; it is fetched if this machine has no copy.

    Raises:
        SettingsError: it cannot be had, or with the row of everything that is wrong.
    """
    where, config, split = [*name.split(":"), "", ""][:3]
    found = dataset_rows(where, config or None, split or "train", lambda kind, said: (
        f"data set {name!r} cannot be loaded ({kind}: {said}); check its name and the network, or give a local copy "
        f"with task.path=FILE."))
    rows = ((f"{name}:{number}", row) for number, row in enumerate(found, 1))
    return [_problem(row, columns, style) for row in checked_rows(rows, lambda row: row_problem(row, columns))]


def row_problem(row: Any, columns: ColumnSettings) -> str:
    """What is wrong with a row; '' if nothing is."""
    if not isinstance(row, dict):
        return odd_row(row)
    for role in ("question", "answer"):
        name = column_of(row, columns, role)
        if name not in row:
            return (f"has no column {name!r}, only {', '.join(map(repr, row))}; set task.columns.{role} to the one "
                    f"with the {role}.")
        value = row[name]
        is_text = isinstance(value, str) or (role == "answer" and type(value) in (int, float))
        if not is_text or not str(value).strip():
            return f"has a {name!r} that is no text: {str(value)[:40]!r}."
    for role in ("solution", "level"):
        name = getattr(columns, role)
        if name is not None and name not in row:
            return f"has no column {name!r}, only {', '.join(map(repr, row))}; set task.columns.{role}."
    return odd_row(row)


def column_of(row: Mapping[str, Any], columns: ColumnSettings, role: str) -> str:
    """The column that is set for a role, else the first of its usual names that the row has, else the first."""
    given = getattr(columns, role)
    usual = USUAL[role]
    return given or next((name for name in usual if name in row), usual[0])


def _problem(placed: Row, columns: ColumnSettings, style: str) -> Problem:
    place, row = placed
    answer = str(row[column_of(row, columns, "answer")])
    solution = row.get(columns.solution or "solution")
    level = row.get(column_of(row, columns, "level"))
    return Problem(
        place=place, question=row[column_of(row, columns, "question")], gold=gold_of(answer, style),
        solution=without_calculator(solution if isinstance(solution, str) and solution.strip() else answer),
        level=None if level is None else str(level),
    )


def gold_of(answer: str, style: str) -> str:
    """The answer alone: what follows the last `####`, or stands in the last box; else all of it.

    '' if a box is never closed.
    """
    if style == "math":
        boxed = last_boxed(answer)
        return answer.strip() if boxed is None else boxed.strip()
    return answer.rpartition("####")[2].strip()


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` or `\fbox{...}`; '' if that is never closed, None if there is none."""
    at = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if at < 0:
        return None
    start = at = text.index("{", at) + 1
    depth = 1
    for mark in re.finditer(r"\\[{}]|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return text[at : at + mark.start()]
    return ""


def without_calculator(solution: str) -> str:
    """A solution without the marks of GSM8K's calculator: `3*4=<<3*4=12>>12` is `3*4=12`."""
    return CALCULATOR.sub("", solution)


def distinct(problems: Iterable[Problem], taken: Iterable[Problem] = ()) -> list[Problem]:
    """The first problem of each question, none of those in `taken`; questions that differ in spaces alone are one."""
    seen = {key_of(problem) for problem in taken}
    found = []
    for problem in problems:
        if (key := key_of(problem)) not in seen:
            seen.add(key)
            found.append(problem)
    return found


def key_of(problem: Problem) -> str:
    """The question with every run of spaces as one."""
    return " ".join(problem.question.split())
