"""Scores are made beside sampling, several prompts at once, and say the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support import make_completion, make_lease, make_prompt
from tba.reading import read_settings
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, Score
from tba.rewards.sandbox import TimedScorer
from tba.scoring import Scoring
from tba.settings import SettingsError
from test_searcher import LengthTask, make_searcher

LIMIT_S = 30.0


class Meeting(LengthTask):
    """Scores nobody before so many prompts are being scored at once."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties, timeout=LIMIT_S)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        self.barrier.wait()
        return [float(len(prompt.tokens))] * len(completions)


def test_as_many_prompts_as_asked_for_are_scored_at_once() -> None:
    scoring = Scoring(Meeting(3), 3)  # with fewer threads the barrier breaks, and score raises
    prompts = [make_prompt(f"p{n}", (1,) * (n + 1)) for n in range(6)]
    under_way = [scoring.begin(prompt, [make_completion((3,))] * 2) for prompt in prompts]
    assert [f.result(LIMIT_S) for f in under_way] == [[Score(reward=float(n + 1))] * 2 for n in range(6)]


class Held(LengthTask):
    """Scores once it is let."""

    def __init__(self) -> None:
        self.may, self.asked = threading.Event(), []

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        self.asked.append(prompt.id)
        assert self.may.wait(LIMIT_S)
        return super().score(prompt, completions)


def test_a_batch_is_sampled_while_the_one_before_is_scored() -> None:
    task = Held()
    searcher, alone = make_searcher(task=task, batch_prompts=1), make_searcher(batch_prompts=1)
    leases = [make_lease(make_prompt(name), n) for n, name in enumerate("ab")]
    first = searcher.sample(leases[:1])
    second = searcher.sample(leases[1:])  # returns although nothing has been scored
    assert not any(f.done() for f in (*first.outcomes, *second.outcomes))
    task.may.set()
    assert [*searcher.scored(first), *searcher.scored(second)] == list(alone.search(leases))
    assert task.asked == ["a", "b"]


def test_what_a_task_raises_is_raised_where_its_scores_are_awaited() -> None:
    class Broken(LengthTask):
        def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
            raise RuntimeError("a fault of the task")

    searcher = make_searcher(task=Broken())
    with pytest.raises(RuntimeError, match="a fault of the task"):
        list(searcher.search([make_lease(make_prompt("p"))]))


def test_calls_of_one_function_run_in_processes_of_their_own(tmp_path: Path) -> None:
    """Each call waits for the other: in one process, or one after the other, neither would return."""
    file = tmp_path / "meets.py"
    file.write_text(f"""
import os, time
from pathlib import Path
def reward(prompt, completions):
    Path({str(tmp_path)!r}, prompt.id).write_text(str(os.getpid()))
    until = time.monotonic() + {LIMIT_S}
    while not all(Path({str(tmp_path)!r}, name).exists() for name in "ab"):
        if time.monotonic() > until:
            return [-1.0]
        time.sleep(0.01)
    return [ord(prompt.id)]
""", "utf-8")
    scorer = TimedScorer(f"{file}:reward", limit_s=LIMIT_S + 5)
    try:
        (tmp_path / "a").touch()  # the first call alone: its process is free afterwards, once
        assert scorer(make_prompt("b"), [make_completion((3,))]) == [Score(reward=98.0)]
        for name in "ab":
            (tmp_path / name).unlink()
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda name: scorer(make_prompt(name), [make_completion((3,))]), "ab"))
        assert found == [[Score(reward=97.0)], [Score(reward=98.0)]]
        assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()
    finally:
        scorer.close()


def test_a_call_that_hangs_ends_its_own_process_alone(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text("import time\ndef reward(prompt, completions):\n"
                    "    time.sleep(60 if prompt.id == 'bad' else 0.5)\n    return [1.0]\n", "utf-8")
    scorer = TimedScorer(f"{file}:reward", limit_s=2.0)
    try:
        with ThreadPoolExecutor(2) as threads:
            bad, good = threads.map(lambda name: scorer(make_prompt(name), [make_completion((3,))]), ("bad", "good"))
        assert good == [Score(reward=1.0)]
        assert bad == [Failure(reason="timeout", detail="no reward within 2 s")]
        assert scorer.replaced == 1
    finally:
        scorer.close()


def test_several_scorers_are_for_functions_alone() -> None:
    with pytest.raises(SettingsError, match=r"search\.scorers = 4 is for reward functions"):
        read_settings("arithmetic", ["search.scorers=4"])
