"""What runs in the processes of an async run, called here without them."""

from __future__ import annotations

import asyncio
import os

from makers import a_prompt, an_answer, settings_with
from tba.processes import DepotProcess, Notice

PROMPTS = [a_prompt(f"p{n}") for n in range(8)]


def a_depot_process() -> DepotProcess:
    settings = settings_with(
        "enumerable", mode="async", buffer={"initial": 8}, search={"num_samples": 2, "max_new_tokens": 3},
        trainer={"steps": 8, "groups_per_step": 2, "group_size": 2, "sync_every": 2},
    )
    return DepotProcess(settings.resolved(), PROMPTS, None)


async def searched(depot: DepotProcess) -> int:
    """One batch of leases taken and delivered; how many."""
    orders = await depot.lease("searcher-0")
    assert orders is not None
    await depot.deliver("searcher-0", [an_answer(lease) for lease in orders.leases], {})
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


def test_a_depot_makes_room_only_in_a_process_of_its_own():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    a_depot_process()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
