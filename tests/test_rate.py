"""Rate: how many groups are consumed per prompt delivered, at most and at least, whoever is faster."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers import a_prompt, settings_with
from tba import assembly
from tba import metrics as m
from tba.leases import Leases, Pace
from tba.simulation import Call, Fixed, Simulation

# ---- by counting ---------------------------------------------------------------------------------


def test_most_delivered_counts_the_rounds_that_the_lead_lets_go():
    pace = Pace(first=9, per_round=6, lead=2)
    assert [pace.most_delivered(p) for p in range(4)] == [21, 27, 33, 39]  # 9 + 6 x (p + 2)
    assert Pace(first=9, per_round=6, lead=0).most_delivered(0) == 9
    assert Pace(first=9, per_round=6).most_delivered(5) is None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    per_round=st.integers(1, 5), more=st.integers(0, 7), lead=st.none() | st.integers(0, 3), sync=st.integers(1, 4),
    groups=st.integers(1, 4), prefers_search=st.lists(st.booleans(), min_size=1, max_size=120),
)
def test_somebody_may_always_go_on_and_reuse_stays_between_its_bounds(
    per_round: int, more: int, lead: int | None, sync: int, groups: int, prefers_search: list[bool]
) -> None:
    # k G groups are consumed for the P prompts of a round: reuse = k G / P. Round 0 has F = P + more prompts.
    first, reuse = per_round + more, sync * groups / per_round
    pace = Pace(first=first, per_round=per_round, lead=lead)
    leases, steps = Leases([a_prompt("a"), a_prompt("b")], seed=0, pace=pace), 0
    for wants_search in prefers_search:
        published = steps // sync
        may_search = pace.may_search(leases.next_round, published)
        may_train = pace.may_train(published, leases.delivered)
        assert may_search or may_train
        if may_search and (wants_search or not may_train):
            (lease,) = leases.take(1)
            leases.deliver(lease.number, lease.attempt)
        else:
            steps += 1
        published, consumed, delivered = steps // sync, steps * groups, leases.delivered
        assert consumed <= reuse * delivered + 1e-9
        most = pace.most_delivered(published)
        if most is not None:
            assert delivered <= most
            if published:
                least = reuse * published / (published + lead + first / per_round)
                assert consumed / delivered >= least - 1e-9


# ---- on the simulated clock ----------------------------------------------------------------------

# G = 4 groups of K = 3 a step, k = 3 steps a round, reuse 2: P = 4 x 3 / 2 = 6 prompts of S = 5 a round; 45 to begin
# with: F = 9 prompts. In trajectories, consumed over inserted is at most 2 x 3 / 5 = 1.2; nothing is unscored.


def trajectories(lead: int | None, search_s: float, step_s: float, count: int) -> list[tuple[Call, int, int, int]]:
    """The first `count` calls: each with rounds published, trajectories consumed and trajectories inserted by then."""
    chosen = settings_with(
        seed=3, async_={"lead": lead}, search={"searchers": 2, "num_samples": 5, "batch_prompts": 2},
        buffer={"reuse": 2.0, "initial": 45, "mix": {"uniform": 1.0}},
        trainer={"steps": 6, "groups_per_step": 4, "group_size": 3, "sync_every": 3},
    )
    task = assembly.make_task_of(chosen)
    policy = assembly.make_policy(chosen, task)
    simulated = Simulation(
        chosen, assembly.make_questions(chosen, task, policy), policy, Fixed({"search": search_s, "step": step_s})
    )
    found: list[tuple[Call, int, int, int]] = []
    published = -1
    for call in islice(simulated.calls(), count):
        published = call.result.round if call.name == "store" else published
        buffer: Any = simulated.depot.buffer
        found.append((call, published, buffer.consumed, buffer.inserted))
    assert max(p for _, p, _, _ in found) >= 4
    return found


def test_fast_searchers_wait_at_the_least_reuse():
    found = trajectories(2, search_s=0.01, step_s=1, count=240)
    for _, published, consumed, inserted in found:
        # 5 x (9 + 6 x (p + 2)) = 105 + 30 p inserted at most, 3 x 4 x 3 x p = 36 p consumed at least.
        assert inserted <= 105 + 30 * published
        assert consumed >= 36 * published
    ends = {p: max(inserted for _, q, _, inserted in found if q == p) for p in range(4)}
    assert ends == {0: 105, 1: 135, 2: 165, 3: 195}  # it is reached: the bound is no looser than it must be
    # p = 3: at least 108 / 195 = 0.55 of 1.2; after 200 rounds 7200 / 6105 = 1.18.


def test_without_a_lead_fast_searchers_never_wait():
    found = trajectories(None, search_s=0.2, step_s=1, count=700)
    assert max(inserted - 30 * published for _, published, _, inserted in found) > 3 * 105


@pytest.mark.parametrize("lead", [0, 2, None])
def test_slow_searchers_make_the_trainer_wait_at_reuse(lead: int | None):
    found = trajectories(lead, search_s=1, step_s=0.01, count=260)
    draws = [(consumed, inserted) for call, _, consumed, inserted in found if call.name == "draw"]
    assert all(consumed <= 1.2 * inserted + 1e-9 for consumed, inserted in draws)
    # After round 1: 72 consumed, 5 x (9 + 6) = 75 inserted, and no more if nobody searches ahead.
    assert max(consumed / inserted for consumed, inserted in draws) > 1.0


# ---- searchers so far ahead that what they sampled is too old -------------------------------------


@pytest.mark.parametrize("search_s", [1, 9])
@pytest.mark.parametrize("lead", [0, 1, 3, None])
@pytest.mark.parametrize(("sync", "bounds"), [
    (1, {"max_age": 0}), (2, {"max_age": 1}), (2, {"max_age": 2}), (1, {"mix": {"recent": 1.0}}),
    (2, {"mix": {"recent": 1.0}, "recent_age": 1}),
])
def test_the_least_ages_that_are_accepted_never_stop_a_run(
    sync: int, bounds: dict[str, Any], lead: int | None, search_s: float
) -> None:
    # max_age = sync_every - 1: only what the newest publication sampled may be drawn. Searchers that are far ahead
    # have nothing of that kind in the buffer when a round begins; the draw waits for what they search next.
    chosen = settings_with(
        seed=3, async_={"lead": lead}, search={"num_samples": 5, "batch_prompts": 2},
        buffer={"mix": {"uniform": 1.0}, **bounds},
        trainer={"steps": 8, "groups_per_step": 2, "group_size": 3, "sync_every": sync},
    )
    task = assembly.make_task_of(chosen)
    policy = assembly.make_policy(chosen, task)
    questions = assembly.make_questions(chosen, task, policy)
    simulated = Simulation(chosen, questions, policy, Fixed({"search": search_s, "step": 3}))
    steps = [call.result for call in islice(simulated.calls(), 150) if call.name == "step"]
    assert len(steps) >= 5
    oldest = chosen.recent_age if "mix" in bounds else bounds["max_age"]
    assert all(max(map(int, step[m.AGE_HISTOGRAM])) <= oldest for step in steps)
    assert [step[m.STEP] for step in steps] == list(range(1, len(steps) + 1))
