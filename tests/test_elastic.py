"""Searchers that join, leave and hang, and nodes that are lost, during real runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tba import control
from tba.cluster.searchers import is_in_vain
from test_cluster import LIMIT_S, adds_up, children_named, started, steps_of, wait_for_steps


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a run, which is stopped at the end of the test if it has not ended."""
    begun: list[subprocess.Popen[str]] = []

    def start(folder: Path, *words: str) -> subprocess.Popen[str]:
        begun.append(started(folder, *words))
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            process.terminate()
            process.terminate()
        process.communicate(timeout=LIMIT_S)


Begin = Callable[..., subprocess.Popen[str]]


def tba(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tba", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def wait_until(process: subprocess.Popen[str], holds: Callable[[], Any]) -> Any:
    """What `holds` returns once that is true of a run that is under way."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := holds()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)
    return found


def told(folder: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in control.ask(folder, {"do": "list", "count": 0})["searchers"]}


def finished(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode in (0, 130), err
    summary = json.loads(out.splitlines()[-1])
    assert adds_up(summary["ledger"])
    return summary, err


def test_searchers_join_and_leave_a_run_under_way(tmp_path: Path, begin: Begin) -> None:
    folder = tmp_path / "run"
    process = begin(folder, "trainer.steps=80000", "buffer.reuse=1.0")
    wait_for_steps(process, folder, 8)
    added = tba("searchers", str(folder), "add", "2")
    assert added.returncode == 0, added.stderr
    assert added.stdout.splitlines()[0] == "added: searcher-1, searcher-2"
    listed = tba("searchers", str(folder), "list", "--json")
    assert [line["name"] for line in json.loads(listed.stdout)["searchers"]] == [*told(folder)]
    wait_until(process, lambda: all((told(folder).get(f"searcher-{n}", {}).get("delivered") or 0) > 8 for n in (1, 2)))
    refused = tba("searchers", str(folder), "remove", "3")
    assert refused.returncode == 2
    assert "3 of 3 searchers cannot be removed: at least 1 has to stay." in refused.stderr
    assert tba("searchers", str(folder), "remove", "2").stdout.splitlines()[0] == "leaving: searcher-1, searcher-2"
    wait_until(process, lambda: [*told(folder)] == ["searcher-0"])
    twice = tba("resume", str(folder))
    assert twice.returncode == 2
    assert "is under way (process" in twice.stderr
    process.send_signal(signal.SIGINT)
    summary, err = finished(process)
    assert set(summary["searchers"]) == {"searcher-0", "searcher-1", "searcher-2"}
    assert "searcher-2 left; 0 prompts are handed out again" in err
    assert summary["ledger"]["prompts"]["lost"] == 0
    over = tba("searchers", str(folder), "add", "1")
    assert over.returncode == 2
    assert "no run is under way" in over.stderr


def test_a_searcher_that_stands_still_is_replaced_and_its_prompts_go_to_another(tmp_path: Path, begin: Begin) -> None:
    folder = tmp_path / "run"
    process = begin(folder, "trainer.steps=80000", "buffer.reuse=1.0", "search.searchers=2", "async.lease_limit_s=2",
                      "async.max_restarts=1")
    wait_for_steps(process, folder, 8)
    wait_until(process, lambda: all(line["delivered"] for line in told(folder).values()))
    victim = children_named(process.pid, "ray::SearcherProcess")[-1]
    os.kill(victim, signal.SIGSTOP)
    lives = wait_until(process, lambda: [s["life"] for s in told(folder).values() if s["life"] > 1 and s["delivered"]])
    assert lives == [2]
    assert not Path(f"/proc/{victim}").exists()
    process.send_signal(signal.SIGINT)
    summary, err = finished(process)
    assert "died (it held prompts for" in err
    assert summary["ledger"]["prompts"]["lost"] > 0


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()
        signal.signal(signal.SIGTERM, before)  # it has set its own


def test_a_run_on_a_cluster_outlives_a_lost_node_and_uses_a_new_one(
    tmp_path: Path, begin: Begin, cluster: Any
) -> None:
    folder = tmp_path / "run"
    lost = cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    places = [f"resources.{who}.cpus=1.25" for who in ("trainer", "depot", "evaluator")]  # these fit the head alone
    process = begin(folder, "trainer.steps=80000", "buffer.reuse=1.0", "search.searchers=2", *places,
                      f"ray.address={cluster.address}", "async.max_restarts=50")
    wait_for_steps(process, folder, 8)
    wait_until(process, lambda: all(s["delivered"] for s in told(folder).values()))
    cluster.remove_node(lost, allow_graceful=False)
    steps = len(steps_of(folder))
    cluster.add_node(num_cpus=1)
    wait_until(process, lambda: sorted(s["life"] for s in told(folder).values() if s["delivered"]) == [1, 2])
    wait_for_steps(process, folder, steps + 16)
    process.send_signal(signal.SIGINT)
    summary, err = finished(process)
    assert summary["status"] == "interrupted"
    assert "died (" in err


@pytest.mark.parametrize(("words", "said"), [
    (("ray.address=127.0.0.1:1",), "ray.address = '127.0.0.1:1' cannot be joined"),
    (("resources.trainer.gpus=64",), "resources.trainer: 0 CPUs and 64 GPUs are on no node"),
])
def test_a_cluster_that_is_not_there_or_too_small_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    run = tmp_path / "run"
    refused = tba("train", "enumerable", "mode=async", *words, "--run", str(run))
    assert refused.returncode == 2, refused.stderr
    assert said in refused.stderr
    assert not run.exists()


@pytest.mark.parametrize(("deaths", "most", "ends"), [
    ([0, 0], 2, False),  # twice: it may be restarted twice
    ([0, 0, 0], 2, True),
    ([5, 9, 9], 2, False),  # another searcher delivered 4 groups after the first of the three
    ([5, 9, 9, 9], 2, True),
    ([5, 9, 12, 30, 31], 2, False),  # one that never comes up does not end a run that goes on
    ([7], 0, True),
    ([], 0, False),
])
def test_deaths_end_a_run_that_gets_nowhere_and_no_other(deaths: list[int], most: int, ends: bool) -> None:
    assert is_in_vain(deaths, most) == ends
