"""Names that recipes may use, and where each is made, without loading any of it."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASKS = {
    "arithmetic": "tba.tasks.arithmetic:Arithmetic",
    "custom": "tba.tasks.custom:Custom",
    "enumerable": "tba.tasks.enumerable:Enumerable",
    "maths": "tba.tasks.maths:Maths",
    "preference": "tba.tasks.preference:Preference",
    "script": "tba.tasks.script:Script",
    "redteam": "tba.tasks.redteam:Redteam",
}
"""Tasks by `task.name`: each is made from the `task` settings and two limits of `search`."""

OWN_TASKS = ("custom", "script")
"""Tasks whose scorers a user wrote: what is wrong with those is said before any process of a run starts."""

VICTIMS = {
    "model": "tba.victims.models:ModelVictim",
    "endpoint": "tba.victims.endpoint:EndpointVictim",
    "triggers": "tba.victims.rules:RuleVictim",
}
"""Victims by the setting that names one: each is made from its settings and their place in the tree."""

ENGINES = {
    "table": "tba.engines.table:TableEngine",
    "transformers": "tba.engines.transformers:TransformersEngine",
    "vllm": "tba.engines.vllm:VllmEngine",
    "vllm_server": "tba.engines.vllm_server:VllmServerEngine",
}
"""Engines by `engine.name`: each is made from a policy."""
FOREIGN = ("vllm", "vllm_server")
"""Engines that compute elsewhere than in the policy's model."""



@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What an objective is set by besides beta, and what it asks of the data."""

    defaults: Mapping[str, Any]
    """Settings of `objective` that it uses, with what each is if left out."""
    needs_beta: bool = False
    """Whether beta must be positive; elsewhere 0 leaves KL out."""
    needs: frozenset[str] = frozenset()
    """Of `behaviour_logps` and `ref_logps`: log-probs of each token that it reads; the latter only if beta is not 0."""


_BEHAVIOUR = frozenset({"behaviour_logps"})
_BOTH = frozenset({"behaviour_logps", "ref_logps"})

OBJECTIVES: dict[str, Knobs] = {
    "trajectory_balance": Knobs(defaults={"scale": "advantage"}, needs_beta=True),
    "trajectory_balance_learned_z": Knobs(
        defaults={"scale": "advantage", "log_z_per": "prompt", "log_z_rate": 0.1}, needs_beta=True
    ),
    "tba_prime": Knobs(defaults={"ratio": "off", "ratio_max": 8.0, "normalise": "sequence"}, needs=_BEHAVIOUR),
    "kimi_k15": Knobs(defaults={}, needs_beta=True),
    "reinforce": Knobs(defaults={}),
    "rloo": Knobs(defaults={}),
    "grpo": Knobs(defaults={"clip": (0.2, 0.2), "normalise": "sequence"}, needs=_BOTH),
    "dr_grpo": Knobs(defaults={"clip": (0.2, 0.2), "normalise": 1.0}, needs=_BOTH),
    "cispo": Knobs(defaults={"ratio_max": 8.0, "normalise": "token"}, needs=_BOTH),
    "gspo": Knobs(defaults={"clip": (3e-4, 4e-4)}, needs=_BOTH),
    "ppo_clip": Knobs(defaults={"clip": (0.2, 0.2), "normalise": "token"}, needs=_BEHAVIOUR),
    "online_dpo": Knobs(defaults={}, needs_beta=True),
}
"""Keys of `tba.objectives.OBJECTIVES`."""

KNOBS = ("scale", "log_z_per", "log_z_rate", "ratio", "ratio_max", "clip", "normalise")
"""Settings of `objective` that only some objectives use."""

TEMPERATURES = ("prior_temperature", "target_temperature")
"""Settings of `objective` that temper the log-reward: only objectives that fit a distribution have one."""

MAX_LISTED = 200_000
"""Completions per prompt that the exact target of the enumerable task is written down for."""
MIN_SPARSE = 10_000
"""Completions per prompt, at least, of which the sparse kind of the enumerable task rewards one."""

MIN_VOCABULARY = 260
"""Tokens of the smallest byte-level tokenizer that joins anything."""

MODELS = ("arithmetic",)
"""Models that ship in the package, as folders of `tba/assets`."""

PACKAGED = ("smollm2-135m",)
"""Models whose weights another installed package carries: made into a folder once."""

PARAMETERS = {"realtreetune/rho-1b-sft-GSM8K": 1_100_048_384, "Qwen/Qwen2.5-7B": 7_615_616_512}
"""Sizes of the models of built-in recipes that are on no machine before they are fetched."""

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


def knobs_in_use(objective: Any) -> dict[str, Any]:
    """What the objective of the settings `objective` uses besides beta: what is set, else its defaults."""
    defaults = OBJECTIVES[objective.name].defaults
    given = {key: getattr(objective, key) for key in defaults}
    used = {key: defaults[key] if value is None else value for key, value in given.items()}
    if used.get("ratio") == "off":
        del used["ratio_max"]
    return used


def reads(objective: Any) -> frozenset[str]:
    """Of `behaviour_logps` and `ref_logps`, what the objective of the settings `objective` reads of each token."""
    without = {"behaviour_logps"} if knobs_in_use(objective).get("ratio") == "off" else set[str]()
    return OBJECTIVES[objective.name].needs - without - (set() if objective.beta else {"ref_logps"})


def normalisation(value: object) -> object:
    """`objective.normalise`, checked; a number as a float."""
    if value in ("sequence", "token"):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ValueError("sequence, token, or a positive number of tokens to divide by")


def objective_problems(objective: Any) -> Iterator[str]:
    """What is wrong with the settings `objective` taken together."""
    if objective.name not in OBJECTIVES:
        return
    knobs, name = OBJECTIVES[objective.name], objective.name
    uses = f"it uses {', '.join(knobs.defaults)}" if knobs.defaults else "it has no such setting"
    for key in KNOBS:
        if getattr(objective, key) is not None and key not in knobs.defaults:
            yield (f"objective.{key} = {getattr(objective, key)!r} is not used by objective.name = {name!r} ({uses}); "
                   f"leave it out, or set objective.{key}=null.")
    for key in TEMPERATURES:
        if getattr(objective, key) is not None and "scale" not in knobs.defaults:
            yield (f"objective.{key} tempers a log-reward, and objective.name = {name!r} fits none; leave it out, or "
                   f"use trajectory_balance.")
    if not objective.beta and knobs.needs_beta:
        yield f"objective.beta = {objective.beta:g}: should be greater than 0 for objective.name = {name!r}."
    elif not objective.beta and objective.beta_final:
        yield (f"objective.beta = {objective.beta:g} leaves KL out, but objective.beta_final = "
               f"{objective.beta_final:g} brings it in later; start above 0, or leave objective.beta_final out.")
    if objective.ratio_max is not None and knobs_in_use(objective).get("ratio") == "off":
        yield (f"objective.ratio_max = {objective.ratio_max:g} bounds a ratio that is off; set "
               f"objective.ratio=clamp or objective.ratio=cispo, or objective.ratio_max=null.")


def enumerable_problems(task: Any, length: int) -> Iterator[str]:
    """What is wrong with the settings `task` of the enumerable task, with completions of up to `length` tokens."""
    if task.symbols > 26 or task.symbols == 1 < task.prompts:
        yield (f"task.symbols = {task.symbols} with task.prompts = {task.prompts}: the enumerable task has "
               f"26 letters, and needs two or more for several prompts.")
    elif (listed := (task.symbols + 2) ** length) > MAX_LISTED:
        yield (f"task.symbols = {task.symbols} with search.max_new_tokens = {length} makes over "
               f"{listed:.3g} completions, more than the {MAX_LISTED} that are listed; lower one of them.")
    elif task.kind == "sparse" and listed < MIN_SPARSE:
        yield (f"task.kind = 'sparse' with task.symbols = {task.symbols} and search.max_new_tokens = {length} has "
               f"{listed} completions of that length, fewer than {MIN_SPARSE}; raise one of the two.")
    elif task.kind == "many_modes" and task.modes > task.symbols**length:
        yield (f"task.modes = {task.modes} is more than the {task.symbols**length} completions of "
               f"search.max_new_tokens = {length} letters; lower it to that or less.")


def vocabulary_problems(model: str, vocabulary: int | None) -> Iterator[str]:
    """What is wrong with `architecture.vocabulary`, as at most one line."""
    if vocabulary is None:
        return
    if model != "new-llama":
        yield (f"architecture.vocabulary = {vocabulary} is of model = 'new-llama'; model = {model!r} has a tokenizer "
               f"of its own; leave it out.")
    elif vocabulary < MIN_VOCABULARY:
        yield (f"architecture.vocabulary = {vocabulary} is less than 256 bytes, 3 marks and one subword; set "
               f"architecture.vocabulary={MIN_VOCABULARY} or more.")


def model_problems(model: str) -> list[str]:
    """What is wrong with `model` that can be seen without loading it, as at most one line."""
    built_in = (*MODELS, *PACKAGED, *FRESH)
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
