"""Names that recipes may use, and where each is made, without loading any of it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

TASKS = {
    "arithmetic": "tba.tasks.arithmetic:Arithmetic",
    "custom": "tba.tasks.custom:Custom",
    "enumerable": "tba.tasks.enumerable:Enumerable",
}
"""Tasks by `task.name`: each is made from the `task` settings and two limits of `search`."""

ENGINES = {
    "table": "tba.engines.table:TableEngine",
    "transformers": "tba.engines.transformers:TransformersEngine",
}
"""Engines by `engine.name`: each is made from a policy."""

OBJECTIVES = ("trajectory_balance",)
"""Keys of `tba.objectives.OBJECTIVES`."""

MODELS = ("arithmetic",)
"""Models that ship in the package, as folders of `tba/assets`."""

FRESH = ("new-llama", "new-table")
"""Models made from scratch, with a tokenizer over the task's characters."""

BUFFER_PRESETS: dict[str, dict[str, Any]] = {
    "paper_gsm8k": {
        "capacity_per_prompt": 100, "initial": 500, "mix": {"recent": 0.95, "uniform": 0.05},
    },
    "paper_tldr": {
        "capacity_per_prompt": 100, "initial": 10_000, "mix": {"recent": 0.5, "reward": 0.5},
    },
    "redteam": {
        "capacity": 100_000, "capacity_per_prompt": 100_000, "mix": {"recent": 0.5, "reward": 0.5},
    },
    "redteam_150k": {
        "capacity": 150_000, "capacity_per_prompt": 150_000, "mix": {"recent": 0.5, "reward": 0.5},
    },
    "redteam_130k": {
        "capacity": 130_000, "capacity_per_prompt": 130_000, "mix": {"recent": 0.6, "reward": 0.4},
    },
    "redteam_best_1000": {
        "capacity": 1000, "capacity_per_prompt": 1000, "mix": {"recent": 0.5, "reward": 0.5},
        "eviction": "lowest_reward", "dedup": "near",
    },
}
"""Values of `buffer` by `buffer.preset`: the paper's protocols, in their intent."""


def make(place: str, *arguments: Any, **options: Any) -> Any:
    """Calls what `module:name` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments, **options)


def name_problems(key: str, name: str, known: Collection[str]) -> list[str]:
    """What is wrong with a name, as at most one line."""
    if name in known:
        return []
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return [f"{key} = {name!r} is unknown; {hint}known: {', '.join(known)}."]


def model_problems(model: str) -> list[str]:
    """What is wrong with `model` that can be seen without loading it, as at most one line."""
    built_in = (*MODELS, *FRESH)
    path = Path(model)
    if model in built_in:
        return []
    if path.is_dir():
        if not (path / "config.json").is_file():
            return [f"model = {model!r} is a folder without config.json; give a Hugging Face model folder."]
        if not list(path.glob("*.safetensors")):
            return [f"model = {model!r} holds no .safetensors file; other weight files may run code and are refused."]
        return []
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.exists():
        return [f"model = {model!r} is no folder; give one, a Hugging Face id, or one of {', '.join(built_in)}."]
    if "/" not in model:
        close = difflib.get_close_matches(model, built_in, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return [
            f"model = {model!r} is no built-in model ({', '.join(built_in)}), no folder, and no Hugging Face id of "
            f"the form owner/name; {hint}give one of these."
        ]
    return []
