"""Trajectory balance reaches the exact posterior from data of any age; REINFORCE with KL does on policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import posterior
import posterior_page
from tba import assembly
from tba.tasks.enumerable import Enumerable, log_target
from tba.weights import Weights

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = (0, 1)
STEPS = 600


def weights(version: int) -> Weights:
    return Weights(version=version, round=version, digest="", tensors={})


# ---- the parts of the benchmark ------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 3])
def test_a_late_store_hands_out_the_publication_of_lag_versions_ago(lag: int) -> None:
    store = posterior.LateStore(lag)
    with pytest.raises(RuntimeError, match="no weights"):
        store.latest()
    for version in range(8):
        store.publish(weights(version))
        assert store.latest().version == max(0, version - lag)
    with pytest.raises(ValueError, match="backwards"):
        store.publish(weights(5))


@pytest.mark.parametrize("replay", [True, False])
def test_no_trajectory_is_younger_than_the_lag(replay: bool) -> None:
    row = posterior.run("many_modes", "trajectory_balance", 3, replay, 0, 9)
    assert row["youngest_age"] == 3
    assert 0 < row["tv"] < 1
    json.dumps(row)


def test_without_replay_every_trajectory_is_used_once_at_exactly_the_lag(tmp_path: Path) -> None:
    settings = posterior.settings_of("one_mode", "reinforce", 2, False, 0, 6)
    assert settings.buffer.max_uses == 1
    assert settings.prompts_per_round * settings.search.num_samples == settings.groups_per_step * 16
    assert settings.buffer.dedup == "none"


def listing_of(task: str) -> tuple[Any, Any]:
    settings = posterior.settings_of(task, "dr_grpo", 0, False, 0, 4)
    built = assembly.make_task_of(settings)
    assert isinstance(built, Enumerable)
    policy = assembly.make_policy(settings, built)
    return posterior.list_completions(built, built.prompts(policy.encode), policy)[0], settings


def test_a_listing_is_a_distribution_with_its_modes() -> None:
    listing, _ = listing_of("many_modes")
    assert math.fsum(map(math.exp, listing.log_ref)) == pytest.approx(1.0, abs=1e-5)
    assert [listing.reward[at] for at in listing.modes] == [1.0] * 8
    assert math.fsum(listing.reward) == 8.0


def test_the_optimum_of_k3_by_hand() -> None:
    # one token, pi_ref 1/4 and 3/4, rewards 1 and 0, beta 1/2: 1/8 / (c - 1) + 3/8 / c = 1
    # c^2 - 3/2 c + 3/8 = 0, c = 3/4 + sqrt(3/16) = 1.183013; pi = 0.125 / 0.183013 = 0.683013, 0.316987
    listing = posterior.Listing(
        pairs=[((1,), (5,)), ((1,), (6,))], reward=[1.0, 0.0], log_ref=[math.log(0.25), math.log(0.75)], modes=[0]
    )
    found = [math.exp(x) for x in posterior.k3_optimum(listing, 0.5)]
    assert found == pytest.approx([0.683013, 0.316987], abs=1e-6)


def test_the_optimum_of_k3_is_a_distribution_and_not_the_posterior() -> None:
    listing, settings = listing_of("random")
    found = posterior.k3_optimum(listing, settings.objective.beta)
    target, _ = log_target(listing.log_ref, listing.reward, settings.objective.beta)
    assert math.fsum(map(math.exp, found)) == pytest.approx(1.0, abs=1e-9)
    assert 0.5 * math.fsum(abs(math.exp(a) - math.exp(b)) for a, b in zip(found, target, strict=True)) > 0.02


def test_the_page_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    row = posterior.run("one_mode", "grpo", 0, False, 0, 2)
    assert row["own_tv"] is None
    (tmp_path / "posterior.md").write_text("# By hand\n\nWords.\n", "utf-8")
    for _ in range(2):
        posterior_page.page([row, {**row, "seed": 1, "tv": 0.75, "lag": 4}], tmp_path)
    text = (tmp_path / "posterior.md").read_text("utf-8")
    assert text.startswith("# By hand\n\nWords.\n\n<!--")
    assert text.count("| one_mode | grpo | off | 4 | 2 | 1 | 0.7500 | 0.7500 |") == 1
    assert (tmp_path / "posterior.svg").read_text("utf-8").count("<circle") == 2


def test_a_bar_is_missed_by_one_mode_or_by_the_mean() -> None:
    row = {"task": "many_modes", "objective": "trajectory_balance", "replay": True, "lag": 4, "steps": 9, "tv": 0.01,
           "modes": 16, "modes_found": 16}
    assert [line[-5:] for line in posterior.verdicts([row, {**row, "tv": 0.029}])] == ["holds"]
    assert "tv 0.0205" in posterior.verdicts([row, {**row, "tv": 0.031}])[0]
    assert posterior.verdicts([row, {**row, "tv": 0.031}])[0].endswith("MISSED")
    assert posterior.verdicts([{**row, "modes_found": 15}])[0].endswith("modes missed 1: MISSED")
    assert posterior.verdicts([{**row, "replay": False}, {**row, "objective": "rloo"}]) == []


# ---- the bars ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.bars
@pytest.mark.parametrize("lag", posterior.LAGS)
@pytest.mark.parametrize("task", ["random", "one_mode", "many_modes"])
def test_trajectory_balance_reaches_the_posterior_from_data_of_any_age(task: str, lag: int) -> None:
    rows = [posterior.run(task, "trajectory_balance", lag, True, seed, STEPS) for seed in SEEDS]
    assert math.fsum(row["tv"] for row in rows) / len(rows) <= 0.02
    assert all(row["modes_found"] == row["modes"] for row in rows)
    assert min(row["start_tv"] for row in rows) > 0.2


@pytest.mark.slow
@pytest.mark.bars
@pytest.mark.parametrize("task", ["random", "one_mode", "many_modes"])
def test_reinforce_with_kl_reaches_the_posterior_on_policy(task: str) -> None:
    rows = [posterior.run(task, "reinforce", 0, False, seed, STEPS) for seed in SEEDS]
    assert math.fsum(row["own_tv"] for row in rows) / len(rows) <= 0.03
