"""What `tba new` writes: a recipe, a reward, prompts and a test, which run as they are."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from tba.sections import SettingsError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
PROMPTS = 400
"""Lines of the prompts' file; the last of them are held out."""
HELD_OUT = 100

_RECIPE = """\
# A task of your own: prompts in prompts.jsonl, scored by the function in rewards.py.
#
# shows:    own prompts and an own reward, from nothing to a learning curve
# command:  tba train {folder}/{name}.yaml     (from the folder where `tba new` was run: paths are relative to it)
# hardware: any
# minutes:  1
# expected: reward on held-out prompts goes up; the page report.html in the run directory shows the curve
seed: 0
mode: lockstep              # one process; async: searchers and trainer side by side
model: arithmetic           # a folder, or a Hugging Face id as owner/name
task:
  name: custom
  path: {folder}/prompts.jsonl
  held_out: {held_out}             # the last lines of the file, never trained on
  reward: {folder}/rewards.py:last_line_is_right
  # several, with weights:
  # rewards:
  #   - {{function: "{folder}/rewards.py:last_line_is_right"}}
  #   - {{function: "{folder}/rewards.py:brief", weight: 0.1}}
search:
  num_samples: 8            # completions a prompt
  max_new_tokens: 12        # longest completion
objective:
  beta: 0.02                # reward units per nat of KL to the start model
trainer:
  steps: 60
  learning_rate: 3e-4
  groups_per_step: 16       # prompts in one batch
  group_size: 8             # of each, completions in it
evaluation:
  every: 20
  prompts: {held_out}
"""

_REWARDS = '''\
"""What a completion is worth: a list with one number per completion, or None where it cannot be told."""


def last_line_is_right(completions, answer, **columns):
    """1 if the last line is the answer. `answer` is a column of prompts.jsonl, one entry per completion."""
    return [float(text.split("\\n")[-1] == right) for text, right in zip(completions, answer)]


def brief(completions, **columns):
    """From 1 for nothing to 0 for 20 characters or more."""
    return [max(0.0, 1 - len(text) / 20) for text in completions]
'''

_TEST = '''\
"""Run with: pytest {folder}"""

from rewards import brief, last_line_is_right


def test_the_last_line_counts():
    assert last_line_is_right(completions=["5+4\\n9", "5+4\\n8", ""], answer=["9"] * 3) == [1.0, 0.0, 0.0]


def test_short_is_better():
    assert brief(completions=["", "x" * 5, "x" * 40]) == [1.0, 0.75, 0.0]
'''


def write_task(where: str) -> dict[str, str]:
    """Writes a task into the new folder `where`; returns what each file is, by its path.

    Raises:
        SettingsError: the last word of `where` is no name, there is something already, or it cannot be written.
    """
    folder = Path(where)
    name = folder.name
    if not _NAME.fullmatch(name):
        raise SettingsError([
            f"name {name!r} is not of 1 to 64 letters, digits, - and _ after a letter; give another."
        ])
    if folder.exists():
        raise SettingsError([f"{where!r} is there already and is left as it is; give another name."])
    words = {"name": name, "folder": folder.as_posix(), "held_out": HELD_OUT}
    files = {
        f"{name}.yaml": ("the recipe", _RECIPE.format(**words)),
        "prompts.jsonl": ("the prompts, one a line", _prompts()),
        "rewards.py": ("the reward", _REWARDS),
        f"test_{name.replace('-', '_')}.py": ("its test", _TEST.format(**words)),
    }
    try:
        folder.mkdir(parents=True)
        for file, (_, text) in files.items():
            (folder / file).write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError([f"{where!r} cannot be written: {error}."]) from error
    return {str(folder / file): meaning for file, (meaning, _) in files.items()}


def _prompts() -> str:
    """Problems that the built-in model half knows, all different."""
    rng = random.Random(0)
    problems = [(a, b, c) for a in range(13) for b in range(13) for c in range(13)]
    lines = [
        {"prompt": f"{a}+{b}-{c}=", "answer": str(a + b - c)} for a, b, c in rng.sample(problems, PROMPTS)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)
