"""Trainer: the gradient of the whole batch under any cut, one AdamW step, schedules, bad steps, resume."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import (
    STOP,
    llama_policy,
    make_draw,
    make_prompt,
    make_settings,
    make_trajectory,
    random_draws,
    slow_logps,
    wide_table,
)
from tba import metrics as m
from tba.batch import collate
from tba.buffer.entries import Draw
from tba.policy import Policy, copy_out, named_tensors
from tba.trainer import Schedules, Trainer, TrainingFailedError
from tba.weights import digest

BETA = 0.37
SIZES = (4, 2, 1, 3, 2)
"""Groups of a batch: unequal, and one that is too small to count."""


def make_trainer(policy: Policy, *, scale: str = "advantage", beta: float = BETA, **trainer: Any) -> Trainer:
    options = {"learning_rate": 0.01, "clip_norm": None, "groups_per_step": 5, "group_size": 4, "steps": 20}
    objective = {"beta": beta, "scale": scale}
    return Trainer(policy, make_settings(objective=objective, trainer={**options, **trainer}))


def the_draws() -> list[Draw]:
    """Unequal groups; two of one prompt, with a completion in common; one completion twice in a group."""
    draws = random_draws(SIZES, seed=2)
    first = draws[0].trajectories
    twice = make_trajectory("p0", first[1].completion.tokens, reward=1.7, ref_logp=-4.0)
    draws[0] = make_draw(draws[0].prompt, [*first, twice])
    other = [make_trajectory("p0", (7, 0, STOP), reward=-0.4, ref_logp=-5.0), twice]
    return [*draws, make_draw(draws[0].prompt, other)]


def slow_loss(policy: Policy, draws: Sequence[Draw], *, scale: str = "advantage") -> torch.Tensor:
    """The batch loss in float64: one unpadded forward per trajectory, Python loops for everything else."""
    losses = []
    for draw in draws:
        logps = [sum(slow_logps(policy, draw.prompt.tokens, t.completion.tokens)) for t in draw.trajectories]
        ratios = [logp - t.ref_logp - t.reward / BETA for logp, t in zip(logps, draw.trajectories, strict=True)]
        log_z = -sum(r.detach() for r in ratios) / len(ratios)
        if len(ratios) >= 2:
            losses.append(sum((log_z + r) ** 2 for r in ratios) / len(ratios))
    return (BETA / 2 if scale == "advantage" else 1.0) * sum(losses) / len(losses)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in named_tensors(policy.model).items() if p.grad is not None}


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def weights(policy: Policy) -> dict[str, np.ndarray]:
    return copy_out(policy.model)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# ---- grouping bar -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected() -> tuple[float, dict[str, torch.Tensor]]:
    policy = llama_policy(5).trainable_copy()
    loss = slow_loss(policy, the_draws())
    loss.backward()
    return float(loss.detach()), gradients(policy)


@pytest.mark.parametrize("max_tokens", [1, 9, 17, 40, 10_000])
@pytest.mark.parametrize("order", [None, 1, 2])
def test_gradient_is_that_of_the_whole_batch(
    max_tokens: int, order: int | None, expected: tuple[float, dict[str, torch.Tensor]]
) -> None:
    draws = the_draws()
    if order is not None:
        random.Random(order).shuffle(draws)
    policy = llama_policy(5).trainable_copy()
    batch = collate(draws, max_tokens=max_tokens)
    found = make_trainer(policy).step(batch)
    loss, slopes = expected
    scale = max(float(slope.abs().max()) for slope in slopes.values())
    assert found[m.LOSS] == pytest.approx(loss, rel=1e-6)
    assert gap(gradients(policy), slopes) < 1e-6 * max(1.0, scale)
    assert scale > 0.1
    norm = math.sqrt(sum(float(s.double().square().sum()) for s in slopes.values()))
    assert found[m.GRAD_NORM] == pytest.approx(norm, rel=1e-5)
    pieces = [len(micro.rows) for micro in batch.micro_batches]
    assert {1: max(pieces) > 3, 9: max(pieces) > 1, 10_000: pieces == [1]}.get(max_tokens, len(pieces) > 1)


@pytest.mark.parametrize("cuts", [1, 10_000])
def test_loss_in_halves_is_the_loss_e02(cuts: int) -> None:
    policy = wide_table(1, temperature=1.0)
    prompt = make_prompt("p", (1, 3))
    pairs = [((1, 3), (4, STOP)), ((1, 3), (5, STOP))]
    refs = policy.sequence_logps(pairs)  # policy equal to reference
    draws = [
        make_draw(prompt, [make_trajectory("p", c, reward=float(r), ref_logp=lp) for r, (_, c), lp in
                           zip((shift, shift + 1), pairs, refs, strict=True)])
        for shift in (0, 3)
    ]
    found = make_trainer(policy, beta=1.0, scale="paper").step(collate(draws, max_tokens=cuts))
    assert found[m.LOSS] == pytest.approx(0.25, abs=1e-6)
    # A = (-1/2, 1/2), and without beta/2 twice that: two groups of the same two rows, (1, -1)/2 each
    table_rows = gradients(policy)["logits"]
    whole = wide_table(1, temperature=1.0)
    make_trainer(whole, beta=1.0, scale="paper").step(collate(draws[:1], max_tokens=cuts))
    assert gap({"logits": table_rows}, gradients(whole)) < 1e-6


def test_stored_log_probs_of_the_searcher_do_not_enter_f04() -> None:
    draws = random_draws((3, 2), seed=3)
    stale = [
        make_draw(d.prompt, [
            make_trajectory(d.prompt.id, t.completion.tokens, reward=t.reward, ref_logp=t.ref_logp,
                            logps=[-9.0] * len(t.completion.tokens), version=0) for t in d.trajectories
        ]) for d in draws
    ]
    results = []
    for data in (draws, stale):
        policy = llama_policy(5).trainable_copy()
        results.append((make_trainer(policy).step(collate(data, max_tokens=999))[m.LOSS], weights(policy)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_flat_groups_are_counted_and_kept() -> None:
    prompt = make_prompt("p", (1, 3))
    flat = make_draw(prompt, [make_trajectory("p", (n, STOP), reward=0.4, ref_logp=-n) for n in (4, 5)])
    nearly = make_draw(prompt, [make_trajectory("p", (n, STOP), reward=0.95 + n * 1e-9, ref_logp=-2) for n in (3, 4)])
    other = make_draw(prompt, [make_trajectory("p", (n, STOP), reward=n / 3, ref_logp=-2.5) for n in (3, 5)])
    policy = llama_policy(5).trainable_copy()
    twin = policy.trainable_copy()
    found = make_trainer(policy).step(collate([flat, other, nearly], max_tokens=999))
    loss = slow_loss(twin, [flat, other, nearly])
    loss.backward()
    assert found[m.FLAT_GROUPS] == 2
    assert found[m.LOSS] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert gap(gradients(policy), gradients(twin)) < 1e-6


def test_a_batch_without_groups_of_two_moves_nothing() -> None:
    policy = wide_table(1)
    before = weights(policy)
    found = make_trainer(policy).step(collate(random_draws((1, 1)), max_tokens=7))
    assert (found[m.LOSS], found[m.GRAD_NORM], found[m.STEP], found[m.SKIPPED]) == (0.0, 0.0, 1, 0)
    assert same(before, weights(policy))


# ---- the optimizer ------------------------------------------------------------------------------


def test_two_steps_of_adamw_by_hand() -> None:
    rate, b1, b2, decay, clip = 0.03, 0.8, 0.9, 0.2, 0.05
    policy = wide_table(1)
    trainer = make_trainer(
        policy, learning_rate=rate, adam_betas=(b1, b2), weight_decay=decay, clip_norm=clip, warmup_steps=2
    )
    draws = random_draws((3, 2), longest=2)
    batch = collate(draws, max_tokens=999)
    theta = policy.model.logits.detach().double().clone()
    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    for step in (1, 2):
        twin = wide_table(9)
        with torch.no_grad():
            twin.model.logits.copy_(theta)
        slow_loss(twin, draws).backward()
        slope = twin.model.logits.grad.double()
        norm = float(slope.norm())
        assert norm > 2 * clip
        found = trainer.step(batch)
        assert found[m.GRAD_NORM] == pytest.approx(norm, rel=1e-4)  # before clipping
        clipped = policy.model.logits.grad.double()
        assert float((clipped - slope * clip / norm).abs().max()) < 1e-6
        slope = clipped  # where rows cancel, AdamW would magnify a rounding error of the twin
        lr = rate * step / 2  # warm-up of two steps
        theta = theta * (1 - lr * decay)
        first, second = b1 * first + (1 - b1) * slope, b2 * second + (1 - b2) * slope**2
        theta = theta - lr * (first / (1 - b1**step)) / ((second / (1 - b2**step)).sqrt() + 1e-8)
        assert float((policy.model.logits.detach() - theta).abs().max()) < 1e-5
        assert (found[m.LEARNING_RATE], found[m.BETA], found[m.STEP], found[m.VERSION]) == (lr, BETA, step, step)


def schedules(**changed: Any) -> Schedules:
    plain = {"steps": 20, "learning_rate": 1e-6, "schedule": "constant", "warmup_steps": 10, "beta": 0.5,
             "beta_final": None, "beta_steps": 0}  # fmt: skip
    return Schedules(**{**plain, **changed})


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        pytest.param("constant", {1: 1e-7, 5: 5e-7, 10: 1e-6, 11: 1e-6, 13: 1e-6, 20: 1e-6}, id="g05"),
        ("linear", {10: 1e-6, 11: 1e-6, 12: 9e-7, 16: 5e-7, 20: 1e-7, 21: 0.0, 30: 0.0}),
        ("cosine", {11: 1e-6, 16: 5e-7, 13: 0.5e-6 * (1 + math.cos(math.pi * 0.2)), 21: 0.0}),
    ],
)
def test_learning_rate_by_step(schedule: str, rates: dict[int, float]) -> None:
    found = schedules(schedule=schedule)
    assert {step: found.learning_rate_at(step) for step in rates} == pytest.approx(rates, abs=1e-15)


def test_learning_rate_without_warm_up_starts_at_its_peak() -> None:
    assert schedules(warmup_steps=0, schedule="linear").learning_rate_at(1) == 1e-6


@pytest.mark.parametrize(
    ("final", "steps", "betas"),
    [
        (None, 4, {1: 0.5, 9: 0.5}),
        (0.1, 4, {1: 0.5, 2: 0.4, 4: 0.2, 5: 0.1, 6: 0.1, 20: 0.1}),
        (0.9, 0, {1: 0.9, 7: 0.9}),
    ],
)
def test_beta_by_step(final: float | None, steps: int, betas: dict[int, float]) -> None:
    found = schedules(beta_final=final, beta_steps=steps)
    assert {step: found.beta_at(step) for step in betas} == pytest.approx(betas)


def test_a_step_uses_the_beta_of_its_schedule() -> None:
    policy = wide_table(1)
    settings = make_settings(objective={"beta": 2.0, "beta_final": BETA, "beta_steps": 1},
                             trainer={"learning_rate": 1e-9, "groups_per_step": 2, "steps": 4, "clip_norm": None})
    draws = random_draws((3, 2))
    trainer, batch = Trainer(policy, settings), collate(draws, max_tokens=999)
    assert trainer.step(batch)[m.BETA] == 2.0
    expected = float(slow_loss(policy, draws).detach())
    assert trainer.step(batch)[m.LOSS] == pytest.approx(expected, rel=1e-5)


# ---- steps that are not finite ------------------------------------------------------------------


def bad_draws() -> list[Draw]:
    """Rewards whose square overflows float32."""
    prompt = make_prompt("bad")
    return [make_draw(prompt, [make_trajectory("bad", (n, STOP), reward=n * 1e30) for n in (3, 5)])]


@pytest.mark.parametrize("max_tokens", [1, 999])
def test_a_bad_step_is_skipped_counted_and_leaves_no_trace(max_tokens: int) -> None:
    good, bad = collate(random_draws((3, 2)), max_tokens=999), collate(bad_draws(), max_tokens=max_tokens)
    policy = wide_table(1)
    trainer, twin = make_trainer(policy), make_trainer(wide_table(1))
    trainer.step(good)
    twin.step(good)
    before = weights(policy)
    found = trainer.step(bad)
    assert not math.isfinite(found[m.LOSS])
    assert (found[m.STEP], found[m.VERSION], found[m.SKIPPED]) == (2, 1, 1)
    assert (trainer.steps, trainer.version) == (2, 1)
    assert same(before, weights(policy))
    assert trainer.step(good)[m.SKIPPED] == 1
    twin.step(good)
    assert same(weights(policy), weights(twin.policy))  # the moments were not touched either


def test_too_many_bad_steps_in_a_row_end_the_run() -> None:
    trainer = make_trainer(wide_table(1), max_bad_steps=3)
    good, bad = collate(random_draws((2,)), max_tokens=999), collate(bad_draws(), max_tokens=999)
    for batch in (bad, bad, good, bad, bad):
        trainer.step(batch)
    with pytest.raises(TrainingFailedError, match=r"3 steps in a row up to step 6.*max_bad_steps = 3"):
        trainer.step(bad)


# ---- what it reports ----------------------------------------------------------------------------


def test_age_is_measured_when_consumed() -> None:
    policy = wide_table(1)
    trainer = make_trainer(policy)
    old = make_draw(make_prompt("p"), [make_trajectory("p", (n, STOP), version=0, reward=n / 9) for n in (3, 4, 5)])
    new = make_draw(make_prompt("q"), [make_trajectory("q", (n, STOP), version=2, reward=n / 9) for n in (3, 4)])
    batch = collate([old, new], max_tokens=999)  # made before the steps that age it
    trainer.step(collate([old], max_tokens=999))
    trainer.step(collate([old], max_tokens=999))
    found = trainer.step(batch)
    assert found[m.AGE_HISTOGRAM] == {"0": 2, "2": 3}
    assert found[m.AGE_MAX] == 2
    assert found[m.AGE_MEAN] == pytest.approx(6 / 5)


@pytest.mark.parametrize("max_tokens", [5, 999])
def test_metrics_of_what_was_consumed(max_tokens: int) -> None:
    policy = llama_policy(5)
    draws = random_draws((3, 4), seed=7)
    flat = [(d.prompt.tokens, t) for d in draws for t in d.trajectories]
    logps = policy.sequence_logps([(p, t.completion.tokens) for p, t in flat])
    lengths = [len(t.completion.tokens) for _, t in flat]
    gaps = [abs(lp - t.completion.logp) / n for lp, (_, t), n in zip(logps, flat, lengths, strict=True)
            if t.completion.version == 2]
    assert 0 < len(gaps) < 7
    residuals, log_zs = [], []
    for at, size in ((0, 3), (3, 4)):
        rows = range(at, at + size)
        ratio = [logps[n] - flat[n][1].ref_logp - flat[n][1].reward / BETA for n in rows]
        residuals += [r - math.fsum(ratio) / size for r in ratio]
        log_zs.append(-math.fsum(ratio) / size)
    trainer = make_trainer(policy.trainable_copy())
    trainer.version = trainer.steps = 2
    found = trainer.step(collate(draws, max_tokens=max_tokens))
    expected = {
        m.REWARD: np.mean([t.reward for _, t in flat]), m.LENGTH: np.mean(lengths),
        m.KL: np.mean([lp - t.ref_logp for lp, (_, t) in zip(logps, flat, strict=True)]),
        m.ENTROPY: -sum(logps) / sum(lengths), m.LOGP_GAP: max(gaps),
        m.TRAIN_TOKENS: sum(len(p) for p, _ in flat) + sum(lengths), m.FLAT_GROUPS: 0,
        m.RESIDUAL_MSE: np.mean(np.square(residuals)), m.LOG_Z: np.mean(log_zs),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert sum(Counter(found[m.AGE_HISTOGRAM]).values()) == 7
    json.loads(m.to_json(found))


def test_without_fresh_data_there_is_no_gap() -> None:
    draw = make_draw(make_prompt("p"), [make_trajectory("p", (n, STOP), version=4) for n in (3, 4)])
    assert make_trainer(wide_table(1)).step(collate([draw], max_tokens=99))[m.LOGP_GAP] is None


# ---- publishing, saving, loading ----------------------------------------------------------------


def test_a_publication_is_a_copy_with_its_digest() -> None:
    policy = wide_table(1)
    trainer, batch = make_trainer(policy), collate(random_draws((3,)), max_tokens=999)
    trainer.step(batch)
    published = trainer.publish(4)
    kept = {name: tensor.copy() for name, tensor in published.tensors.items()}
    assert (published.version, published.round, published.digest) == (1, 4, digest(weights(policy)))
    trainer.step(batch)
    assert same(kept, dict(published.tensors))
    assert trainer.publish(5).digest != published.digest


@pytest.mark.parametrize("make", [wide_table, llama_policy])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_after_save_and_load_is_bit_identical(make: Any, steps: int, tmp_path: Path) -> None:
    options = {"schedule": "linear", "warmup_steps": 2, "weight_decay": 0.1}
    trainer = make_trainer(make(1).trainable_copy(), **options)
    batches = [collate(random_draws((3, 2), seed=seed, longest=2), max_tokens=30) for seed in range(steps + 2)]
    for batch in batches[:steps]:
        trainer.step(batch)
    trainer.save(tmp_path)
    resumed = make_trainer(make(2).trainable_copy(), **options)
    resumed.load(tmp_path)
    assert (resumed.steps, resumed.version) == (steps, steps)
    for batch in batches[steps:]:
        ours, theirs = trainer.step(batch), resumed.step(batch)
        assert {**ours, m.STEP_SECONDS: 0} == {**theirs, m.STEP_SECONDS: 0}
    assert same(weights(trainer.policy), weights(resumed.policy))


def test_bad_steps_in_a_row_survive_a_checkpoint(tmp_path: Path) -> None:
    bad = collate(bad_draws(), max_tokens=99)
    trainer, resumed = make_trainer(wide_table(1), max_bad_steps=2), make_trainer(wide_table(2), max_bad_steps=2)
    trainer.step(bad)
    trainer.save(tmp_path)
    resumed.load(tmp_path)
    assert (resumed.steps, resumed.version) == (1, 0)
    with pytest.raises(TrainingFailedError):
        resumed.step(bad)
