"""Whole lockstep runs: repeatable, resumable to the bit, stopped in every way, at the exact target."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from makers import balances, settings_with
from tba import assembly, checkpoint
from tba import metrics as m
from tba.cli import main
from tba.run import Run, RunDirectory, resumed
from tba.settings import Settings
from tba.tasks.enumerable import Enumerable

pytestmark = pytest.mark.usefixtures("one_thread")

TIMES = {m.WALL, m.WAIT_SECONDS, m.STEP_SECONDS, m.COLLATE_SECONDS, m.DRAW_SECONDS, m.PUBLISH_SECONDS,
         m.RESCORE_SECONDS, m.RECORD_SECONDS, m.ATTEMPT}
"""What a clock gave, or a restart changes."""
STEPS = 96
FEW = ["trainer.steps=96", "checkpoint.every=20", "evaluation.every=0", "evaluation.samples=8", "seed=5"]
"""Checkpoints at the ends of rounds 32, 48, 64, 80 and 96."""
WAIT_LIMIT_S = 90.0


def silent(kind: str, record: Mapping[str, Any]) -> None:
    del kind, record


def few(**sections: Any) -> Settings:
    trainer = {"steps": 32, **sections.pop("trainer", {})}
    evaluation = {"every": 0, "samples": 8, **sections.pop("evaluation", {})}
    return settings_with(trainer=trainer, evaluation=evaluation, **sections)


def execute(settings: Settings, path: Path, say: Callable[..., None] = silent) -> dict[str, Any]:
    directory = RunDirectory(path)
    directory.create(settings)
    return Run(settings, directory, say).execute()


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Everything logged of each step but what a clock gave."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines_of(run) if m.STEP in line]


def bits_of(run: Path) -> str:
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


def files_of(run: Path) -> dict[str, str]:
    return {
        str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in run.rglob("*") if p.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", "enumerable", *FEW, "--run", str(path)]) == 0
    return path


def check_same(run: Path, whole: Path) -> None:
    assert [line[m.STEP] for line in steps_of(run)] == list(range(1, STEPS + 1))
    assert steps_of(run) == steps_of(whole)
    assert bits_of(run) == bits_of(whole)
    ours, theirs = (json.loads((r / "summary.json").read_text()) for r in (run, whole))
    assert {k: ours["ledger"][k] for k in ("trajectories", "tokens")} == {
        k: theirs["ledger"][k] for k in ("trajectories", "tokens")
    }
    for name in ("status", "steps", "version", "start", "final"):
        assert ours[name] == theirs[name], name
    assert [line for line in lines_of(run) if m.STEP not in line][-1][m.TV] == theirs["final"][m.TV]


# ---- repeatable ------------------------------------------------------------------------------------


def test_the_same_settings_and_seed_give_the_same_bits(whole: Path, tmp_path: Path):
    assert main(["train", "enumerable", *FEW, "--run", str(tmp_path / "again")]) == 0
    check_same(tmp_path / "again", whole)


def test_another_seed_gives_another_run(whole: Path, tmp_path: Path):
    execute(few(seed=6), tmp_path / "run")
    losses = [line[m.LOSS] for line in steps_of(tmp_path / "run")]
    assert not set(losses) & {line[m.LOSS] for line in steps_of(whole)}


def test_evaluating_and_saving_do_not_change_training(tmp_path: Path):
    execute(few(), tmp_path / "plain")
    execute(few(evaluation={"every": 7}, checkpoint={"every": 16}), tmp_path / "watched")
    assert steps_of(tmp_path / "plain") == steps_of(tmp_path / "watched")
    assert bits_of(tmp_path / "plain") == bits_of(tmp_path / "watched")
    evaluated = [line[m.EVAL_STEP] for line in lines_of(tmp_path / "watched") if m.STEP not in line]
    assert evaluated == [0, 7, 14, 21, 28, 32]


def test_fewer_prompts_than_a_step_wants_still_make_steps(tmp_path: Path):  # case d07
    trainer = {"groups_per_step": 8, "sync_every": 4, "steps": 8}
    summary = execute(few(task={"prompts": 3}, trainer=trainer), tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["version"]) == ("done", 8, 8)
    assert summary["ledger"]["prompts"] == {"leased": 64, "delivered": 64, "open": 0, "lost": 0}


# ---- what a run leaves behind ----------------------------------------------------------------------


def test_the_run_directory_holds_what_is_promised(whole: Path):
    names = {p.name for p in whole.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "ledger.json", "checkpoints", "final", "report.html"}
    assert "newest.json" in names
    assert not [name for name in names if "partial" in name]
    assert [step for step, _ in checkpoint.complete(whole)] == [80, 96]
    assert {p.name for p in (whole / "final").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    tree = yaml.safe_load((whole / "config.yaml").read_text())
    assert (tree["seed"], tree["trainer"]["steps"], tree["buffer"]["recent_age"]) == (5, 96, 31)


def test_every_step_is_one_strict_line_with_its_round_and_version(whole: Path):
    for number, line in enumerate(steps_of(whole), 1):
        assert (line[m.STEP], line[m.VERSION], line[m.ROUND]) == (number, number, (number - 1) // 16)
        assert line[m.LOGP_GAP] is None or line[m.LOGP_GAP] < 1e-5
        assert sum(line[m.DRAWN_BY].values()) == 8
        assert sum(line[m.AGE_HISTOGRAM].values()) == 128
        assert ("0" in line[m.AGE_HISTOGRAM]) or number % 16 != 1  # a round begins with its newest weights' data


def test_the_ledger_adds_up(whole: Path):
    ledger = json.loads((whole / "ledger.json").read_text())
    assert balances(ledger)
    assert ledger["trajectories"]["delivered"] == 6 * 128 * 16  # rounds x prompts x completions
    assert ledger["prompts"] == {"leased": 768, "delivered": 768, "open": 0, "lost": 0}


# ---- interrupted -----------------------------------------------------------------------------------


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tba", *words], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, **options,
    )


def until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Polls until something holds; the process must still be there then."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing to see in time"
        time.sleep(0.002)


def has_lines(run: Path, count: int) -> Callable[[], bool]:
    log = run / "metrics.jsonl"
    return lambda: log.exists() and log.read_bytes().count(b"\n") >= count


MOVING = {
    "reset": ["reference.kind=reset", "reference.every=24", "reference.reset_optimizer=true"],
    "steered": ["reference.kind=ema", "reference.decay=0.9", "reference.every=3", "objective.target_kl=0.5",
                "search.temperature={low: 0.8, high: 1.6, share: 0.7}", "search.top_p={low: 0.8, high: 1.0}"],
}
"""Runs with everything that a checkpoint must hold besides weights."""


@pytest.mark.parametrize("words", MOVING.values(), ids=list(MOVING))
def test_a_moving_reference_is_resumed_to_the_bit(tmp_path: Path, words: list[str]):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(["train", "enumerable", *FEW, *words, "--run", str(whole)]) == 0
    process = start("train", "enumerable", *FEW, *words, "--run", str(run))
    until(has_lines(run, 55), process)
    process.kill()
    process.communicate()
    assert checkpoint.complete(run)
    assert main(["resume", str(run)]) == 0
    check_same(run, whole)
    versions = {line[m.REF_VERSION] for line in steps_of(whole)}
    assert len(versions) == (4 if "reference.kind=reset" in words else 32)
    assert any(line[m.RESCORED] > 0 for line in steps_of(whole))


@pytest.mark.parametrize("points", [(36, 71), (50, 51)], ids=str)
def test_killed_and_resumed_equals_never_killed_to_the_bit(whole: Path, tmp_path: Path, points):
    run = tmp_path / "run"
    for words, point in zip((["train", "enumerable", *FEW, "--run"], ["resume"]), points, strict=True):
        process = start(*words, str(run))
        until(has_lines(run, point), process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (run / "final").exists()
    assert main(["resume", str(run)]) == 0
    check_same(run, whole)


def test_ctrl_c_saves_ends_with_130_and_resumes_to_the_same_bits(whole: Path, tmp_path: Path):
    run = tmp_path / "run"
    process = start("train", "enumerable", *FEW, "--run", str(run), "--json")
    until(has_lines(run, 20), process)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=WAIT_LIMIT_S)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    summary = json.loads(out)
    assert summary["status"] == "interrupted"
    assert summary["final"] == {}
    assert summary["steps"] == checkpoint.complete(run)[-1][0] == summary["version"]
    assert summary["steps"] % 16 == 0
    assert 16 <= summary["steps"] < STEPS
    assert (run / "report.html").is_file()
    assert main(["resume", str(run)]) == 0
    check_same(run, whole)


def test_killed_before_the_first_checkpoint_says_how_to_start_again(tmp_path: Path, capsys):
    execute(few(), tmp_path / "run")
    for _, folder in checkpoint.complete(tmp_path / "run"):
        (folder / checkpoint.MARK).unlink()
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "no complete checkpoint" in (said := capsys.readouterr().err)
    assert "tba train" in said


def test_an_unfinished_checkpoint_is_told_of_and_the_older_one_used(whole: Path, tmp_path: Path):
    run = copy_of(whole, tmp_path)
    (run / "checkpoints" / "step_96" / checkpoint.MARK).unlink()
    (run / "checkpoints" / "step_96" / "trainer.safetensors").write_bytes(b"half")
    notes: list[str] = []
    again = resumed(run, settings_of_run(run), lambda kind, record: notes.append(str(record.get("text", ""))))
    assert again.execute()["status"] == "done"
    assert any("step_96 was not finished" in note for note in notes)
    assert any("resuming from step 80" in note for note in notes)
    check_same(run, whole)


@pytest.mark.parametrize("harm", ["trainer.safetensors", "depot.json", "buffer.json", "run.json"])
def test_a_damaged_checkpoint_is_told_of_and_the_older_one_used(harm: str, whole: Path, tmp_path: Path):
    run = copy_of(whole, tmp_path)
    file = run / "checkpoints" / "step_96" / harm
    if harm == "depot.json":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 7)
    notes: list[str] = []
    again = resumed(run, settings_of_run(run), lambda kind, record: notes.append(str(record.get("text", ""))))
    assert again.execute()["status"] == "done"
    assert any(f"step_96 is damaged ({harm} is gone or of another size)" in note for note in notes), notes
    check_same(run, whole)


def test_a_log_that_lost_its_end_is_told_of_and_holds_whole_lines_only(whole: Path, tmp_path: Path):
    run = copy_of(whole, tmp_path)
    log = run / "metrics.jsonl"
    os.truncate(log, log.stat().st_size // 3)
    notes: list[str] = []
    resumed(run, settings_of_run(run), lambda kind, record: notes.append(str(record.get("text", "")))).execute()
    assert any(note.startswith("metrics.jsonl has lost ") for note in notes), notes
    assert all(json.loads(line) for line in log.read_text("utf-8").splitlines())


@pytest.mark.parametrize("name", ["steps-000000001.parquet", "steps-abc.parquet"])
def test_damaged_records_of_steps_keep_no_run_from_going_on(name: str, whole: Path, tmp_path: Path):
    run = copy_of(whole, tmp_path)
    for file in (run / "steps").glob("*"):
        file.write_bytes(b"PAR1 and no more")
    (run / "steps" / name).write_bytes(b"")
    assert resumed(run, settings_of_run(run), lambda kind, record: None).execute()["status"] == "done"


def copy_of(run: Path, folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(run, folder / "copy"))


def settings_of_run(run: Path) -> Settings:
    from tba.jobs import settings_of

    return settings_of(run)


def test_resuming_a_finished_run_changes_no_step_and_no_bit(whole: Path, tmp_path: Path):
    run = copy_of(whole, tmp_path)
    assert main(["resume", str(run)]) == 0
    check_same(run, whole)
    assert lines_of(run)[:-1] == lines_of(whole)[:-1]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["wall_s"] == pytest.approx(json.loads((whole / "summary.json").read_text())["wall_s"], abs=0.5)


@pytest.fixture
def other_prompts(whole: Path, tmp_path: Path) -> Path:
    """A finished run whose task has another number of prompts now."""
    run = copy_of(whole, tmp_path)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("prompts: 4\n  symbols", "prompts: 3\n  symbols"))
    return run


def test_other_prompts_than_the_checkpoints_are_refused(other_prompts: Path, capsys):  # case g08
    assert main(["resume", str(other_prompts)]) == 2
    said = capsys.readouterr().err
    assert "fingerprint" in said
    assert "restore the data, or start a new run" in said


def test_a_refused_resume_changes_nothing(other_prompts: Path):
    before = files_of(other_prompts)
    assert main(["resume", str(other_prompts)]) == 2
    assert files_of(other_prompts) == before


# ---- ends of other kinds ---------------------------------------------------------------------------


def test_max_minutes_ends_a_run_as_if_its_steps_were_done(tmp_path: Path):
    summary = execute(few(trainer={"max_minutes": 1e-5, "steps": 64}), tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["version"]) == ("done", 16, 16)
    assert summary["final"][m.EVAL_STEP] == 16
    assert (tmp_path / "run" / "final" / "config.json").is_file()


DIVERGING = ["trainer.learning_rate=1e30", "trainer.steps=32", "trainer.max_bad_steps=3", "evaluation.samples=8"]


def test_a_run_that_diverges_fails_with_a_message_and_no_traceback(tmp_path: Path, capsys):
    run = tmp_path / "run"
    assert main(["train", "enumerable", *DIVERGING, "--run", str(run)]) == 1
    said = capsys.readouterr().err
    assert "not finite in 3 steps in a row" in said
    assert "lower trainer.learning_rate" in said
    assert "Traceback" not in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "not finite" in summary["message"]
    assert (run / "report.html").is_file()
    assert not (run / "final").exists()
    assert summary["version"] == lines_of(run)[-1][m.VERSION] < summary["steps"]


def test_a_failed_run_reports_its_status_as_json_too(tmp_path: Path, capsys):
    assert main(["train", "enumerable", *DIVERGING, "--run", str(tmp_path / "run"), "--json"]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["status"] == "failed"
    assert summary["run"] == str(tmp_path / "run")


def test_a_full_disk_fails_with_the_checkpoints_own_message(tmp_path: Path):
    run = tmp_path / "run"
    process = start(
        "train", "enumerable", "trainer.steps=32", "evaluation.samples=8", "--run", str(run),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000)),
    )
    _, said = process.communicate(timeout=WAIT_LIMIT_S)
    assert process.returncode == 1, said
    assert "checkpoint of step 32" in said
    assert "Traceback" not in said
    assert list((run / "checkpoints").iterdir()) == []


# ---- the exact target ------------------------------------------------------------------------------


class Flipped(Enumerable):
    """The same task with every reward negated."""

    def reward(self, prompt_id, tokens):
        return -super().reward(prompt_id, tokens)


def test_the_recipe_reaches_the_exact_target_and_no_other(tmp_path: Path):
    settings = settings_with()
    summary = execute(settings, tmp_path / "run")
    assert summary["start"][m.TV] > 0.3
    assert summary["final"][m.TV] <= 0.02
    assert summary["final"][m.TARGET_KL] < 0.005
    assert [line[m.EVAL_STEP] for line in lines_of(tmp_path / "run") if m.STEP not in line] == [
        0, 160, 320, 480, 640, 640
    ]
    tensors = load_file(tmp_path / "run" / "final" / "model.safetensors")
    limits = {"max_new_tokens": settings.search.max_new_tokens, "score_limit_s": 1.0}

    def distance(task: Enumerable, beta: float) -> float:
        policy = assembly.make_policy(settings, task)
        evaluator = assembly.make_evaluator(settings, assembly.make_questions(settings, task, policy), policy)
        return evaluator.evaluate(tensors, 640, prompts=4, samples=2, beta=beta).metrics[m.TV]

    task = Enumerable(settings.task, **limits)
    assert distance(task, 0.7) == pytest.approx(summary["final"][m.TV])
    assert min(distance(task, 0.5), distance(task, 0.98), distance(Flipped(settings.task, **limits), 0.7)) > 0.05
