"""The journey as Ray actors: equal to lockstep at lead 0, and alive after deaths and interrupts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tba import checkpoint
from tba.reading import read_settings
from tba.run import Run, RunDirectory

LIMIT_S = 240.0


def overrides(mode: str, *more: str) -> list[str]:
    return [f"mode={mode}", "async.threads=1", "evaluation.prompts=4", "evaluation.every=0", *more]


def execute(folder: Path, recipe: str, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    settings = read_settings(recipe, words)
    directory = RunDirectory(folder)
    directory.create(settings)
    notes: list[str] = []
    summary = Run(settings, directory, lambda kind, record: notes.append(str(record.get("text", kind)))).execute()
    return summary, steps_of(folder), notes


def steps_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [record for record in map(json.loads, lines) if "step" in record]


def adds_up(ledger: dict[str, Any]) -> bool:
    for unit in ("trajectories", "tokens"):
        account = ledger[unit]
        out = sum(account["evicted"].values()) + sum(account["rejected"].values())
        if account["delivered"] != account["in_buffer"] + out:
            return False
    prompts = ledger["prompts"]
    return prompts["leased"] == prompts["delivered"] + prompts["open"] + prompts["lost"]


@pytest.mark.parametrize(("recipe", "words"), [
    pytest.param("enumerable", ("trainer.steps=24", "trainer.sync_every=8", "buffer.initial=300"),
                 marks=pytest.mark.slow),
    pytest.param("arithmetic", ("trainer.steps=6", "trainer.sync_every=2", "trainer.groups_per_step=8",
                                "search.batch_prompts=8"), marks=pytest.mark.slow),  # below with more of it
    ("enumerable", ("trainer.steps=24", "trainer.sync_every=4", "reference.kind=reset", "reference.every=6",
                    "search.temperature={low: 0.8, high: 1.6}", "objective.target_kl=0.5")),
    ("arithmetic", ("trainer.steps=6", "trainer.sync_every=2", "trainer.groups_per_step=8", "search.batch_prompts=8",
                    "policy.lora.rank=4", "reference.kind=ema", "reference.decay=0.5")),
    ("enumerable", ("trainer.steps=24", "trainer.sync_every=4", "buffer.shards=2", "buffer.capacity=900",
                    "buffer.mix={recent: 0.6, reward: 0.4}", "buffer.max_uses=3")),
])
def test_async_at_lead_zero_equals_lockstep_to_the_bit(tmp_path: Path, recipe: str, words: tuple[str, ...]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, lockstep, _ = execute(tmp_path / "lockstep", recipe, *overrides("lockstep", *words))
    finally:
        torch.set_num_threads(threads)
    two, beside, _ = execute(tmp_path / "async", recipe, *overrides("async", "async.lead=0", *words))
    assert one["status"] == two["status"] == "done"
    for name in ("train/loss", "train/grad_norm", "train/rescored", "train/ref_version", "train/beta",
                 "buffer/age_histogram", "buffer/drawn_by", "buffer/size"):
        assert [record[name] for record in lockstep] == [record[name] for record in beside], name
    assert one["ledger"] == two["ledger"]
    weights = [(tmp_path / mode / "final" / "model.safetensors").read_bytes() for mode in ("lockstep", "async")]
    assert weights[0] == weights[1]


def test_weights_adopted_in_flight_are_attested_and_the_ledger_adds_up(tmp_path: Path) -> None:
    words = ("engine.adopt_every=1", "trainer.steps=15", "trainer.sync_every=1", "trainer.groups_per_step=8",
             "search.batch_prompts=16", "reference.kind=reset", "reference.every=6")
    summary, steps, notes = execute(tmp_path / "run", "arithmetic", *overrides("async", *words))
    assert summary["status"] == "done", summary["message"]
    assert not [note for note in notes if "died" in note]
    assert adds_up(summary["ledger"])
    assert summary["ledger"]["trajectories"]["rejected"] == {}  # nothing of wrong weights
    assert steps[-1]["search/straddling"] > 0
    assert steps[-1]["train/ref_version"] == 12


def test_a_searcher_that_fails_at_its_third_prompt_ends_the_run_by_name(tmp_path: Path) -> None:  # case h02
    reward, calls = tmp_path / "boom.py", tmp_path / "calls"
    reward.write_text(  # the file is gone after the third call of a searcher, and so is the process that read it
        f"import os, pathlib\n\ncalls = pathlib.Path({str(calls)!r})\n\n\ndef score(prompt, completions):\n"
        "    if len(completions) == 8:  # a searcher's, not the evaluation's\n"
        "        with calls.open('a') as file:\n            file.write('x')\n"
        "        if calls.stat().st_size == 3:\n            os.remove(__file__)\n            os._exit(1)\n"
        "    return [0.0] * len(completions)\n"
    )
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1+1="}) + "\n" for n in range(8)))
    words = ("task.name=custom", f"task.path={data}", f"task.reward={reward}:score", "task.held_out=2",
             "async.max_restarts=0", "trainer.groups_per_step=4", "search.batch_prompts=4", "evaluation.prompts=2")
    summary, _, notes = execute(tmp_path / "run", "arithmetic", *overrides("async", *words))
    assert summary["status"] == "failed"
    assert "searcher-0 died 1 times in a row" in summary["message"]
    assert "boom.py:score" in summary["message"]
    assert any(note.startswith("searcher-0 died (ValueError: task.reward") for note in notes)
    assert calls.read_text() == "xxx"


def test_searchers_that_are_much_faster_end_with_the_trainer_and_are_never_too_old(tmp_path: Path) -> None:  # case h08
    words = ("trainer.steps=4", "trainer.sync_every=1", "buffer.max_age=2", "buffer.initial=0")
    summary, steps, _ = execute(tmp_path / "run", "enumerable", *overrides("async", *words))
    assert (summary["status"], summary["steps"]) == ("done", 4)
    assert max(record["buffer/age_max"] for record in steps) <= 2
    assert summary["wall_s"] < 60
    assert adds_up(summary["ledger"])


def test_a_searcher_that_hangs_ends_the_run_with_what_is_missing(tmp_path: Path) -> None:  # case h01
    reward = tmp_path / "my_reward.py"
    reward.write_text(
        "import time\n\n\ndef score(prompt, completions):\n"
        "    if len(completions) == 8:  # a searcher's, not the evaluation's\n        time.sleep(600)\n"
        "    return [0.0] * len(completions)\n"
    )
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1+1="}) + "\n" for n in range(8)))
    words = ("task.name=custom", f"task.path={data}", f"task.reward={reward}:score", "task.held_out=2",
             "search.score_limit_s=900", "async.wait_limit_s=5", "trainer.groups_per_step=4", "trainer.sync_every=2",
             "buffer.reuse=1", "buffer.initial=0", "search.batch_prompts=4", "evaluation.prompts=2")
    settings = read_settings("arithmetic", overrides("async", *words))
    directory = RunDirectory(tmp_path / "run")
    directory.create(settings)
    summary = Run(settings, directory, lambda kind, record: None).execute()
    assert summary["status"] == "failed"
    assert "step 1 was not done within async.wait_limit_s = 5 s" in summary["message"]
    assert "round 0 needs 8 prompts delivered, 0 are" in summary["message"]
    assert summary["wall_s"] < 20


def children_named(pid: int, title: str) -> list[int]:
    """Descendants of a process whose command line begins with `title`."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except (OSError, IndexError):
                continue

    def descends(child: int) -> bool:
        while child in parents:
            child = parents[child]
            if child == pid:
                return True
        return False

    return [child for child, text in titles.items() if text.startswith(title) and descends(child)]


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tba", "train", "enumerable", "mode=async", "trainer.sync_every=8",
               "evaluation.prompts=4", "evaluation.every=0", *words, "--run", str(folder), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len(steps_of(folder)) < steps:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{steps} steps were not done in {LIMIT_S} s"
        time.sleep(0.05)


def test_a_killed_searcher_is_logged_and_replaced_and_the_ledger_adds_up(tmp_path: Path) -> None:  # case h10
    folder = tmp_path / "run"
    process = started(folder, "trainer.steps=160", "buffer.reuse=1.0", "search.searchers=2")
    wait_for_steps(process, folder, 16)
    victims = children_named(process.pid, "ray::SearcherProcess")
    assert victims, "no searcher process was found"
    os.kill(victims[0], signal.SIGKILL)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["status"] == "done"
    assert summary["steps"] == 160
    assert len(set(re.findall(r"searcher-\d died", err))) == 1
    assert adds_up(summary["ledger"])


def test_ctrl_c_leaves_a_checkpoint_no_process_and_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = started(folder, "trainer.steps=4000")
    wait_for_steps(process, folder, 16)
    helpers = children_named(process.pid, "ray::")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["status"] == "interrupted"
    assert (folder / "checkpoints" / f"step_{summary['steps']}" / "COMPLETE").is_file()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{helper}").exists() for helper in helpers):
        assert time.monotonic() < deadline, "processes outlived the run"
        time.sleep(0.05)
    settings = (folder / "config.yaml").read_text().replace("steps: 4000", f"steps: {summary['steps'] + 16}")
    (folder / "config.yaml").write_text(settings)
    command = [sys.executable, "-m", "tba", "resume", str(folder), "--json"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert again.returncode == 0, again.stderr
    resumed = json.loads(again.stdout.splitlines()[-1])
    assert resumed["steps"] == summary["steps"] + 16
    assert [record["step"] for record in steps_of(folder)] == list(range(1, resumed["steps"] + 1))
    assert adds_up(resumed["ledger"])


def message_after(folder: Path, sent: signal.Signals, *words: str) -> str:
    """What a run says whose second shard is sent a signal."""
    process = started(folder, "trainer.steps=4000", "buffer.shards=2", *words)
    wait_for_steps(process, folder, 24)
    shards = children_named(process.pid, "ray::ShardProcess")
    assert len(shards) == 2
    os.kill(shards[1], sent)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(shards[1], signal.SIGKILL)  # one that stands still may outlive its run
    assert process.returncode == 1, err
    return json.loads(out.splitlines()[-1])["message"]


def test_a_shard_that_dies_ends_the_run_is_named_and_the_checkpoint_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = message_after(folder, signal.SIGKILL, "checkpoint.every=8")
    assert re.search(r"shard \d of 2 of the buffer died, .* tba resume RUN", said), said
    steps = checkpoint.complete(folder)[-1][0] + 16
    settings = (folder / "config.yaml").read_text().replace("steps: 4000", f"steps: {steps}")
    (folder / "config.yaml").write_text(settings)
    command = [sys.executable, "-m", "tba", "resume", str(folder), "--json"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout.splitlines()[-1])
    assert summary["steps"] == steps
    assert adds_up(summary["ledger"])


def test_a_shard_that_stands_still_ends_the_run_and_is_named(tmp_path: Path) -> None:
    said = message_after(tmp_path / "run", signal.SIGSTOP, "checkpoint.every=4000", "async.wait_limit_s=20")
    assert re.search(r"shard \d of 2 of the buffer did not answer within half of async.wait_limit_s = 20 s", said), said
