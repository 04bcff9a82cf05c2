"""Runs under attack, in small: what a killed process leaves, and what resumes."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import chaos
from chaos_processes import Places, below, processes, watched
from chaos_reward import HANGS, NAN, RAISES, chance, faulty
from chaos_runs import ledger_faults, log_faults, prompt_faults
from makers import a_completion, a_prompt
from tba import metrics as m
from tba.cluster.searchers import RunFailedError
from tba.cluster.temporary import LOCK, TemporaryFolder, start_in_folder
from tba.leases import Leases, Pace

LIMIT_S = 60.0


def comes_about(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def python(code: str, *words: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], text=True, **options)


# ---- faults that chaos found -----------------------------------------------------------------------


@pytest.mark.parametrize("hang", ["time.sleep(600)", "re.match('(a+)+$', 'a' * 64 + 'b')"], ids=["sleeps", "computes"])
def test_a_scorer_that_hangs_does_not_outlive_a_searcher_that_is_killed(tmp_path: Path, hang: str):
    """The second hang holds the interpreter's lock, so that nothing of Python runs beside it."""
    (tmp_path / "reward.py").write_text(
        "import os, pathlib, re, time\n\n\ndef score(prompt, completions):\n"
        f"    pathlib.Path(prompt.text).write_text(str(os.getpid()))\n    {hang}\n"
    )
    marker = tmp_path / "pid"
    asks = (
        "import sys\nfrom tba.records import Prompt\nfrom tba.rewards.sandbox import TimedScorer\n"
        "if __name__ == '__main__':\n"
        "    scorer = TimedScorer(sys.argv[1] + ':score', limit_s=1.0)\n"
        "    scorer(Prompt(id='p', tokens=(1,), text=sys.argv[2]), [])\n"
    )
    (tmp_path / "asks.py").write_text(asks)
    searcher = subprocess.Popen([sys.executable, str(tmp_path / "asks.py"), str(tmp_path / "reward.py"), str(marker)])
    assert comes_about(lambda: marker.exists() and marker.read_text() != "")
    searcher.kill()
    searcher.wait()
    scorer = int(marker.read_text())
    assert comes_about(lambda: not is_running(scorer), limit_s=20)


def is_running(pid: int) -> bool:
    found = processes().get(pid)
    return found is not None and not found.is_ended


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's place for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_run_goes_with_the_next_ones_start(temporary: Path):
    code = ("import tempfile, sys, time\ntempfile.tempdir = sys.argv[1]\n"
            "from tba.cluster.temporary import TemporaryFolder\nown = TemporaryFolder()\nprint(own.path, flush=True)\n"
            "time.sleep(600)")
    killed, living = (python(code, temporary, stdout=subprocess.PIPE) for _ in range(2))
    folders = [Path(process.stdout.readline().strip()) for process in (killed, living) if process.stdout]
    (folders[0] / "session").mkdir()
    unlocked = temporary / "tba-someone-else"
    unlocked.mkdir()
    killed.kill()
    killed.communicate()
    own = TemporaryFolder()
    assert [folder.exists() for folder in (*folders, unlocked)] == [False, True, True]
    living.kill()
    living.communicate()
    own.remove()
    assert sorted(temporary.iterdir()) == sorted([folders[1], unlocked])


def test_a_folder_in_use_is_locked_from_its_first_moment(temporary: Path):
    own = TemporaryFolder()
    with (own.path / LOCK).open("r+") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    own.remove()
    assert list(temporary.iterdir()) == []


def test_what_still_runs_with_the_folder_ends_with_it(temporary: Path):
    own = TemporaryFolder()
    straggler, other = (python("import time; time.sleep(600)", folder) for folder in (own.path, temporary))
    own.remove()
    assert straggler.wait(LIMIT_S) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_ray_is_started_again_in_another_folder_when_it_gives_up(temporary: Path):
    tried: list[Path] = []
    notes: list[str] = []

    def gives_up(times: int) -> Callable[[str], None]:
        def init(folder: str) -> None:
            tried.append(Path(folder))
            if len(tried) <= times:
                raise Exception("The current node timed out during startup.\nMore.")  # Ray has no class of its own

        return init

    own = start_in_folder(gives_up(2), lambda kind, record: notes.append(record["text"]))
    assert [folder.exists() for folder in tried] == [False, False, True]
    assert own.path == tried[2]
    assert notes == ["Ray did not start (The current node timed out during startup.); it is started again"] * 2
    own.remove()
    tried.clear()
    with pytest.raises(RunFailedError, match=r"in 3 tries \(The current node timed out during startup\.\)"):
        start_in_folder(gives_up(3), lambda kind, record: None)
    assert list(temporary.iterdir()) == []


# ---- what looks is looked at -----------------------------------------------------------------------


def test_an_orphan_is_seen_and_ended():
    code = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\ninput()"
    with watched() as watch:
        parent = python(code, stdin=subprocess.PIPE)
        assert comes_about(lambda: len(below(parent.pid, processes())) == 1)
        watch.look()
        (child,) = below(parent.pid, processes())
        parent.kill()
        parent.communicate()
        assert watch.left_after(0.5) == [f"{child.pid} {child.title[:120]}"]
    assert comes_about(lambda: not is_running(child.pid))


@pytest.fixture
def places() -> Iterator[Places]:
    made = Places()
    yield made
    made.remove()


def test_files_that_are_left_are_named(places: Places):
    assert places.left() == []
    stray = Path(places.environment["TMPDIR"]) / "tba-stray"
    stray.mkdir()
    assert places.left() == [str(stray)]


def test_a_lost_prompt_is_seen():
    leases = Leases([a_prompt(f"p{n}") for n in range(3)], seed=0, pace=Pace(first=2, per_round=2))
    taken = [lease for _ in range(4) for lease in leases.take(2)]
    leases.deliver(taken[1].number, taken[1].attempt)
    leases.give_back(taken[2:4])
    state = leases.state()
    assert list(prompt_faults(state)) == []
    assert list(prompt_faults({**state, "again": state["again"][1:]})) == [
        "8 prompts of the order were handed out, and 1 are delivered, 5 open, 1 waiting"
    ]
    assert len(list(prompt_faults({**state, "again": [state["open"][0], state["again"][0]]}))) == 1


def test_a_ledger_that_does_not_add_up_is_seen():
    account = {"delivered": 7, "in_buffer": 4, "evicted": {"age": 2}, "rejected": {"late": 1}}
    prompts = {"leased": 6, "delivered": 3, "open": 1, "lost": 2}
    assert list(ledger_faults({"trajectories": account, "tokens": account, "prompts": prompts})) == []
    wrong = {"trajectories": account, "tokens": {**account, "in_buffer": 5}, "prompts": {**prompts, "lost": 1}}
    assert len(list(ledger_faults(wrong))) == 2


def a_log(run: Path, *stamps: tuple[int, int]) -> Path:
    run.mkdir()
    lines = [{m.STEP: n, m.ATTEMPT: attempt, m.VERSION: version, m.INSERTED: n, m.DELIVERED_TOKENS: n, m.UNSCORED: 0}
             for n, (attempt, version) in enumerate(stamps, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_version_or_an_attempt_that_goes_back_is_seen(tmp_path: Path):
    assert list(log_faults(a_log(tmp_path / "right", (0, 1), (0, 2), (1, 2), (2, 3)), 4)) == []
    assert list(log_faults(a_log(tmp_path / "wrong", (0, 1), (1, 2), (0, 3)), 3)) == [
        "(attempt, version) goes from (1, 2) to (0, 3)"
    ]
    assert len(list(log_faults(a_log(tmp_path / "short", (0, 1)), 2))) == 1


def test_faults_of_the_scorer_are_as_frequent_as_is_said():
    drawn = [chance("prompt", n) for n in range(20_000)]
    for share in (HANGS, RAISES, NAN):  # within four standard deviations
        found = sum(value < share for value in drawn) / len(drawn)
        assert abs(found - share) < 4 * (share * (1 - share) / len(drawn)) ** 0.5
    completions = [a_completion(tokens=(n, 2)) for n in range(4)]
    assert faulty(a_prompt("p0"), completions, [0.25] * 4) == [0.25] * 4  # no fault falls on this call


# ---- small versions of the benchmark ---------------------------------------------------------------


def measured(tmp_path: Path, *words: str) -> dict[str, Any]:
    json_file = tmp_path / "found.json"
    code = chaos.main([*words, "--json", str(json_file), "--keep", str(tmp_path / "kept")])
    (found,) = json.loads(json_file.read_text()).values()
    assert found["faults"] == []
    assert code == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "async"])
def test_killed_at_random_moments_a_run_resumes_and_nothing_is_lost(tmp_path: Path, mode: str):
    found = measured(tmp_path, "kills", "--mode", mode, "--moments", "3", "--steps", "64", "--seed", "1")
    assert found["moments"] == 3


@pytest.mark.slow
def test_short_runs_leave_nothing_and_end_soon(tmp_path: Path):
    assert measured(tmp_path, "short", "--runs", "5")["stopped"] == 1


@pytest.mark.slow
def test_a_storm_changes_nothing_of_what_is_learned(tmp_path: Path):
    found = measured(tmp_path, "storm", "--task", "enumerable", "--minutes", "0.8", "--seeds", "2")
    assert found["killed"] >= 2
    assert (found["removed"], found["added"]) == (1, 1)
