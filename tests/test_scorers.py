"""Processes that score for all searchers: the run is the same to the bit, whatever becomes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tba.reading import read_settings
from tba.settings import SettingsError
from test_cluster import execute, overrides

# It dies at the first call of the second round: those of the first have arrived, and no reply is on its way.
REWARD = """
import os, pathlib, signal
here = pathlib.Path(__file__).parent
def reward(prompt, completions):
    if len(completions) == 8:  # a searcher's, not an evaluation's
        with (here / "asked").open("a") as file:
            file.write(f"{os.getppid()}\\n")
        if (here / "deadly").exists() and len((here / "asked").read_text().splitlines()) == 5:
            os.kill(os.getppid(), signal.SIGKILL)
    return [len(c.text) + len(prompt.text) / 100 for c in completions]
"""


def test_a_scorer_that_is_killed_starts_anew_and_the_run_equals_lockstep_to_the_bit(tmp_path: Path) -> None:
    rewards, found = [], []
    for mode in ("lockstep", "async"):
        folder = tmp_path / mode
        folder.mkdir()
        (folder / "reward.py").write_text(REWARD, "utf-8")
        rows = [{"id": f"n{n}", "prompt": f"{n}+1+1="} for n in range(8)]  # named alike in both folders: seeds follow
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = overrides(mode, "task.name=custom", f"task.path={folder / 'prompts.jsonl'}", "task.held_out=2",
                          f"task.reward={folder / 'reward.py'}:reward", "trainer.groups_per_step=4",
                          "trainer.steps=4", "trainer.sync_every=2", "search.batch_prompts=4", "evaluation.prompts=2")
        if mode == "async":
            (folder / "deadly").touch()
            words += ["async.lead=0", "search.scorer_processes=1", "resources.scorer.cpus=0"]
        summary, steps, notes = execute(folder / "run", "arithmetic", *words)
        assert summary["status"] == "done", notes
        found.append([(step["train/loss"], step["train/reward"]) for step in steps])
        rewards.append((folder / "asked").read_text().split())
    assert found[0] == found[1]
    assert len(found[0]) == 4
    assert len(set(rewards[0])) == 1
    assert len(set(rewards[1])) == 2  # the scorer that was killed, and the one after it: no searcher scores
    assert len(rewards[1]) == len(rewards[0]) + 1  # what it was asked when it died is asked again


def test_processes_that_score_are_refused_where_there_is_one_process() -> None:
    with pytest.raises(SettingsError, match=r"search\.scorer_processes = 2 has no use in mode = lockstep"):
        read_settings("arithmetic", ["mode=lockstep", "search.scorer_processes=2"])
