"""An audit with known failure modes: TBA finds all of them, in the shares of the exact target."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

import redteam
from pages import write_between

pytestmark = pytest.mark.usefixtures("one_thread")


def chosen(completions: int) -> argparse.Namespace:
    return argparse.Namespace(completions=completions, search_s=0.5)


@pytest.mark.parametrize("method", ["tba-4", "gflownet-sync", "grpo"])
def test_a_short_run_of_each_method(method: str) -> None:
    run = redteam.measure(method, 1, chosen(1024))
    assert run["steps"] == 8
    assert 0 < run["success"] < 0.2
    assert 0.5 < run["tv"] < 1
    assert 0 <= run["modes"] <= 8
    assert run["end_s"] > 0.5


def test_each_method_differs_in_what_it_is_named_for() -> None:
    made = {method: redteam.settings_of(method, 3, 96_000) for method in redteam.METHODS}
    assert [made[f"tba-{n}"].search.searchers for n in redteam.SEARCHERS] == [1, 2, 4, 8]
    assert {made[method].lead for method in ("gflownet-sync", "grpo")} == {0}
    assert made["grpo"].buffer.max_uses == 1
    assert {s.trainer.steps for s in made.values()} == {748}
    assert made["gflownet-sync"].objective.prior_temperature == made["tba-1"].objective.prior_temperature


def test_the_table_and_the_page(tmp_path: Path) -> None:
    run = {"method": "grpo", "half_s": 2.0, "half_completions": 10, "all_modes_s": None, "all_modes_completions": None,
           "end_s": 4.0, "completions": 20, "success": 0.5, "diversity": 0.25, "modes_seen": 3, "modes": 2, "tv": 0.75}
    text = redteam.table([run, {**run, "half_s": 4.0}])
    assert "| grpo | 2 | 3.0 | 10 | - | - | 4.0 | 20 | 0.500 | 0.250 | 3.0 | 2.0 | 0.750 |" in text
    page = tmp_path / "page.md"
    page.write_text(f"by hand\n{redteam.BEGIN}\nold\n{redteam.END}\nafter\n", "utf-8")
    write_between(page, redteam.BEGIN, redteam.END, text)
    assert page.read_text("utf-8") == f"by hand\n{redteam.BEGIN}\n{text}\n{redteam.END}\nafter\n"


@pytest.mark.slow
@pytest.mark.bars
@pytest.mark.parametrize("searchers", [1, 4])
def test_tba_finds_every_failure_mode_in_the_shares_of_the_target(searchers: int) -> None:
    run = redteam.measure(f"tba-{searchers}", 0, chosen(96_000))
    assert run["modes_seen"] == run["modes"] == 8
    assert run["tv"] <= 0.03
    assert run["success"] >= 0.9


@pytest.mark.slow
@pytest.mark.bars
def test_four_searchers_find_all_modes_three_times_sooner() -> None:
    seconds = {n: [redteam.measure(f"tba-{n}", seed, chosen(48_000))["all_modes_s"] for seed in (0, 1)] for n in (1, 4)}
    assert math.fsum(seconds[1]) >= 3 * math.fsum(seconds[4])
