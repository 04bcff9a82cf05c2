"""Moving references: what they become, re-scoring, what searchers get, and resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from support import (
    STOP,
    TEMPERATURE,
    llama_policy,
    make_draw,
    make_lease,
    make_prompt,
    make_settings,
    make_trajectory,
    random_draws,
    slow_logps,
    table_policy,
    wide_table,
)
from tba import assembly
from tba import metrics as m
from tba.batch import collate
from tba.policy import Policy, copy_out
from tba.reference import MovingReference
from tba.sections import ReferenceSettings
from tba.trainer import Trainer

BETA = 0.37
PROMPTS = [make_prompt("a", (1, 3)), make_prompt("b", (1, 4, 5))]
COMPLETIONS = ((5, STOP), (6, 3, STOP), (7, STOP), (3, 3, 3, STOP))


def filled(value: float) -> Policy:
    """A table whose logits all start from `value` and differ by row and column."""
    policy = table_policy(1)
    with torch.no_grad():
        logits = policy.model.logits
        logits.copy_(value + torch.arange(logits.numel(), dtype=torch.float32).reshape(logits.shape) / 1024)
    return policy


def logits_of(reference: MovingReference) -> torch.Tensor:
    return reference.state()["logits"].detach().clone()


def make_reference(policy: Policy, **settings: Any) -> MovingReference:
    return MovingReference(policy, ReferenceSettings(**settings))


# ---- what it becomes --------------------------------------------------------------------------------


def test_a_reset_copies_the_policy_at_multiples_only() -> None:
    start, policy = filled(0.0), filled(2.0)
    reference = make_reference(start, kind="reset", every=3)
    assert [reference.follow(policy, version) for version in (1, 2)] == [False, False]
    assert (reference.version, bool((logits_of(reference) == start.model.logits).all())) == (0, True)
    assert reference.follow(policy, 3)
    assert (reference.version, bool((logits_of(reference) == policy.model.logits).all())) == (3, True)
    assert not reference.follow(filled(5.0), 3)  # a version is taken in once
    assert bool((logits_of(reference) == policy.model.logits).all())


def test_an_average_has_known_answers() -> None:
    start = filled(0.0)
    reference = make_reference(start, kind="ema", every=2, decay=0.75)
    moved = [logits_of(reference) - start.model.logits.detach()]
    for version in (1, 2, 3, 4):
        reference.follow(filled(4.0 if version < 3 else 8.0), version)
        moved.append(logits_of(reference) - start.model.logits.detach())
    # 0.75 x 0 + 0.25 x 4 = 1 at version 2; 0.75 x 1 + 0.25 x 8 = 2.75 at version 4
    expected = [0.0, 0.0, 1.0, 1.0, 2.75]
    assert [float(x.mean()) for x in moved] == pytest.approx(expected, abs=1e-5)
    assert reference.version == 4


def test_the_start_policy_does_not_move_with_the_reference_or_the_trained_policy() -> None:
    start = filled(0.0)
    before = start.model.logits.detach().clone()
    trained = start.trainable_copy()
    reference = make_reference(trained, kind="ema", decay=0.5)
    with torch.no_grad():
        trained.model.logits.add_(1.0)
    assert bool((logits_of(reference) == before).all())
    reference.follow(trained, 1)
    assert bool((start.model.logits == before).all())


def test_a_fixed_reference_holds_no_model_and_scores_nothing_again() -> None:
    reference = make_reference(table_policy(1), kind="fixed")
    batch = collate(random_draws((2, 3)), max_tokens=99)
    assert reference.state() == {}
    assert not reference.follow(wide_table(2), 3)
    found = reference.rescore(batch)
    assert (found.batch, found.count, reference.tensors()) == (batch, 0, None)


# ---- re-scoring -------------------------------------------------------------------------------------


def mixed_batch(max_tokens: int) -> Any:
    """Two groups of four: half of the trajectories scored by reference 0, half by reference 6."""
    draws = [
        make_draw(prompt, [
            dataclasses.replace(make_trajectory(prompt.id, ids, reward=0.1 * n, ref_logp=-50.0 - n),
                                ref_version=6 * (n % 2), ref_logps=tuple((-50.0 - n) / len(ids) for _ in ids))
            for n, ids in enumerate(COMPLETIONS)
        ])
        for prompt in PROMPTS
    ]  # fmt: skip
    return collate(draws, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [999, 30, 8])
def test_only_what_an_older_reference_scored_is_scored_again(max_tokens: int) -> None:
    policy = llama_policy(4)
    reference = make_reference(llama_policy(3), kind="reset", every=6)
    reference.follow(policy, 6)
    batch = mixed_batch(max_tokens)
    found = reference.rescore(batch)
    assert found.count == 4
    expected = {
        (prompt.id, ids): float(sum(slow_logps(policy, prompt.tokens, ids)).detach()) if n % 2 == 0 else -50.0 - n
        for prompt in PROMPTS for n, ids in enumerate(COMPLETIONS)
    }
    order = list(expected.values())
    seen = []
    for before, after in zip(batch.micro_batches, found.batch.micro_batches, strict=True):
        assert bool((after.ref_version_N == 6).all())
        for group in after.group_N.unique().tolist():
            logps = after.ref_logp_N[after.group_N == group].tolist()
            assert logps == pytest.approx(order[4 * group : 4 * group + 4], abs=1e-4)
            assert after.ref_logps_NT[after.group_N == group].sum(-1).tolist() == pytest.approx(logps, abs=1e-4)
            seen.append(group)
        assert bool((before.reward_N == after.reward_N).all())
    assert sorted(seen) == [0, 1]
    assert reference.rescore(found.batch).count == 0


def moving_trainer(policy: Policy, trainer: dict[str, Any] | None = None, **reference: Any) -> Trainer:
    settings = make_settings(
        objective={"beta": BETA}, reference=reference,
        trainer={"learning_rate": 0.05, "clip_norm": None, **(trainer or {})},
    )
    return Trainer(policy, settings)


def test_right_after_a_reset_kl_is_zero_and_only_rewards_pull() -> None:
    policy = wide_table(2).trainable_copy()
    trainer = moving_trainer(policy, kind="reset", every=2)
    batch = mixed_batch(999)
    first, second, third, fourth = (trainer.step(batch) for _ in range(4))
    assert [s[m.REF_VERSION] for s in (first, second, third, fourth)] == [0, 0, 2, 2]
    assert [s[m.RESCORED] for s in (first, second, third, fourth)] == [4, 4, 8, 8]
    assert first[m.KL] != pytest.approx(0.0, abs=0.1)
    assert third[m.KL] == pytest.approx(0.0, abs=1e-5)  # the policy was made the reference a moment ago
    assert fourth[m.KL] != pytest.approx(0.0, abs=1e-3)
    # logZ^ = mean(r) / beta there: l = 0. Rewards are 0, 0.1, 0.2, 0.3.
    assert third[m.LOG_Z] == pytest.approx(0.15 / BETA, abs=1e-4)


@pytest.mark.parametrize("resets", [False, True])
def test_the_optimizer_forgets_with_the_reference_only_when_told(resets: bool) -> None:
    """After a reset AdamW's first step has size lr in every coordinate; with moments kept it has not."""
    rate = 0.05
    policy = wide_table(2).trainable_copy()
    trainer = moving_trainer(policy, {"adam_betas": (0.9, 0.999)}, kind="reset", every=3, reset_optimizer=resets)
    batches = [collate(random_draws((3, 3), seed=seed, longest=2), max_tokens=99) for seed in range(4)]
    for batch in batches[:3]:
        trainer.step(batch)
    before = policy.model.logits.detach().clone()
    trainer.step(batches[3])
    moved = (policy.model.logits.detach() - before).abs()
    slope = policy.model.logits.grad
    assert slope is not None
    steep = moved[slope.abs() > 1e-4]
    assert len(steep) > 5
    assert bool(((steep - rate).abs() < 1e-4).all()) is resets


def test_a_bad_step_moves_no_reference() -> None:
    trainer = moving_trainer(wide_table(2).trainable_copy(), kind="reset", every=1)
    bad = collate([make_draw(PROMPTS[0], [make_trajectory("a", c, reward=3e38) for c in COMPLETIONS])], max_tokens=99)
    found = trainer.step(bad)
    assert (found[m.SKIPPED], trainer.publish(0).ref_version) == (1, 0)


# ---- searchers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{"kind": "reset", "every": 2}, {"kind": "ema", "decay": 0.4}])
def test_a_searcher_scores_with_the_reference_that_was_published(kind: dict[str, Any]) -> None:
    settings = make_settings(
        model="new-table", engine={"name": "table"}, architecture={"positions": 4}, reference=kind,
        policy={"temperature": TEMPERATURE}, task={"name": "enumerable", "symbols": 8}, seed=3,
        search={"num_samples": 8, "max_new_tokens": 2}, trainer={"learning_rate": 0.5, "clip_norm": None},
    )
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    searcher = assembly.make_searcher(settings, task, policy, "searcher-0")
    trainer = Trainer(policy.trainable_copy(), settings)
    searcher.adopt(trainer.publish(0))
    (first,) = searcher.search([make_lease(make_prompt("q", (1, 3)))])
    assert {t.ref_version for t in first.trajectories} == {0}
    for _ in range(2):
        trainer.step(collate([make_draw(first.prompt, first.trajectories)], max_tokens=999))
    published = trainer.publish(1)
    searcher.adopt(published)
    (group,) = searcher.search([make_lease(make_prompt("q", (1, 3)), 1)])
    assert published.reference is not None
    reference = policy.frozen_copy()
    reference.load(published.reference)
    for trajectory in group.trajectories:
        ids = trajectory.completion.tokens
        assert trajectory.ref_version == 2
        assert trajectory.ref_logp == pytest.approx(float(sum(slow_logps(reference, (1, 3), ids)).detach()), abs=1e-4)
        assert trajectory.ref_logp != pytest.approx(float(sum(slow_logps(policy, (1, 3), ids)).detach()), abs=1e-4)
    draws = [make_draw(group.prompt, group.trajectories)]
    found = trainer.step(collate(draws, max_tokens=999))
    assert (found[m.RESCORED], found[m.REF_VERSION]) == (0, 2)


def test_a_reference_is_copied_for_publication_once_a_version_and_does_not_change_afterwards() -> None:
    trainer = moving_trainer(wide_table(2).trainable_copy(), kind="reset", every=2)
    batch = mixed_batch(999)
    trainer.step(batch)
    assert trainer.publish(0).reference is None
    trainer.step(batch)
    first, again = trainer.publish(1), trainer.publish(1)
    assert first.reference is again.reference is not None
    kept = {name: value.copy() for name, value in first.reference.items()}
    for _ in range(2):
        trainer.step(batch)
    assert all((first.reference[name] == kept[name]).all() for name in kept)
    second = trainer.publish(2)
    assert second.ref_version == 4
    assert second.reference is not None
    assert any((second.reference[name] != kept[name]).any() for name in kept)


def test_policy_and_reference_share_one_temperature() -> None:
    policy = wide_table(2, temperature=0.6)
    trainer = moving_trainer(policy.trainable_copy(), kind="reset", every=1)
    trainer.step(mixed_batch(999))
    hot = dataclasses.replace(policy, temperature=1.3)
    for made in (policy.frozen_copy(), policy.without_adapter(), policy.trainable_copy()):
        assert made.temperature == 0.6
        pairs = [(PROMPTS[0].tokens, COMPLETIONS[1])]
        assert made.sequence_logps(pairs) == policy.sequence_logps(pairs) != hot.sequence_logps(pairs)
    assert trainer.step(mixed_batch(999))[m.KL] == pytest.approx(0.0, abs=1e-5)  # only at one temperature


# ---- resume -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2, 3])
@pytest.mark.parametrize("kind", [
    {"kind": "reset", "every": 2, "reset_optimizer": True}, {"kind": "reset", "every": 3},
    {"kind": "ema", "decay": 0.9},
])
def test_a_step_after_save_and_load_is_bit_identical(kind: dict[str, Any], steps: int, tmp_path: Path) -> None:
    trainer = moving_trainer(llama_policy(1).trainable_copy(), **kind)
    batches = [collate(random_draws((3, 2), seed=seed, longest=2), max_tokens=30) for seed in range(steps + 3)]
    for batch in batches[:steps]:
        trainer.step(batch)
    trainer.save(tmp_path)
    resumed = moving_trainer(llama_policy(2).trainable_copy(), **kind)
    resumed.load(tmp_path)
    for batch in batches[steps:]:
        ours, theirs = trainer.step(batch), resumed.step(batch)
        clocks = {m.STEP_SECONDS: 0, m.RESCORE_SECONDS: 0}
        assert {**ours, **clocks} == {**theirs, **clocks}
    ours, theirs = trainer.publish(1), resumed.publish(1)
    assert ours.digest == theirs.digest
    assert ours.ref_version == theirs.ref_version
    assert ours.reference is not None
    assert theirs.reference is not None
    assert all((ours.reference[name] == theirs.reference[name]).all() for name in ours.reference)
    assert set(copy_out(trainer.policy.model)) == set(ours.reference)
