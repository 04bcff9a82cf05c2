"""Checkpoints: whole or not at all, whatever interrupts the writing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba import checkpoint
from tba.checkpoint import CheckpointError, complete, facts_of, incomplete, save


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "one.txt").write_text(f"{text} one")
        (folder / "two.txt").write_text(f"{text} two")

    return write


def saved(run: Path, step: int, *, keep: int = 2, text: str | None = None, **facts: Any) -> Path:
    return save(run, step, writer(text or f"step {step}"), facts, keep=keep)


def is_whole(folder: Path, text: str) -> bool:
    step = int(folder.name.removeprefix("step_"))
    return (
        (folder / "one.txt").read_text() == f"{text} one"
        and (folder / "two.txt").read_text() == f"{text} two"
        and facts_of(folder)["step"] == step
        and (folder / "COMPLETE").is_file()
    )


def run_code(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


# ---- what counts -----------------------------------------------------------------------------------


def test_a_checkpoint_holds_what_was_written_its_facts_and_the_mark(tmp_path: Path):
    folder = saved(tmp_path, 12, wall_s=3.5, data="abc")
    assert folder == tmp_path / "checkpoints" / "step_12"
    assert is_whole(folder, "step 12")
    assert facts_of(folder) == {"format": checkpoint.FORMAT, "step": 12, "wall_s": 3.5, "data": "abc"}
    assert sorted(p.name for p in folder.iterdir()) == ["COMPLETE", "one.txt", "run.json", "two.txt"]
    assert [p.name for p in folder.parent.iterdir()] == ["step_12"]


def test_steps_are_ordered_as_numbers_and_the_newest_are_kept(tmp_path: Path):
    for step in (8, 9, 10, 100):
        saved(tmp_path, step, keep=3)
    assert [step for step, _ in complete(tmp_path)] == [9, 10, 100]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_100", "step_9"]


@pytest.mark.parametrize("keep", [1, 2])
def test_keep_is_the_number_kept(tmp_path: Path, keep):
    for step in range(1, 6):
        saved(tmp_path, step, keep=keep)
    assert [step for step, _ in complete(tmp_path)] == [1, 2, 3, 4, 5][-keep:]


def test_nothing_saved_is_nothing_found(tmp_path: Path):
    assert complete(tmp_path) == []
    assert incomplete(tmp_path) == []


def test_folders_without_the_mark_or_of_another_name_do_not_count(tmp_path: Path):
    saved(tmp_path, 3)
    for name in ("step_7", "partial_step_9", "step_x", "step_8_old", "xstep_8"):
        (tmp_path / "checkpoints" / name).mkdir()
    for name in ("step_x", "step_8_old", "xstep_8"):
        (tmp_path / "checkpoints" / name / "COMPLETE").touch()
    assert [step for step, _ in complete(tmp_path)] == [3]
    assert [p.name for p in incomplete(tmp_path)] == ["partial_step_9", "step_7", "step_8_old", "step_x", "xstep_8"]


def test_another_format_is_refused(tmp_path: Path):
    folder = saved(tmp_path, 3)
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(CheckpointError, match=f"is of format 99; this version reads format {checkpoint.FORMAT}"):
        facts_of(folder)


def test_leftovers_of_an_interrupted_save_are_replaced(tmp_path: Path):
    partial = tmp_path / "checkpoints" / "partial_step_4"
    partial.mkdir(parents=True)
    (partial / "stray.txt").touch()
    folder = saved(tmp_path, 4)
    assert is_whole(folder, "step 4")
    assert not (folder / "stray.txt").exists()
    assert incomplete(tmp_path) == []


# ---- faults ----------------------------------------------------------------------------------------


def test_a_full_disk_half_way_leaves_the_older_one_and_nothing_half_written(tmp_path: Path):
    saved(tmp_path, 2)

    def fails(folder: Path) -> None:
        (folder / "one.txt").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"step 4 .*No space left.* older checkpoints are intact"):
        save(tmp_path, 4, fails, {}, keep=1)
    ((step, folder),) = complete(tmp_path)
    assert step == 2
    assert is_whole(folder, "step 2")
    assert [p.name for p in folder.parent.iterdir()] == ["step_2"]
    assert is_whole(saved(tmp_path, 4), "step 4")


# Files may not grow beyond 64 KiB, as on a disk that is full; the model is larger.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import numpy
from safetensors.numpy import save_file
from tba.checkpoint import CheckpointError, save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    weights = {"w": numpy.ones(100_000)}
    save(Path(sys.argv[1]), 4, lambda folder: save_file(weights, folder / "w.safetensors"), {}, keep=1)
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_is_told_as_such_when_the_weights_do_not_fit(tmp_path: Path):
    saved(tmp_path, 2)
    done = run_code(FULL_DISK, tmp_path)
    assert [p.name for _, p in complete(tmp_path)] == ["step_2"]
    assert "step 4" in done.stdout, done.stderr
    assert "older checkpoints are intact" in done.stdout
    assert incomplete(tmp_path) == []


KILLED_IN_WRITE = """
import os, signal, sys
from pathlib import Path
from tba.checkpoint import save
ready = int(sys.argv[2])
def write(folder):
    (folder / "one.txt").write_text("half")
    os.write(ready, b"!")
    signal.pause()
save(Path(sys.argv[1]), 4, write, {}, keep=1)
"""


def test_kill_nine_while_writing_leaves_the_older_one(tmp_path: Path):
    saved(tmp_path, 2)
    read_end, write_end = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_IN_WRITE, str(tmp_path), str(write_end)], pass_fds=[write_end]
    )
    os.close(write_end)
    try:
        assert os.read(read_end, 1) == b"!"
    finally:
        os.close(read_end)
        child.kill()
    assert child.wait(60) == -signal.SIGKILL
    assert [step for step, _ in complete(tmp_path)] == [2]
    assert is_whole(complete(tmp_path)[0][1], "step 2")
    assert [p.name for p in incomplete(tmp_path)] == ["partial_step_4"]
    assert is_whole(saved(tmp_path, 4, keep=1), "step 4")
    assert incomplete(tmp_path) == []


# Saves `step` in one child process after another, each killed before its next file operation, until one ends by itself.
KILLED_ANYWHERE = """
import os, shutil, signal, sys
from pathlib import Path
from tba.checkpoint import complete, facts_of, save
root, step, keep = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
def write(text):
    return lambda folder: [(folder / name).write_text(text + name) for name in ("one", "two")]
def is_whole(step, folder):
    try:
        texts = {(folder / name).read_text() for name in ("one", "two")}
        return texts in ({"oldone", "oldtwo"}, {"newone", "newtwo"}) and facts_of(folder)["step"] == step
    except FileNotFoundError:
        return False
def attempt(run, deadline):
    done = 0
    def hook(event, arguments):
        nonlocal done
        if event in WATCHED:
            done += 1
            if done == deadline:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(run, step, write("new"), {}, keep=keep)
    os._exit(0)
for deadline in range(1, 500):
    run = root / str(deadline)
    run.mkdir()
    save(run, 2, write("old"), {}, keep=keep)
    child = os.fork()
    if child == 0:
        attempt(run, deadline)
    _, status = os.waitpid(child, 0)
    found = complete(run)
    broken = [folder.name for step_, folder in found if not is_whole(step_, folder)]
    if not found or broken:
        print(f"killed before operation {deadline}: complete {[f.name for _, f in found]}, of them broken {broken}")
    if status == 0:
        print("ended after", deadline)
        break
"""


@pytest.mark.parametrize(("step", "keep"), [(4, 2), (4, 1), (2, 2), (2, 1)])
def test_killed_before_any_file_operation_a_checkpoint_remains_and_all_that_count_are_whole(tmp_path: Path, step, keep):
    done = run_code(KILLED_ANYWHERE, tmp_path, step, keep)
    assert done.returncode == 0, done.stderr
    *lost, last = done.stdout.splitlines()
    assert last.startswith("ended after")
    assert int(last.split()[-1]) > 10
    assert lost == []
