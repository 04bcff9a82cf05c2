"""Leases: the order of prompts, who holds them, and the pace of search and training."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers import a_prompt
from tba.leases import Leases, Pace, completion_seed
from tba.records import Lease

PACE = Pace(first=7, per_round=3)


def leases_of(count: int, *, seed: int = 5, pace: Pace = PACE) -> Leases:
    return Leases([a_prompt(f"p{n}") for n in range(count)], seed=seed, pace=pace)


def ids(leases: list[Lease]) -> list[str]:
    return [lease.prompt.id for lease in leases]


def take_all(leases: Leases, count: int) -> list[Lease]:
    """The next `count` leases, each answered."""
    taken: list[Lease] = []
    while len(taken) < count:
        (lease,) = leases.take(1)
        assert leases.deliver(lease.number, lease.attempt)
        taken.append(lease)
    return taken


def again(leases: Leases, count: int, *, seed: int = 5) -> Leases:
    """What a restart makes of `leases`: through JSON, as on disk."""
    other = leases_of(count, seed=seed)
    other.restore(json.loads(json.dumps(leases.state())))
    return other


# ---- order -----------------------------------------------------------------------------------------


def test_each_pass_is_a_permutation_and_passes_differ():
    taken = take_all(leases_of(11), 44)
    passes = [ids(taken[at : at + 11]) for at in range(0, 44, 11)]
    assert all(sorted(p) == sorted(f"p{n}" for n in range(11)) for p in passes)
    assert len({tuple(p) for p in passes}) == 4
    assert [lease.visit for lease in taken] == [n // 11 for n in range(44)]
    assert [lease.number for lease in taken] == list(range(44))


def test_the_order_is_a_function_of_the_seed():
    one, same, other = (ids(take_all(leases_of(11, seed=s), 33)) for s in (5, 5, 6))
    assert one == same
    assert one != other


def test_interrupted_and_restored_hands_out_what_the_uninterrupted_run_does():  # case g01
    whole = take_all(leases_of(100), 80)
    first = leases_of(100)
    before = take_all(first, 40)
    after = take_all(again(first, 100), 40)
    assert before + after == whole


def test_a_restart_in_the_second_pass_goes_on_in_that_pass():  # case g02
    whole = take_all(leases_of(8), 24)
    first = leases_of(8)
    take_all(first, 13)
    assert take_all(again(first, 8), 11) == whole[13:]


def test_fewer_prompts_than_a_round_wants_are_visited_again():  # case d07
    taken = leases_of(3, pace=Pace(first=8, per_round=8)).take(8)
    assert len(taken) == 8
    assert Counter(lease.visit for lease in taken) == {0: 3, 1: 3, 2: 2}
    assert len({(lease.prompt.id, lease.visit) for lease in taken}) == 8


def test_no_prompts_at_all_are_refused():
    with pytest.raises(ValueError, match="0 training prompts"):
        leases_of(0)


# ---- pace ------------------------------------------------------------------------------------------


def test_pace_counts_a_first_round_of_another_size():
    assert [PACE.before(r) for r in range(4)] == [0, 7, 10, 13]
    assert [PACE.round_of(n) for n in (0, 6, 7, 9, 10, 12, 13)] == [0, 0, 1, 1, 2, 2, 3]
    assert all(PACE.before(PACE.round_of(n)) <= n < PACE.before(PACE.round_of(n) + 1) for n in range(60))


def test_training_of_a_round_needs_all_its_prompts_delivered():
    assert not PACE.may_train(0, 6)
    assert PACE.may_train(0, 7)
    assert not PACE.may_train(2, 12)
    assert PACE.may_train(2, 13)


@pytest.mark.parametrize(("lead", "allowed"), [(0, [4]), (2, [4, 5, 6]), (None, [4, 5, 6, 7, 8, 9])])
def test_the_lead_bounds_the_rounds_beyond_the_newest_publication(lead, allowed):
    pace = Pace(first=7, per_round=3, lead=lead)
    assert [r for r in range(4, 10) if pace.may_search(r, 4)] == allowed


def test_after_a_restart_the_lead_allows_what_it_did_before():  # case g07
    pace = Pace(first=8, per_round=8, lead=2)
    leases = leases_of(50, pace=pace)
    leases.restore({"next": pace.before(100), "delivered": pace.before(100), "lost": 0, "open": [], "again": []})
    allowed = 0
    while pace.may_search(leases.next_round, 100):
        allowed += len(leases.take(5))
    assert allowed == 24


def test_take_never_spans_rounds():
    leases = leases_of(30)
    sizes = [len(leases.take(5)) for _ in range(6)]
    assert sizes == [5, 2, 3, 3, 3, 3]
    leases = leases_of(30)
    (early,) = leases.take(1)
    leases.take(6)
    leases.take(3)
    leases.give_back([early])
    retaken = leases.take(5)
    assert [(lease.number, lease.round) for lease in retaken] == [(0, 0)]
    assert [lease.round for lease in leases.take(5)] == [2, 2, 2]


# ---- fates -----------------------------------------------------------------------------------------


def test_a_prompt_given_back_is_handed_out_again_one_attempt_higher():
    leases = leases_of(20)
    taken = leases.take(5)
    assert leases.give_back([taken[3], taken[1]]) == [taken[3], taken[1]]
    first, second = leases.take(2)
    for lease, old in ((first, taken[1]), (second, taken[3])):
        assert (lease.prompt, lease.visit, lease.number, lease.round) == (old.prompt, old.visit, old.number, old.round)
        assert lease.attempt == old.attempt + 1 == 1
    leases.give_back([first])
    assert leases.take(1)[0].attempt == 2
    assert leases.ledger() == {"leased": 8, "delivered": 0, "open": 5, "lost": 3}


def test_late_and_doubled_deliveries_are_refused():
    leases = leases_of(20)
    one, two = leases.take(2)
    assert leases.deliver(one.number, one.attempt)
    assert not leases.deliver(one.number, one.attempt)
    leases.give_back([two])
    assert not leases.deliver(two.number, two.attempt)
    (retaken,) = leases.take(1)
    assert not leases.deliver(two.number, two.attempt)
    assert leases.deliver(retaken.number, retaken.attempt)
    assert not leases.deliver(99, 0)
    assert leases.ledger() == {"leased": 3, "delivered": 2, "open": 0, "lost": 1}


def test_giving_back_what_is_not_open_changes_nothing():
    leases = leases_of(20)
    (lease,) = leases.take(1)
    leases.deliver(lease.number, lease.attempt)
    assert leases.give_back([lease]) == []
    assert leases.ledger() == {"leased": 1, "delivered": 1, "open": 0, "lost": 0}
    assert leases.take(1)[0].number == 1


def test_a_lease_that_somebody_else_holds_by_now_is_not_given_back():
    leases = leases_of(20)
    (old,) = leases.take(1)
    leases.give_back([old])
    (retaken,) = leases.take(1)
    assert leases.give_back([old]) == []
    assert leases.deliver(retaken.number, retaken.attempt)
    assert leases.ledger() == {"leased": 2, "delivered": 1, "open": 0, "lost": 1}


def test_a_restart_hands_open_prompts_out_again_as_new_attempts():  # case d08
    leases = leases_of(20)
    taken = leases.take(4)
    leases.deliver(taken[0].number, 0)
    leases.give_back([taken[2]])
    restored = again(leases, 20)
    assert restored.ledger() == {"leased": 4, "delivered": 1, "open": 0, "lost": 3}
    retaken = restored.take(3)
    assert [(lease.number, lease.attempt) for lease in retaken] == [(1, 1), (2, 1), (3, 1)]
    assert restored.take(3)[0].number == 4
    assert not restored.deliver(taken[1].number, taken[1].attempt)
    seeds = {completion_seed(0, lease.prompt.id, lease.visit, lease.attempt) for lease in [*taken[1:], *retaken]}
    assert len(seeds) == 6


STEPS = st.lists(
    st.tuples(st.sampled_from("tttddgr"), st.integers(1, 6), st.randoms(use_true_random=False)), max_size=40
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(STEPS)
def test_any_sequence_keeps_the_ledger_and_never_loses_a_prompt(steps):
    leases = leases_of(6)
    out: list[Lease] = []
    answered: set[int] = set()
    leased = delivered = lost = 0
    for what, count, dice in steps:
        chosen = dice.sample(out, min(count, len(out)))
        if what == "t":
            taken = leases.take(count)
            assert 1 <= len(taken) <= count
            assert len({lease.round for lease in taken}) == 1
            leased += len(taken)
            out, chosen = out + taken, []
        elif what == "d":
            for lease in chosen:
                assert leases.deliver(lease.number, lease.attempt) is True
                assert lease.number not in answered
                answered.add(lease.number)
            delivered += len(chosen)
        elif what == "g":
            leases.give_back(chosen)
            lost += len(chosen)
        else:
            leases, lost, chosen = again(leases, 6), lost + len(out), out[:]
        out = [lease for lease in out if lease not in chosen]
        assert leases.ledger() == {"leased": leased, "delivered": delivered, "open": len(out), "lost": lost}
        assert leased == delivered + len(out) + lost
        assert len({lease.number for lease in out}) == len(out)
    for lease in out:
        leases.deliver(lease.number, lease.attempt)
        answered.add(lease.number)
    highest = max(answered, default=-1)
    while len(answered) < highest + 1:
        (lease,) = leases.take(1)
        assert leases.deliver(lease.number, lease.attempt)
        answered.add(lease.number)
    assert answered == set(range(len(answered)))


# ---- seeds of completions --------------------------------------------------------------------------


def test_completion_seed_depends_on_each_of_its_arguments():
    found = {
        completion_seed(*given) for given in
        [(3, "p", 2, 1), (4, "p", 2, 1), (3, "q", 2, 1), (3, "p", 5, 1), (3, "p", 2, 0), (3, "p", "evaluation", 1),
         (32, "p", 1, 1), (3, "p2", 1, 1), (3, "p", 21, 0), (3, "p", 2, 10), (3, "p\ud800", 2, 1)]
    }
    assert len(found) == 11
    assert all(0 <= seed < 2**64 for seed in found)


def test_completion_seed_is_the_same_on_every_machine_and_in_every_version():
    # First eight bytes, little end first, of sha256("3 NUL p-é NUL 2 NUL 1").
    assert completion_seed(3, "p-é", 2, 1) == 17824397869915441818
    assert completion_seed(0, "a", "evaluation") == 6039547279612680591
