"""The branch of the settings tree about the task: what is asked, and how answers are scored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from tba.maths_settings import MathsSettings
from tba.preference_settings import PreferenceSettings, RewardSettings, function_problems, rewards_problems
from tba.redteam_settings import RedteamSettings
from tba.sections import NonNegativeInt, PositiveFloat, PositiveInt


class TaskSettings(MathsSettings):
    """What is asked, and how answers are scored."""

    name: str = "arithmetic"
    """A built-in task: arithmetic, enumerable, maths, preference, redteam, custom; script: what a script hands over."""
    seed: int = 0
    """Seed of generated problems; also of their split into training and held-out ones."""
    held_out: NonNegativeInt = 500
    """Prompts kept for evaluation; never trained on."""
    max_prompt_tokens: PositiveInt = 256
    """Longest prompt accepted, in tokens, BOS included."""
    max_value: PositiveInt = 20
    """arithmetic: largest operand."""
    prompts: PositiveInt = 4
    """enumerable: number of prompts."""
    symbols: PositiveInt = 3
    """enumerable: size of the alphabet besides the stop token."""
    kind: Literal["random", "one_mode", "many_modes", "sparse"] = "random"
    """enumerable: what is rewarded: every completion by a draw of its own, one of them, `modes` of them equally, or
    one of at least 10,000."""
    modes: PositiveInt = 8
    """enumerable, kind many_modes: rewarded completions per prompt."""
    reward_scale: PositiveFloat = 1.0
    """enumerable: standard deviation of the reward over completions (kind random), or the reward of a mode."""
    path: str | None = None
    """custom: JSONL file of prompts, one object a line; maths, preference: JSONL or Parquet file."""
    held_out_path: str | None = None
    """custom, maths, preference: the same of held-out prompts; without it the last `held_out` rows of `path`."""
    prompt_column: str = "prompt"
    """custom, preference, script: column with the prompt, a string or a list of chat messages."""
    reward: str | None = None
    """custom: the reward function, `module:function` or `file.py:function`; one alone, see `rewards`."""
    rewards: tuple[RewardSettings, ...] = Field(default=(), strict=False)
    """custom, preference, script: scorers whose weighted sum is the reward (docs/own_tasks.md, docs/preference.md)."""
    preference: PreferenceSettings = Field(default_factory=PreferenceSettings)
    redteam: RedteamSettings = Field(default_factory=RedteamSettings)


def custom_problems(task: TaskSettings) -> Iterator[str]:
    """What the custom task lacks."""
    if task.path is None:
        yield "task.path is missing: the custom task needs a JSONL file of prompts; set task.path=FILE."
    for key in ("path", "held_out_path"):
        path = getattr(task, key)
        if path is not None and not Path(path).is_file():
            yield f"task.{key} = {path!r} is not a file; give the path of a JSONL file."
    if task.reward is None and not task.rewards:
        yield "task.reward is missing: give the reward function as module:function or file.py:function."
    elif task.reward is not None and task.rewards:
        yield (f"task.reward = {task.reward!r} and {len(task.rewards)} task.rewards; give one of the two: one "
               f"function, or several scorers with weights.")
    elif task.reward is not None and not all(task.reward.rpartition(":")):
        yield f"task.reward = {task.reward!r} names no function; write module:function or file.py:function."
    yield from rewards_problems(task.rewards)
    yield from function_problems(task.rewards)
