"""The depot: what becomes of each delivery, and that a saved one goes on as if never stopped."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from makers import a_completion, a_group, a_prompt, an_answer, balances, settings_with
from tba import metrics as m
from tba.buffer.entries import EmptyBufferError
from tba.depot import KEPT_DIGESTS, Depot, make_buffer
from tba.records import Completion, Group, Lease, Trajectory, Unscored

SETTINGS = settings_with(
    seed=11, search={"num_samples": 3, "batch_prompts": 4},
    buffer={"mix": {"recent": 0.5, "reward": 0.2, "uniform": 0.3}, "capacity": 90, "capacity_per_prompt": 12},
    trainer={"steps": 12, "groups_per_step": 2, "group_size": 2, "sync_every": 3},
)
PROMPTS = [a_prompt(f"p{n}") for n in range(5)]


def a_depot(**more: Any) -> Depot:
    return Depot(PROMPTS, SETTINGS, lead=None, **more)


def answer(lease: Lease, **more: Any) -> Any:
    """Three completions with ids that no other lease gives."""
    return an_answer(lease, tokens=[(10 + lease.number, *[3] * n, 2) for n in range(3)], **more)


def searched(depot: Depot, round_: int, version: int) -> None:
    for lease in depot.take(round_):
        assert depot.deliver(answer(lease, version=version)) == ""


# ---- fates of deliveries ---------------------------------------------------------------------------


def test_take_hands_out_whole_rounds_and_nothing_beyond():
    depot = a_depot()
    assert [lease.number for lease in depot.take(0)] == list(range(6))
    assert depot.take(0) == []
    assert [lease.number for lease in depot.take(2)] == list(range(6, 18))


def test_the_first_round_is_as_large_as_buffer_initial_asks():
    buffer = SETTINGS.buffer.model_copy(update={"initial": 50})
    depot = Depot(PROMPTS, SETTINGS.model_copy(update={"buffer": buffer}), lead=4)
    assert len(depot.take(0)) == 17  # 50 completions, 3 a prompt
    assert len(depot.take(1)) == 6
    assert depot.pace.lead == 4


def test_a_wrong_digest_is_rejected_and_counted_with_its_tokens():
    depot = a_depot()
    depot.expect(0, "right")
    first, second = depot.take(0)[:2]
    assert depot.deliver(answer(first, digest="blank")) == "wrong weights"
    assert depot.deliver(answer(second, digest="right")) == ""
    assert len(depot.buffer) == 3
    assert depot.ledger()["trajectories"]["rejected"] == {"wrong weights": 3}
    assert depot.ledger()["tokens"]["rejected"] == {"wrong weights": answer(first).num_tokens}
    assert depot.ledger()["prompts"] == {"leased": 6, "delivered": 2, "open": 4, "lost": 0}
    assert balances(depot.ledger())


def test_a_digest_is_expected_of_its_own_version():
    depot = a_depot()
    depot.expect(0, "zero")
    depot.expect(3, "three")
    leases = depot.take(0)
    assert depot.deliver(answer(leases[0], version=0, digest="three")) == "wrong weights"
    assert depot.deliver(answer(leases[1], version=3, digest="zero")) == "wrong weights"
    assert depot.deliver(answer(leases[2], version=3, digest="three")) == ""


def test_digests_of_the_newest_publications_are_remembered():
    depot = a_depot()
    for version in range(KEPT_DIGESTS + 2):
        depot.expect(version, f"digest {version}")
    leases = depot.take(0)
    assert depot.deliver(answer(leases[0], version=2, digest="blank")) == "wrong weights"
    assert depot.deliver(answer(leases[1], version=KEPT_DIGESTS + 1, digest="blank")) == "wrong weights"
    assert depot.deliver(answer(leases[2], version=1, digest="blank")) == ""


def test_late_and_doubled_groups_are_rejected():
    depot = a_depot()
    lease, doubled = depot.take(0)[:2]
    depot.leases.give_back([lease])
    assert depot.deliver(answer(lease)) == "late"
    assert depot.deliver(answer(doubled)) == ""
    assert depot.deliver(answer(doubled)) == "late"
    (retaken,) = depot.take(0)
    assert depot.deliver(answer(retaken)) == ""
    assert depot.ledger()["trajectories"] == {
        "delivered": 12, "in_buffer": 6, "evicted": {}, "rejected": {"late": 6}
    }
    assert depot.ledger()["prompts"] == {"leased": 7, "delivered": 2, "open": 4, "lost": 1}


def test_groups_of_an_older_attempt_are_rejected_and_do_not_close_the_lease(tmp_path: Path):
    depot = a_depot()
    lease = depot.take(0)[0]
    depot.save(tmp_path)
    resumed = a_depot()
    resumed.load(tmp_path)
    assert resumed.attempt == 1
    (retaken, *_) = resumed.take(0)
    assert resumed.deliver(answer(lease)) == "older attempt"
    assert resumed.deliver(answer(retaken)) == "older attempt"  # right lease, sampled before the restart
    assert resumed.deliver(answer(retaken, run_attempt=1)) == ""
    assert resumed.ledger()["trajectories"]["rejected"] == {"older attempt": 6}
    assert balances(resumed.ledger())


def test_unscored_completions_are_counted_by_reason_and_in_the_metrics():
    depot = a_depot()
    leases = depot.take(0)
    lost = tuple(Unscored(completion=a_completion((8, 8, 8, 2)), reason=r) for r in ("timeout", "none", "timeout"))
    depot.deliver(answer(leases[0], unscored=lost))
    depot.deliver(answer(leases[1]))
    _, found = depot.draw(0)
    assert found[m.UNSCORED] == 3
    assert found[m.DELIVERED_TOKENS] == sum(answer(lease).num_tokens for lease in leases[:2]) + 12
    assert found[m.INSERTED] == found[m.BUFFER_SIZE] == 6
    assert depot.ledger()["trajectories"]["rejected"] == {"unscored: timeout": 2, "unscored: none": 1}
    assert balances(depot.ledger())


def test_the_metrics_of_a_draw_are_those_of_the_buffer_and_of_what_came_since_the_last():
    depot = a_depot()
    searched(depot, 0, 0)
    draws, found = depot.draw(0)
    assert [len(draw.trajectories) for draw in draws] == [2, 2]
    assert (found[m.BUFFER_SIZE], found[m.BUFFER_PROMPTS], found[m.INSERTED]) == (18, 5, 18)
    assert found[m.REUSE] == pytest.approx(4 / 18)
    assert found[m.SEARCH_REWARD] == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    assert found[m.DRAWN_BY] == dict(Counter(draw.sampler for draw in draws))
    assert found[m.USES_MEAN] == 0.0
    again, found = depot.draw(1)
    assert found[m.USES_MEAN] == pytest.approx(sum(u for draw in again for u in draw.uses) / 4)
    assert found[m.REUSE] == pytest.approx(8 / 18)
    assert found[m.SEARCH_REWARD] != found[m.SEARCH_REWARD]  # NaN: nothing came
    assert found[m.SEARCH_KL] != found[m.SEARCH_KL]


def test_the_kl_of_what_came_is_that_of_the_policy_whatever_it_was_sampled_from():
    # the policy gives 1/4, 3/4 and the reference 1/2, 1/2: KL = 1/4 log(1/2) + 3/4 log(3/2) = 0.130812; sampled as
    # often as the proposal (1/2, 1/2) would, weights 1/2 and 3/2 must bring that back
    depot = a_depot()
    (lease,) = depot.leases.take(1)
    drawn = [
        Trajectory(prompt_id=lease.prompt.id, reward=0.0, ref_logp=math.log(0.5), completion=Completion(
            tokens=(ids, 2), text="", logps=(math.log(p), 0.0), behaviour_logps=(math.log(0.5), 0.0), version=0,
            finish="stop",
        ))
        for ids, p in ((4, 0.25), (5, 0.75))
    ]
    depot.deliver(Group(prompt=lease.prompt, trajectories=tuple(drawn), number=lease.number, attempt=lease.attempt))
    assert depot.draw(0)[1][m.SEARCH_KL] == pytest.approx(0.130812, abs=1e-6)


def test_a_draw_from_nothing_says_what_was_delivered():
    depot = a_depot()
    depot.take(0)
    with pytest.raises(EmptyBufferError, match=r"no prompt has 2 .* delivered 0"):
        depot.draw(0)


def test_fewer_prompts_than_a_step_wants_still_fill_it():  # case d07
    settings = settings_with(
        seed=11, search={"num_samples": 3}, trainer={"steps": 5, "groups_per_step": 8, "group_size": 3, "sync_every": 1}
    )
    depot = Depot(PROMPTS[:3], settings, lead=None)
    for step in range(5):
        for lease in depot.take(step):
            depot.deliver(answer(lease, version=step))
        draws, _ = depot.draw(step)
        assert len(draws) == 8
        assert {draw.prompt.id for draw in draws} == {"p0", "p1", "p2"}


def test_the_buffer_gets_every_bound_of_the_settings():
    settings = settings_with(buffer={
        "capacity": 777, "capacity_per_prompt": 77, "recent_age": 5, "max_uses": 6, "max_age": 19,
        "mix": {"reward": 1.5, "uniform": 0.5}, "reward_temperature": 0.3, "dedup": "none", "reuse": 2.0,
    })
    buffer = make_buffer(settings).options
    assert (buffer.capacity, buffer.capacity_per_prompt, buffer.recent_age) == (777, 77, 5)
    assert (buffer.max_uses, buffer.max_age, buffer.reward_temperature) == (6, 19, 0.3)
    assert buffer.mix == {"reward": 1.5, "uniform": 0.5}
    assert buffer.dedup == "none"
    assert make_buffer(settings_with()).options.recent_age == 31
    assert make_buffer(settings_with()).options.dedup == "exact"


def test_log_probs_of_tokens_are_kept_where_the_objective_reads_them():
    kept = {
        (name, given): make_buffer(settings_with(objective={"name": name}, buffer={"keep_logps": given}))
        for name, given in (("trajectory_balance", None), ("trajectory_balance", True), ("ppo_clip", None))
    }
    for buffer in kept.values():
        buffer.add(a_group("p", [((5, 6, 2), 0.3), ((7, 2), 0.4)]))
    logps = {key: next(buffer.entries())[1].trajectory.completion.logps for key, buffer in kept.items()}
    assert logps["trajectory_balance", None] == pytest.approx((-0.5, -0.5, -0.5))
    assert logps["trajectory_balance", True] == logps["ppo_clip", None] == (-0.25, -0.5, -0.75)


# ---- on disk ---------------------------------------------------------------------------------------


def untimed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: repr(value) for name, value in found.items() if name not in (m.DRAW_SECONDS, m.ATTEMPT)}


def test_a_saved_depot_goes_on_with_the_same_leases_and_the_same_draws(tmp_path: Path):
    depot = a_depot()
    searched(depot, 0, 0)
    for version in range(3):
        depot.draw(version)
    searched(depot, 1, 3)
    depot.save(tmp_path)
    resumed = a_depot()
    resumed.load(tmp_path)
    assert resumed.ledger() == depot.ledger()
    for round_ in (1, 2, 3):
        version = 3 * round_
        if round_ > 1:
            one, two = depot.take(round_), resumed.take(round_)
            assert one == two
            for lease in one:
                depot.deliver(answer(lease, version=version, run_attempt=depot.attempt))
                resumed.deliver(answer(lease, version=version, run_attempt=resumed.attempt))
        for step in range(3):
            draws, found = depot.draw(version + step)
            draws_again, found_again = resumed.draw(version + step)
            assert draws == draws_again
            assert untimed(found) == untimed(found_again)
            assert (found[m.ATTEMPT], found_again[m.ATTEMPT]) == (0, 1)
    assert resumed.ledger() == depot.ledger()


def test_draws_depend_on_the_seed():
    drawn = set()
    for seed in (11, 12):
        depot = Depot(PROMPTS, SETTINGS.model_copy(update={"seed": seed}), lead=None)
        for lease in a_depot().take(0):  # the same groups in both
            depot.buffer.add(answer(lease))
        drawn.add(tuple(tuple(d.prompt.id for d in depot.draw(0)[0]) for _ in range(6)))
    assert len(drawn) == 2


def test_each_restart_is_an_attempt_of_its_own(tmp_path: Path):
    depot = a_depot()
    for attempt in range(1, 4):
        depot.save(tmp_path)
        depot = a_depot()
        depot.load(tmp_path)
        assert depot.attempt == attempt


def test_the_state_is_plain_strict_json(tmp_path: Path):
    depot = a_depot()
    searched(depot, 0, 0)
    depot.save(tmp_path)
    for file in ("depot.json", "buffer.json"):
        json.loads((tmp_path / file).read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
