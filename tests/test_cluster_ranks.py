"""A trainer of several ranks, as Ray actors: trained, killed, and gone on with by another number of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tba import checkpoint
from test_cluster import LIMIT_S, adds_up, children_named, execute, overrides, steps_of, wait_for_steps

pytestmark = pytest.mark.slow


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tba", "train", "arithmetic", "mode=async", "trainer.processes=2",
               "trainer.groups_per_step=6", "search.batch_prompts=6", "async.threads=1", "evaluation.prompts=4",
               "evaluation.every=0", *words, "--run", str(folder), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, err = process.communicate(timeout=LIMIT_S)
    assert out, err
    return process.returncode, json.loads(out.splitlines()[-1])


def resumed(folder: Path, ranks: int, more: int) -> dict[str, Any]:
    """What `tba resume` ends with, after `more` steps from the newest checkpoint with so many ranks."""
    steps = checkpoint.complete(folder)[-1][0] + more
    tree = (folder / "config.yaml").read_text()
    tree = re.sub(r"processes: \d", f"processes: {ranks}", re.sub(r"(trainer:\n +steps:) \d+", rf"\1 {steps}", tree))
    (folder / "config.yaml").write_text(tree)
    command = [sys.executable, "-m", "tba", "resume", str(folder), "--json"]
    code, summary = ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    assert (code, summary["status"], summary["steps"]) == (0, "done", steps), summary
    assert [record["step"] for record in steps_of(folder)] == list(range(1, steps + 1))
    assert adds_up(summary["ledger"])
    return summary


def test_two_ranks_train_one_is_killed_and_three_and_one_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = started(folder, "trainer.steps=4000", "checkpoint.every=4", "trainer.sync_every=2", "policy.lora.rank=4",
                      "reference.kind=ema", "reference.decay=0.5", "reference.every=2")
    wait_for_steps(process, folder, 6)
    others = children_named(process.pid, "ray::RankProcess")
    assert len(others) == 1
    os.kill(others[0], signal.SIGKILL)
    code, summary = ended(process)
    assert code == 1
    assert re.search(r"trainer rank 1 of 2 died \(.*; go on from the newest checkpoint with tba resume RUN",
                     summary["message"], re.S), summary["message"]
    resumed(folder, 3, 4)
    resumed(folder, 1, 2)


@pytest.mark.parametrize(("rank", "title"), [(0, "ray::TrainerProcess"), (1, "ray::RankProcess")])
def test_a_rank_that_stands_still_ends_the_run_and_is_named(tmp_path: Path, rank: int, title: str) -> None:
    process = started(tmp_path / "run", "trainer.steps=4000", "async.wait_limit_s=24", "checkpoint.every=4000")
    wait_for_steps(process, tmp_path / "run", 3)
    (victim,) = children_named(process.pid, title)
    os.kill(victim, signal.SIGSTOP)
    try:
        code, summary = ended(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)  # one that stands still may outlive its run
    assert code == 1
    assert f"trainer rank {rank} of 2 does not answer within 6 s" in summary["message"], summary["message"]


def test_two_ranks_train_as_one_from_search_to_the_final_model(tmp_path: Path) -> None:
    words = ("trainer.steps=4", "trainer.sync_every=2", "trainer.groups_per_step=8", "search.batch_prompts=8",
             "async.lead=0", "objective.name=trajectory_balance_learned_z", "trainer.micro_batch_tokens=200")
    one, alone, _ = execute(tmp_path / "one", "arithmetic", *overrides("async", *words))
    two, shared, _ = execute(tmp_path / "two", "arithmetic", *overrides("async", "trainer.processes=2", *words))
    assert one["status"] == two["status"] == "done", two["message"]
    for name in ("train/loss", "train/grad_norm", "train/log_z", "train/reward", "train/entropy", "train/tokens"):
        ours, theirs = ([record[name] for record in records] for records in (shared, alone))
        assert ours == pytest.approx(theirs, rel=1e-5), name
    assert one["ledger"] == two["ledger"]
    ours, theirs = (load_file(tmp_path / run / "final" / "model.safetensors") for run in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert np.linalg.norm(ours[name] - theirs[name]) <= 1e-5 * np.linalg.norm(theirs[name]), name
