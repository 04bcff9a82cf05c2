"""The settings under `task` that only the maths task uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from tba.sections import NonNegativeInt, PositiveInt, Section

SUFFIXES = (".jsonl", ".parquet")
"""Files of problems that can be read."""


class ColumnSettings(Section):
    """Names of the columns of a data set of problems; what is null is looked for under its usual names."""

    question: str | None = None
    """The problem; null: question, problem or prompt."""
    answer: str | None = None
    """The answer, alone or at the end of a solution (after `####`, in a box); null: answer or solution."""
    solution: str | None = None
    """What `tba sft` imitates; null: solution, else the answer's column."""
    level: str | None = None
    """What evaluation tells problems apart by; null: level, if there is one."""


class MathsSettings(Section):
    """The part of `task` that only the maths task uses."""

    dataset: str | None = None
    """maths: Hugging Face data set as `id:config:split`; config and split may be left out (split: train)."""
    held_out_dataset: str | None = None
    """maths: the same for held-out problems; without it the last `held_out` rows of the data."""
    families: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """maths: families of reasoning-gym by name, each with its own settings; a list of names takes the defaults."""
    problems: PositiveInt = 2000
    """maths: training problems generated over all families, at most."""
    columns: ColumnSettings = Field(default_factory=ColumnSettings)
    style: Literal["gsm8k", "math", "gsm8k_paper"] = "gsm8k"
    """maths: how answers are found and compared: the last number, a boxed expression, or the paper's own rule."""
    format: Literal["template", "chat", "paper", "vineppo"] = "template"
    """maths: how a problem becomes a prompt: `template` as text, `template` as a chat turn, the paper's, VinePPO's."""
    template: str | None = None
    """maths: Jinja text with `question` and `level`; null: the question (and for format template a line break)."""
    shots: NonNegativeInt = 0
    """maths: solved training problems shown before each problem; they are not trained on."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """maths: what happens to prompts over `max_prompt_tokens`; those dropped are counted. None is ever cut."""
    bad_gold: Literal["refuse", "drop"] = "refuse"
    """maths: what happens to problems whose gold answer the checker does not find right; those dropped are counted."""

    @field_validator("families", mode="before")
    @classmethod
    def _with_defaults(cls, value: Any) -> Any:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return {name: {} for name in value}
        if isinstance(value, dict):
            return {name: {} if options is None else options for name, options in value.items()}
        return value


def maths_problems(task: Any) -> Iterator[str]:
    """What is wrong with the settings `task` of the maths task, files that do not exist among it."""
    given = [key for key in ("path", "dataset", "families") if getattr(task, key)]
    if len(given) != 1:
        said = " and ".join(f"task.{key}" for key in given) or "no source of problems"
        yield f"{said}: the maths task takes one of task.path, task.dataset and task.families."
    if task.held_out_path is not None and task.held_out_dataset is not None:
        yield "task.held_out_path and task.held_out_dataset are both given; leave one out."
    if task.families and (task.held_out_path or task.held_out_dataset):
        yield ("task.families generates its held-out problems itself; leave task.held_out_path and "
               "task.held_out_dataset out.")
    for key in ("path", "held_out_path"):
        path = getattr(task, key)
        if path is not None and not (Path(path).is_file() and path.endswith(SUFFIXES)):
            yield f"task.{key} = {path!r} is not a file that ends in {' or '.join(SUFFIXES)}; give the path of one."
    for key in ("dataset", "held_out_dataset"):
        name = getattr(task, key)
        if name is not None and not (name.count(":") <= 2 and 0 < name.partition(":")[0].count("/") <= 1):
            yield f"task.{key} = {name!r} is not of the form owner/name:config:split, config and split optional."
    if task.template is not None and task.format in ("paper", "vineppo"):
        yield f"task.template is not used by task.format = {task.format!r}; leave it out, or set task.format=template."
