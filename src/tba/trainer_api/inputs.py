"""What a script hands over, checked: data sets, reward functions and models, model and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.rewards.shapes import name_of, shape_problem
from tba.settings import SettingsError
from tba.tasks.custom import row_problem
from tba.tasks.lines import MAX_PROBLEMS, Row

PROMPT = "prompt"
"""Column with the prompt, in every data set format of TRL for this trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Scorers in the order in which they were given."""

    settings: tuple[Mapping[str, Any], ...]
    """Entries of `task.rewards`; functions are named there."""
    functions: Mapping[str, Callable[..., Any]]
    models: Mapping[str, tuple[Any, Any]]
    """By name, (model, tokenizer) of those given as objects: `settings` lack where they will be saved."""


def rows_of(dataset: Any, name: str) -> tuple[tuple[Row, ...], list[str]]:
    """(place, columns) of every row of a `datasets.Dataset` or a list of dicts, and what is wrong with them."""
    if dataset is None:
        return (), []
    if isinstance(dataset, Mapping):
        return (), [f"{name} has {len(dataset)} parts ({', '.join(map(str, dataset))}); give one of them."]
    if not hasattr(dataset, "__len__"):
        return (), [f"{name} is a {type(dataset).__name__} without a length; give a datasets.Dataset or a list of "
                    f"dicts: Dataset.from_list(list(first_rows))."]
    rows: list[Row] = []
    problems: list[str] = []
    for number, row in enumerate(dataset):
        place = f"{name}[{number}]"
        if not isinstance(row, Mapping):
            problems.append(f"{place} is a {type(row).__name__}; it must be a dict of columns.")
        elif wrong := row_problem(dict(row), PROMPT, f"the name of a column of {name}"):
            problems.append(f"{place} {wrong}")
        else:
            rows.append((place, dict(row)))
        if len(problems) > MAX_PROBLEMS:
            return (), [*problems, f"... and perhaps more of the {len(dataset)} rows."]
    if not len(dataset):
        problems.append(f"{name} has no rows; it needs at least 1.")
    return tuple(rows), problems


def rewards_of(
    given: Any, weights: Sequence[float] | None, tokenizers: Any, columns: Sequence[str]
) -> tuple[Rewards, list[str]]:
    """Scorers of `reward_funcs`, and what is wrong with them: one, or several, each a function, a name, or a model."""
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    readers = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers] * len(listed)
    problems: list[str] = []
    if given is None or not listed:
        problems.append("reward_funcs is missing: give a function (completions, **columns), or a reward model.")
        listed = []
    if weights is not None and len(weights) != len(listed):
        problems.append(f"reward_weights has {len(weights)} weights for {len(listed)} reward_funcs; give one for each.")
        weights = None
    if len(readers) != len(listed):
        problems.append(f"reward_processing_classes has {len(readers)} entries for {len(listed)} reward_funcs; give "
                        f"one for each, None for functions.")
        readers = [None] * len(listed)
    settings: list[Mapping[str, Any]] = []
    functions: dict[str, Callable[..., Any]] = {}
    models: dict[str, tuple[Any, Any]] = {}
    for number, scorer in enumerate(listed):
        taken = [str(entry["name"]) for entry in settings]
        entry: dict[str, Any] = {"weight": 1.0 if weights is None else float(weights[number])}
        if isinstance(scorer, str):
            settings.append({**entry, "name": _unique(scorer.rstrip("/").rsplit("/", 1)[-1], taken), "model": scorer})
        elif hasattr(scorer, "save_pretrained"):
            name = _unique(Path(str(getattr(scorer.config, "_name_or_path", ""))).name or "reward_model", taken)
            settings.append({**entry, "name": name})
            models[name] = (scorer, readers[number])
        elif callable(scorer):
            name = _unique(name_of(scorer), taken)
            if problem := shape_problem(scorer, columns):
                problems.append(f"reward_funcs[{number}]: {problem}")
            settings.append({**entry, "name": name, "function": name})
            functions[name] = scorer
        else:
            problems.append(f"reward_funcs[{number}] is a {type(scorer).__name__}; give a function, the name of a "
                            f"reward model, or a sequence-classification model.")
    return Rewards(settings=tuple(settings), functions=functions, models=models), problems


def _unique(name: str, taken: Sequence[str]) -> str:
    name = "".join(c if c.isalnum() or c in "_-." else "_" for c in name)
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def tokenizer_of(model: Any) -> Any:
    """The tokenizer that goes with a model object, from where that was loaded.

    Raises:
        SettingsError: there is none.
    """
    from transformers import AutoTokenizer

    where = getattr(model.config, "_name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SettingsError([
            f"no tokenizer goes with the model (loaded from {where!r}: {type(error).__name__}); give processing_class."
        ]) from error


def save_model(model: Any, tokenizer: Any, folder: Path) -> str:
    """Writes a model object as a folder that every process of the run can load; returns its path."""
    model.save_pretrained(folder, safe_serialization=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def model_type_of(model: Any) -> str:
    """Which architecture a model, or the one that is named, has; '' if it cannot be told without loading it."""
    if not isinstance(model, str):
        return model.config.model_type
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model).model_type
    except (OSError, ValueError, KeyError):
        return ""
