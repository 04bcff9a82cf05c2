"""Steps of async runs computed again: what the trainer's process recorded, also after an interrupt and a resume."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from tba import checkpoint
from tba import metrics as m
from tba.cli import main
from tba.jobs import settings_of
from tba.recorder import recorded_steps
from tba.replay import replay
from test_replay import check_losses, lines_of

WORDS = ["mode=async", "async.threads=1", "trainer.steps=48", "trainer.sync_every=8", "trainer.record_every=1",
         "checkpoint.every=16", "checkpoint.keep=9", "evaluation.prompts=4", "evaluation.every=0",
         "objective.name=grpo", "objective.beta=0.05", "search.temperature={low: 0.8, high: 1.6}"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("async") / "run"
    assert main(["train", "enumerable", *WORDS, "--run", str(run)]) == 0
    return run


def test_twenty_random_steps_of_an_async_run(whole: Path) -> None:
    assert recorded_steps(whole) == list(range(1, 49))
    check_losses(whole, random.Random(7).sample(range(1, 49), 20))
    rows = replay(whole, settings_of(whole), 30).rows
    assert all(row["prompt"] and row["number"] is not None and row["sampler"] for row in rows)
    assert any(abs(sum(row["behaviour_logps"]) - row["searcher_logp"]) > 0.01 for row in rows)
    for step in (5, 48):
        assert replay(whole, settings_of(whole), step, "trajectory_balance").other.name == "trajectory_balance"


def test_after_a_resume_the_steps_are_those_that_really_happened(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step, folder in checkpoint.complete(run):
        if step > 16:
            shutil.rmtree(folder)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"learning_rate: 0\.1\b", "learning_rate: 0.02", config))
    assert main(["resume", str(run)]) == 0
    losses = [{x[m.STEP]: x[m.LOSS] for x in lines_of(r) if m.STEP in x} for r in (whole, run)]
    assert sum(losses[0][step] != losses[1][step] for step in range(17, 49)) >= 30
    assert recorded_steps(run) == list(range(1, 49))
    check_losses(run, random.Random(9).sample(range(1, 49), 20))
