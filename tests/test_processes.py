"""What runs in the processes of an async run, called here without them."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from makers import a_prompt, an_answer, settings_with
from tba.buffer.entries import EmptyBufferError
from tba.cluster.depot import DepotProcess
from tba.cluster.notices import Notice

PROMPTS = [a_prompt(f"p{n}") for n in range(8)]


def a_depot_process(*, mix: dict[str, float] | None = None, lead: int | None = None) -> DepotProcess:
    settings = settings_with(
        "enumerable", mode="async", async_={"lead": lead}, search={"num_samples": 2, "max_new_tokens": 3},
        buffer={"initial": 8, "mix": mix or {"recent": 0.5, "uniform": 0.5}},
        trainer={"steps": 8, "groups_per_step": 2, "group_size": 2, "sync_every": 2},
    )
    process = DepotProcess(settings.resolved(), None)
    process.hold(PROMPTS)
    return process


async def searched(depot: DepotProcess, **answer: Any) -> int:
    """One batch of leases taken and delivered; how many."""
    orders = await depot.lease("searcher-0")
    assert orders is not None
    answers = [an_answer(lease, version=orders.notice.version, **answer) for lease in orders.leases]
    await depot.deliver("searcher-0", answers, {})
    return len(orders.leases)


def test_draws_are_made_in_the_order_of_their_steps_however_they_arrive():
    """Calls to an asyncio actor may be executed in another order than they were made in."""

    async def journey() -> list[int]:
        depot, made = a_depot_process(), []

        async def draw(step: int) -> None:
            await depot.draw(step, 0, 0)
            made.append(step)

        second = asyncio.create_task(draw(6))
        await asyncio.sleep(0)
        await depot.publish(Notice(version=0, round=0, digest=""), ())
        while await searched(depot) and depot._depot.leases.delivered < depot._depot.pace.before(1):
            pass
        first = asyncio.create_task(draw(5))
        await asyncio.sleep(0)
        await depot.begin(5)
        await asyncio.wait_for(asyncio.gather(first, second), timeout=20)
        return made

    assert asyncio.run(journey()) == [5, 6]


def test_a_draw_waits_for_data_that_is_young_enough():
    async def journey() -> tuple[bool, str, dict[str, Any], list[Any]]:
        depot = a_depot_process(mix={"recent": 1.0})  # and recent is an age of at most 2 x 2 - 1 = 3
        await depot.publish(Notice(version=0, round=0, digest=""), ())
        for _ in range(4):  # four prompts a round, so all of rounds 0 to 3, sampled by version 0
            await searched(depot)
        await depot.begin(5)  # the first step of round 2, at version 4: everything has age 4
        drawn = asyncio.create_task(depot.draw(5, 2, 4))
        for _ in range(3):
            await asyncio.sleep(0)
        had_to_wait, said = not drawn.done(), await depot.missing(2)
        await depot.publish(Notice(version=2, round=1, digest=""), ())
        await searched(depot)
        _, found, sources = await asyncio.wait_for(drawn, timeout=20)
        return had_to_wait, said, found, sources

    had_to_wait, said, found, sources = asyncio.run(journey())
    assert had_to_wait
    assert "round 2 needs 12 prompts delivered, 16 are" in said
    assert "no prompt has 2 trajectories to draw a group from" in said
    assert found["buffer/drawn_by"] == {"recent": 2}
    assert [(source.sampler, len(set(source.numbers))) for source in sources] == [("recent", 2)] * 2


@pytest.mark.parametrize("comes_with", ["publication", "open lease"])
def test_a_draw_waits_where_only_the_next_publication_or_an_open_lease_can_help(comes_with: str):
    async def journey() -> dict[str, Any]:
        depot = a_depot_process(mix={"recent": 1.0}, lead=1)
        for round_ in (0, 1):
            await depot.publish(Notice(version=2 * round_, round=round_, digest=""), ())
            await searched(depot)
        if comes_with == "publication":
            await searched(depot)  # round 2, as far as a lead of 1 goes; its step is drawn for before round 2 is out
        else:
            orders = await depot.lease("searcher-1")
        step, round_ = (5, 2) if comes_with == "publication" else (3, 1)
        await depot.begin(step)
        drawn = asyncio.create_task(depot.draw(step, round_, 6))  # everything has age 4 or more
        for _ in range(3):
            await asyncio.sleep(0)
        assert not drawn.done()
        if comes_with == "publication":
            await depot.publish(Notice(version=6, round=2, digest=""), ())
            await searched(depot)
        else:
            assert orders is not None
            await depot.deliver("searcher-1", [an_answer(lease, version=5) for lease in orders.leases], {})
        return (await asyncio.wait_for(drawn, timeout=20))[1]

    assert asyncio.run(journey())["buffer/drawn_by"] == {"recent": 2}


@pytest.mark.parametrize("is_scored", [True, False])
def test_a_draw_that_waiting_would_not_help_fails_at_once(is_scored: bool):
    async def journey() -> None:
        depot = a_depot_process(mix={"recent": 1.0}, lead=0 if is_scored else None)
        await depot.publish(Notice(version=0, round=0, digest=""), ())
        await (searched(depot) if is_scored else searched(depot, tokens=()))
        await depot.begin(1)
        # With lead 0 no more comes before round 1; without a lead more would come, but nothing ever could be scored.
        await asyncio.wait_for(depot.draw(1, 0, 4 if is_scored else 0), timeout=20)

    with pytest.raises(EmptyBufferError, match="no prompt has 2"):
        asyncio.run(journey())


def test_a_depot_makes_room_only_in_a_process_of_its_own():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    a_depot_process()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


# ---- holders of leases ------------------------------------------------------------------------------


def test_a_lease_held_too_long_is_handed_to_another_and_the_late_copy_is_refused():
    async def journey() -> tuple[list[Any], list[Any], dict[str, Any], dict[str, Any]]:
        depot = a_depot_process()
        await depot.publish(Notice(version=0, round=0, digest=""), ())
        slow = await depot.lease("searcher-0.1")
        assert slow is not None
        taken = depot._holders["searcher-0.1"].out[slow.leases[0].number][1]
        await depot.give_back_overdue(taken + 60.0)  # half of async.wait_limit_s = 120
        assert depot._depot.leases.ledger()["lost"] == 0
        await depot.give_back_overdue(taken + 60.5)
        told = (await depot.holders())["searcher-0.1"]
        quick = await depot.lease("searcher-1.1")
        assert quick is not None
        await depot.deliver("searcher-0.1", [an_answer(lease, version=0) for lease in slow.leases], {})
        await depot.deliver("searcher-1.1", [an_answer(lease, version=0) for lease in quick.leases], {})
        return list(slow.leases), list(quick.leases), told, (await depot.ledger())

    slow, quick, told, ledger = asyncio.run(journey())
    assert [(lease.number, lease.attempt) for lease in quick] == [(lease.number, 1) for lease in slow]
    assert told["overdue"] == len(slow) > 0
    assert told["held"] == 0
    assert told["stuck_s"] is not None
    assert ledger["prompts"] == {"leased": 2 * len(slow), "delivered": len(slow), "open": 0, "lost": len(slow)}
    assert ledger["trajectories"]["rejected"] == {"late": 2 * len(slow)}


def test_what_a_dead_searcher_still_asks_for_it_does_not_get():
    async def journey() -> tuple[Any, dict[str, Any]]:
        depot = a_depot_process()
        asked = asyncio.create_task(depot.lease("searcher-0.1"))  # nothing is published yet: it waits
        await asyncio.sleep(0)
        assert await depot.give_back("searcher-0.1") == (0, 0, 0)
        await depot.publish(Notice(version=0, round=0, digest=""), ())
        return await asyncio.wait_for(asked, timeout=20), await depot.ledger()

    orders, ledger = asyncio.run(journey())
    assert orders is None
    assert ledger["prompts"] == {"leased": 0, "delivered": 0, "open": 0, "lost": 0}


def test_what_all_searchers_delivered_is_told_with_what_a_dead_one_did():
    async def journey() -> tuple[int, int, tuple[int, int, int]]:
        depot = a_depot_process()
        await depot.publish(Notice(version=0, round=0, digest=""), ())
        one = await depot.lease("searcher-0.1")
        two = await depot.lease("searcher-1.1")
        assert one is not None
        assert two is not None
        await depot.deliver("searcher-0.1", [an_answer(lease, version=0) for lease in one.leases], {})
        return len(one.leases), len(two.leases), await depot.give_back("searcher-1.1")

    delivered, lost, told = asyncio.run(journey())
    assert delivered > 0
    assert told == (lost, 0, delivered)


def test_a_dismissed_searcher_delivers_what_it_holds_and_gets_no_more():
    async def journey() -> tuple[Any, Any, dict[str, Any]]:
        depot = a_depot_process()
        await depot.publish(Notice(version=0, round=0, digest=""), ())
        orders = await depot.lease("searcher-3.1")
        await depot.dismiss("searcher-3.1")
        assert orders is not None
        await depot.deliver("searcher-3.1", [an_answer(lease, version=0) for lease in orders.leases], {})
        other = await depot.lease("searcher-0.1")
        return await depot.lease("searcher-3.1"), other, await depot.ledger()

    dismissed, other, ledger = asyncio.run(journey())
    assert dismissed is None
    assert other is not None
    assert ledger["prompts"]["lost"] == 0
    assert ledger["trajectories"]["rejected"] == {}


def test_a_searcher_is_told_of_by_life_and_its_times_add_up_over_its_lives():
    async def journey() -> tuple[dict[str, Any], dict[str, Any]]:
        depot = a_depot_process()
        await depot.publish(Notice(version=0, round=0, digest="right"), ())
        for life, digest, seconds in (("searcher-0.1", "right", 2.0), ("searcher-0.2", "blank", 0.5)):
            orders = await depot.lease(life, f"here pid {life[-1]}")
            assert orders is not None
            answers = [an_answer(lease, version=0, digest=digest) for lease in orders.leases]
            await depot.deliver(life, answers, {"sampling_s": seconds, "idle_s": 0.25})
        return await depot.holders(), await depot.times()

    holders, times = asyncio.run(journey())
    groups = holders["searcher-0.1"]["delivered"]
    assert [holders[f"searcher-0.{life}"]["wrong"] for life in (1, 2)] == [0, groups]
    assert [holders[f"searcher-0.{life}"]["where"] for life in (1, 2)] == ["here pid 1", "here pid 2"]
    assert times == {"searcher-0": {"sampling_s": 2.5, "idle_s": 0.5}}
