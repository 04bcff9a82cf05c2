"""The simulated clock: times written out by hand, saturation, and the same losses as lockstep."""

from __future__ import annotations

import argparse
import importlib.util
import math
from dataclasses import replace
from itertools import islice, pairwise, product, takewhile
from pathlib import Path
from typing import Any

import pytest

from makers import a_completion, balances, settings_with
from tba import assembly
from tba import metrics as m
from tba.loop import lockstep
from tba.simulation import Call, Clock, Fixed, Measured, Place, Recorded, Simulation
from tba.trainer import Trainer
from tba.weights import MemoryStore


def benchmark(name: str) -> Any:
    """A script of the folder `benchmarks`, as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sparse = benchmark("sparse")


def small(*, searchers: int = 1, lead: int | None = None, sync_every: int = 1, seed: int = 3) -> Any:
    """Two groups a step, two prompts a search: with sync_every 1, each search feeds one step."""
    return settings_with(
        seed=seed, async_={"lead": lead}, search={"searchers": searchers, "num_samples": 5, "batch_prompts": 2},
        trainer={"steps": 8, "groups_per_step": 2, "group_size": 3, "sync_every": sync_every},
    )


def simulate(settings: Any, costs: Any) -> Simulation:
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    return Simulation(settings, assembly.make_questions(settings, task, policy), policy, costs)


def calls(simulated: Simulation, name: str, count: int) -> list[Call]:
    """The first `count` calls of a name."""
    return list(islice((call for call in simulated.calls() if call.name == name), count))


def spans(found: list[Call]) -> list[tuple[float, float]]:
    return [(call.started, call.ended) for call in found]


# ---- the clock alone ----------------------------------------------------------------------------


def test_a_place_does_one_call_at_a_time_and_two_places_work_side_by_side() -> None:
    clock, oven, sink = Clock(Fixed({"bake": 3, "wash": 2})), Place("oven"), Place("sink")
    for place, name in ((oven, "bake"), (oven, "bake"), (sink, "wash")):
        clock.ask(place, name, lambda: None)
    assert [(c.name, c.started, c.ended) for c in clock.calls()] == [("wash", 0, 2), ("bake", 0, 3), ("bake", 3, 6)]


def test_what_may_not_start_lets_others_pass_and_starts_when_it_may() -> None:
    clock, shop, stock = Clock(Fixed({"sell": 1, "buy": 5})), Place("shop"), list[int]()
    clock.ask(shop, "sell", stock.pop, may_start=lambda: bool(stock))
    clock.ask(shop, "buy", lambda: stock.append(7))
    assert [(c.name, c.asked, c.started, c.ended, c.result) for c in clock.calls()] == [
        ("buy", 0, 0, 5, None), ("sell", 0, 5, 6, 7),
    ]


def test_waiting_for_one_another_is_named() -> None:
    clock, shop = Clock(Fixed({})), Place("shop")
    clock.ask(shop, "sell", lambda: None, by="ann", may_start=lambda: False)
    with pytest.raises(RuntimeError, match=r"these may not start: sell by ann"):
        list(clock.calls())


# ---- times by hand ------------------------------------------------------------------------------


def test_one_searcher_of_3_s_and_a_trainer_of_1_s() -> None:
    # A search feeds a step. Searches end at 3, 6, 9; each step follows at once and takes 1 s.
    found = calls(simulate(small(), Fixed({"search": 3, "step": 1})), "step", 3)
    assert spans(found) == [(3, 4), (6, 7), (9, 10)]
    # The search that ends at 6 was leased at 3, before step 1 was done: version 0, used at version 1: age 1.
    # The next was leased at 6, when version 1 was out; step 2 ends at 7, so it is used at version 2: age 1.
    assert [call.result[m.AGE_HISTOGRAM].get("0", 0) for call in found] == [6, 0, 0]


def test_two_searchers_of_3_s_feed_two_steps_of_1_s_each_3_s() -> None:
    simulated = simulate(small(searchers=2), Fixed({"search": 3, "step": 1}))
    seen = list(islice(simulated.calls(), 80))
    steps = [call for call in seen if call.name == "step"]
    assert spans(steps)[:5] == [(3, 4), (4, 5), (6, 7), (7, 8), (9, 10)]
    searches = [call for call in seen if call.name == "search"]
    assert [(c.by, c.started, c.result[0].version) for c in searches[:6]] == [
        ("searcher-0", 0, 0), ("searcher-1", 0, 0),
        ("searcher-0", 3, 0), ("searcher-1", 3, 0),  # leased at 3, when the first step began
        ("searcher-0", 6, 2), ("searcher-1", 6, 2),  # steps 1 and 2 were published at 4 and 5
    ]


def test_lead_0_makes_search_and_training_take_turns() -> None:
    # Round n is searched for once the weights of round n - 1 are out: 3 s of search, then 1 s of step, and again;
    # half a second for each of publish (before the first search too) and load is paid in each turn: 5 s a turn.
    costs = Fixed({"search": 3, "step": 1, "publish": 0.5, "load": 0.5})
    assert spans(calls(simulate(small(searchers=2, lead=0), costs), "step", 3)) == [(4, 5), (9, 10), (14, 15)]


def test_a_trainer_that_is_slower_than_its_searchers_is_never_idle() -> None:
    simulated = simulate(small(searchers=2), Fixed({"search": 3, "step": 10}))
    seen = list(takewhile(lambda call: call.ended < 33, simulated.calls()))
    assert spans([call for call in seen if call.name == "step"]) == [(3, 13), (13, 23)]
    # Leases are every 3 s; weights are published at 0, 13 and 23, and loaded with the first lease from then on.
    assert [call.ended for call in seen if call.name == "load"] == [0, 0, 15, 15, 24, 24]
    assert simulated.now == 33
    assert simulated.busy()["trainer"] == pytest.approx(30 / 33)
    assert simulated.busy()["searcher-1"] == pytest.approx(1)


@pytest.mark.parametrize("searchers", [2, 3, 6])
def test_a_slow_depot_saturates_however_many_search(searchers: int) -> None:
    # A delivery takes 4 s, a search 1 s: with two searchers or more, one delivery ends every 4 s from 1 + 4 on.
    simulated = simulate(small(searchers=searchers), Fixed({"search": 1, "deliver": 4}))
    found = calls(simulated, "deliver", 6)
    assert [call.ended for call in found] == [5, 9, 13, 17, 21, 25]
    for name in {call.by for call in found}:  # who has not handed over yet does not queue a second delivery
        mine = [call for call in found if call.by == name]
        assert all(later.asked >= earlier.ended for earlier, later in pairwise(mine))
    assert simulated.busy()["depot"] == pytest.approx(24 / 25)


def test_below_saturation_deliveries_grow_with_searchers() -> None:
    costs = {"search": 8, "deliver": 1}
    ended = {n: calls(simulate(small(searchers=n), Fixed(costs)), "deliver", 12)[-1].ended for n in (1, 2, 4)}
    # All searches end at 8. The depot takes a lease and a delivery in turn: searcher i starts again at 8 + i, has
    # delivered at 8 + i + 1, and from then on nobody waits: it delivers 8 s apart.
    assert ended == {1: 12 * 8 + 1, 2: 6 * 8 + 2, 4: 3 * 8 + 4}


# ---- what it is made of -------------------------------------------------------------------------


def test_with_lead_0_and_one_searcher_it_is_lockstep_to_the_bit() -> None:
    settings = small(lead=0, sync_every=2)
    simulated = simulate(settings, Measured())
    found = [call.result for call in calls(simulated, "step", 6)]
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    parts = simulate(settings, Fixed({}))
    trainer = Trainer(policy.trainable_copy(), settings)
    expected = list(islice(lockstep(trainer, parts.depot, parts.searchers[0], MemoryStore(), settings.trainer), 6))
    for name in (m.LOSS, m.REWARD, m.KL, m.GRAD_NORM, m.AGE_HISTOGRAM, m.ROUND, m.SEARCH_REWARD, m.DRAWN_BY):
        assert [step[name] for step in found] == [step[name] for step in expected], name
    assert simulated.trainer.publish(3).digest == trainer.publish(3).digest


def test_the_ledger_adds_up_at_every_call() -> None:
    simulated = simulate(small(searchers=3, sync_every=2), Fixed({"search": 3, "step": 1, "deliver": 0.3}))
    for call in islice(simulated.calls(), 120):
        ledger = simulated.depot.ledger()
        assert balances(ledger), call.name
        prompts = ledger["prompts"]
        assert prompts["leased"] == prompts["delivered"] + prompts["open"] + prompts["lost"]
        assert not ledger["trajectories"]["rejected"]
    assert prompts["open"] <= 3 * 2 * 2  # two each: what a searcher searches for, and what it is handing over


def test_weights_are_published_when_a_round_ends() -> None:
    simulated = simulate(small(searchers=2, sync_every=2), Fixed({"search": 3, "step": 1}))
    stored = [call.result for call in calls(simulated, "store", 4)]
    assert [(weights.version, weights.round) for weights in stored] == [(0, 0), (2, 1), (4, 2), (6, 3)]


def test_a_group_of_weights_that_were_not_published_is_rejected() -> None:
    simulated = simulate(small(), Fixed({"search": 3}))
    for call in simulated.calls():
        if call.name == "publish":
            call.result = replace(call.result, digest="of other weights")
        if call.name == "deliver":
            break
    assert simulated.depot.ledger()["trajectories"]["rejected"] == {"wrong weights": 2 * 5}


def story(simulated: Simulation) -> list[Any]:
    """Everything that 150 calls tell."""
    return [
        (c.name, c.by, c.asked, c.started, c.ended, c.result[m.LOSS] if c.name == "step" else None)
        for c in islice(simulated.calls(), 150)
    ]


def test_same_seed_and_costs_same_story_and_another_seed_another() -> None:
    costs = {"search": 3, "step": 1, "deliver": 0.3}
    first, again, other = (
        story(simulate(small(searchers=3, seed=seed), Fixed(costs))) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_measured_costs_repeat_when_recorded() -> None:
    measured = Measured(instead={"step": 0.25})
    first = story(simulate(small(searchers=2), measured))
    assert {seconds for name, seconds in measured.seconds if name == "step"} == {0.25}
    assert all(seconds > 0 for _, seconds in measured.seconds)
    assert story(simulate(small(searchers=2), Recorded(measured.seconds))) == first
    with pytest.raises(ValueError, match="go on with 'the end', the simulation with 'publish'"):
        story(simulate(small(searchers=2), Recorded([])))


def test_a_start_policy_rewards_with_the_prior_that_is_asked_for() -> None:
    task = sparse.Sparse()
    settings = sparse.settings_of(2, 2.0, seed=5)
    policy, sampled = sparse.start_policy(settings, task, 1e-4)
    prompt = task.prompts(policy.encode)[0]
    vocabulary = policy.tokenizer.get_vocab()
    completion = (vocabulary["b"],) * 4
    assert math.exp(policy.sequence_logps([(prompt.tokens, completion)])[0]) == pytest.approx(1e-4, rel=1e-5)
    # Ids: a 0.82, b 0.1 and four of 0.02; at temperature 2 their square roots: 0.905539, 0.316228, 4 x 0.141421.
    assert sampled == pytest.approx((0.316228 / (0.905539 + 0.316228 + 4 * 0.141421)) ** 4, rel=1e-5)
    everything = list(product(sorted(vocabulary.values()), repeat=4))
    texts = [a_completion(ids, text=policy.decode(ids)) for ids in everything]
    assert [c.tokens for c, r in zip(texts, task.score(prompt, texts), strict=True) if r] == [completion]


def test_the_benchmark_finds_a_frequent_reward_and_counts_completions() -> None:
    chosen = argparse.Namespace(search_s=2.0, most=6.0)
    run = sparse.measure(1e-2, 2, 1.0, 0, chosen)
    assert 1 <= run["first_completions"] < run["steady_completions"] <= run["completions"]
    assert run["completions"] % 128 == 0
    # Two searchers hand over 2 x 128 completions each 2 s, but for what the other calls cost.
    assert 2.0 < run["first_s"] < run["steady_s"] == run["end_s"]
    assert run["completions"] / run["end_s"] < 128
    row = sparse.summarize([run, {**run, "steady_s": None, "steady_completions": None}], budget=1.0)
    assert row["first_s"] == run["first_s"]
    assert row["steady_s"] is None
    assert (row["first_by_budget"], row["steady_by_budget"], row["seeds"]) == (2, 1, 2)
    assert len(sparse.table([row], 1.0).splitlines()) == 3


class Renamed:
    """A searcher that another one does the work of."""

    def __init__(self, searcher: Any, name: str) -> None:
        self.name, self.adopt, self.search = name, searcher.adopt, searcher.search


def test_with_messages_packed_it_is_the_same_story_and_what_travels_is_bytes() -> None:
    settings, costs = small(searchers=2, sync_every=2), {"search": 3, "step": 1, "deliver": 0.3}
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    questions = assembly.make_questions(settings, task, policy)
    packed = Simulation(settings, questions, policy, Fixed(costs), packs=True)
    assert story(packed) == story(simulate(settings, Fixed(costs)))
    again = Simulation(settings, questions, policy, Fixed(costs), packs=True)
    results = {call.name: call.result for call in islice(again.calls(), 40)}
    assert [type(results[name]) for name in ("search", "deliver")] == [bytes, list]
    assert [type(results[name][0]) for name in ("lease", "draw")] == [bytes, bytes]


def test_searchers_may_be_given() -> None:
    settings = small(searchers=1)
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    questions = assembly.make_questions(settings, task, policy)
    given = [Renamed(assembly.make_searcher(settings, task, policy, "x"), name) for name in ("ann", "bob")]
    simulated = Simulation(settings, questions, policy, Fixed({"search": 3, "step": 1}), searchers=given)
    assert {call.by for call in calls(simulated, "search", 6)} == {"ann", "bob"}
    assert set(simulated.busy()) == {"depot", "trainer", "ann", "bob"}
