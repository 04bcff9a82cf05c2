"""Beta by step: the early stop of the paper, and the controller that steers to a KL."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from support import make_settings, random_draws, wide_table
from tba import assembly
from tba import metrics as m
from tba.batch import collate
from tba.depot import Depot
from tba.loop import lockstep
from tba.reading import check_settings, read_settings
from tba.schedules import KlControl, Schedules
from tba.settings import SettingsError
from tba.trainer import Trainer
from tba.weights import MemoryStore


def betas(beta: float, final: float, steps: int, stop: int | None) -> Schedules:
    return Schedules(steps=1000, learning_rate=1e-5, schedule="constant", warmup_steps=0, beta=beta, beta_final=final,
                     beta_steps=steps, beta_stop=stop)  # fmt: skip


def paper(beta: float, final: float, steps: int, stop: int, t: int) -> float:
    """The released code's rule, as the paper's notes write it down."""
    return final * (t - 1) / steps + beta * (1 - (t - 1) / steps) if t < stop else final


@pytest.mark.parametrize(("beta", "final", "steps", "stop"), [
    (0.012, 0.004, 500, 500), (0.014, 0.004, 500, 500), (1.0, 0.05, 128, 32), (1.0, 0.05, 412, 140),
])
def test_the_early_stop_is_the_papers(beta: float, final: float, steps: int, stop: int) -> None:
    found = betas(beta, final, steps, stop)
    for t in range(1, 1001):
        assert found.beta_at(t) == pytest.approx(paper(beta, final, steps, stop, t), abs=1e-12)


def test_a_stable_stretch_and_a_decay_longer_than_the_run() -> None:
    # the paper's 700 steps: 50 up, 350 flat, then a half cosine over 600 of which 300 are taken
    found = Schedules(steps=700, learning_rate=1e-5, schedule="cosine", warmup_steps=50, beta=0.014, beta_final=None,
                      beta_steps=0, stable_steps=350, decay_steps=600)  # fmt: skip
    rates = {1: 2e-7, 25: 5e-6, 50: 1e-5, 51: 1e-5, 400: 1e-5, 401: 1e-5,
             551: 1e-5 * 0.5 * (1 + math.cos(math.pi / 4)), 701: 5e-6}  # fmt: skip
    assert {step: found.learning_rate_at(step) for step in rates} == pytest.approx(rates, abs=1e-12)
    line = Schedules(steps=100, learning_rate=0.2, schedule="linear", warmup_steps=10, beta=1.0, beta_final=None,
                     beta_steps=0, stable_steps=40)  # fmt: skip
    rates = {50: 0.2, 51: 0.2, 76: 0.1, 101: 0.0}  # half of the remaining 50 steps are done before step 76
    assert {step: line.learning_rate_at(step) for step in rates} == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("key", ["stable_steps", "decay_steps"])
def test_a_constant_course_has_no_decay(key: str) -> None:
    with pytest.raises(SettingsError, match=f"trainer.{key} = 30 is not used by trainer.schedule = 'constant'"):
        check_settings({"trainer": {key: 30}})


def test_the_early_stop_has_known_answers() -> None:
    found = betas(1.0, 0.05, 128, 32)
    # at step 31: 0.05 x 30/128 + 98/128 = 0.77734375; a step later the floor
    assert (found.beta_at(1), found.beta_at(31), found.beta_at(32)) == (1.0, pytest.approx(0.77734375), 0.05)
    assert betas(1.0, 0.05, 128, None).beta_at(32) == pytest.approx(0.05 * 31 / 128 + 97 / 128)


# ---- steering to a KL -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kl", "beta"), [
    (3.0, 0.5), (3.3, 0.525), (2.7, 0.475),  # off by a tenth: 0.5 (1 +- 0.5 x 0.1)
    (3.6, 0.55), (90.0, 0.55), (-5.0, 0.45), (0.0, 0.45),  # and by a fifth or more: 0.5 (1 +- 0.5 x 0.2)
    (math.nan, 0.5), (math.inf, 0.5),
])
def test_beta_rises_above_the_target_and_falls_below_it(kl: float, beta: float) -> None:
    control = KlControl(0.5, target=3.0, gain=0.5)
    control.update(kl)
    assert control.beta == pytest.approx(beta)


def make_trainer(seed: int = 1, **objective: Any) -> Trainer:
    settings = make_settings(
        objective={"beta": 0.4, **objective}, trainer={"learning_rate": 0.03, "clip_norm": None, "steps": 400}
    )
    return Trainer(wide_table(seed).trainable_copy(), settings)


BATCHES = [collate(random_draws((4, 3), seed=seed, longest=2), max_tokens=99) for seed in range(3)]


def test_each_step_uses_the_beta_that_the_steps_before_it_made() -> None:
    trainer = make_trainer(target_kl=2.0, target_kl_gain=0.3)
    expected = 0.4
    for batch, kl in zip(BATCHES, (2.3, math.nan, 1.0), strict=True):
        found = trainer.step(batch, search_kl=kl)
        assert found[m.BETA] == pytest.approx(expected, rel=1e-12)
        expected *= 1 + 0.3 * {2.3: 0.15, 1.0: -0.2}.get(kl, 0.0)  # 0.3 / 2; a half below is cut to a fifth
    assert trainer.step(BATCHES[0])[m.BETA] == pytest.approx(0.4 * 1.045 * 0.94)


def test_old_data_and_prioritised_draws_do_not_keep_the_kl_from_its_target() -> None:
    settings = read_settings("enumerable", [
        "trainer.sync_every=4", "trainer.learning_rate=0.03", "trainer.schedule=constant", "buffer.recent_age=7",
        "objective.beta=0.7", "objective.target_kl=0.2", "objective.target_kl_gain=0.5",
    ])
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    questions = assembly.make_questions(settings, task, policy)
    journey = lockstep(
        Trainer(policy.trainable_copy(), settings), Depot(questions.training, settings, lead=None),
        assembly.make_searcher(settings, task, policy, "searcher-0"), MemoryStore(), settings.trainer,
    )
    steps = list(itertools.islice(journey, 160))
    assert m.mean(step[m.SEARCH_KL] for step in steps[120::4]) == pytest.approx(0.2, rel=0.25)
    assert m.mean(step[m.KL] for step in steps[120:]) < 0.1  # what was consumed says something else


def test_the_controller_survives_a_checkpoint(tmp_path: Path) -> None:
    ours, theirs = (make_trainer(seed, target_kl=2.0) for seed in (1, 2))
    for batch in BATCHES[:2]:
        ours.step(batch, search_kl=2.5)
    ours.save(tmp_path)
    theirs.load(tmp_path)
    clocks = {m.STEP_SECONDS: 0, m.RESCORE_SECONDS: 0}
    assert {**ours.step(BATCHES[2]), **clocks} == {**theirs.step(BATCHES[2]), **clocks}


@pytest.mark.parametrize(("objective", "words"), [
    ({"target_kl": 3.0, "beta_final": 0.01}, ("objective.target_kl = 3", "objective.beta_final = 0.01")),
    ({"name": "reinforce", "target_kl": 3.0, "beta": 0}, ("objective.target_kl = 3", "objective.beta = 0")),
    ({"beta_steps": 40}, ("objective.beta_steps = 40", "beta_final")),
    ({"beta_stop": 40}, ("objective.beta_stop = 40", "beta_final")),
    ({"beta_final": 0.01, "beta_steps": 30, "beta_stop": 31}, ("beta_stop = 31", "beta_steps = 30")),
])
def test_ways_to_move_beta_that_exclude_each_other_are_refused(
    objective: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        check_settings({"objective": objective})
    (problem,) = caught.value.problems
    assert all(word in problem for word in words)


@pytest.mark.parametrize(("reference", "word"), [
    ({"kind": "reset"}, "reference.every"), ({"every": 3}, "reference.every = 3"),
    ({"kind": "ema"}, "reference.decay"), ({"kind": "reset", "every": 2, "decay": 0.5}, "reference.decay = 0.5"),
    ({"kind": "ema", "decay": 0.5, "reset_optimizer": True}, "reference.reset_optimizer"),
])
def test_references_that_do_not_hold_together_are_refused(reference: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_settings({"reference": reference})
    (problem,) = caught.value.problems
    assert word in problem


@pytest.mark.parametrize(("tree", "message"), [
    ({"policy": {"lora": {"ranks": 2}}}, "policy.lora.ranks is no setting (did you mean rank?)"),
    ({"search": {"temperature": {"low": 1.0, "hihg": 2.0}}},
     "search.temperature.hihg is no setting (did you mean high?)"),
    ({"search": {"temperature": -1.0}}, "search.temperature = -1.0: should be greater than 0."),
    ({"search": {"temperature": {"low": -1.0, "high": 2.0}}},
     "search.temperature.low = -1.0: should be greater than 0."),
])
def test_mistakes_below_a_branch_are_named_by_their_place(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_settings(tree)
    assert message in caught.value.problems
