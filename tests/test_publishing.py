"""Publishing from the trainer's process: buffers are used again, and never while somebody may still read them."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from makers import settings_with
from support import make_draw, make_prompt, make_trajectory
from tba import metrics as m
from tba.batch import collate
from tba.cluster.trainer import MOST_UNDIGESTED, TrainerProcess
from tba.weights import Tensors, digest

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"steps": 8, "groups_per_step": 1, "group_size": 2, "sync_every": 1, "record_every": 0, "learning_rate": 0.01}


def tree(**model: Any) -> dict[str, Any]:
    """Settings that publish after every step."""
    search = {"num_samples": 2, "max_new_tokens": 3}
    return settings_with(mode="async", trainer=SIZES, search=search, **model).resolved()


def drawn(seed: int) -> tuple[Any, dict[str, Any], list[Any]]:
    made = [make_trajectory("p", (3 + (seed + n) % 3, 2), reward=0.3 * n) for n in range(2)]
    return collate([make_draw(make_prompt("p", [1, 3]), made)], max_tokens=64), {m.SEARCH_KL: math.nan}, []


def fed(process: TrainerProcess, *steps: int) -> list[Future[dict[str, Any]]]:
    for step in steps:
        process.feed(step, drawn(step))
    return [process._steps[step] for step in steps]


def trained(process: TrainerProcess, *steps: int) -> None:
    fed(process, *steps)
    for step in steps:
        process.step(step, None)


def share_memory(one: Tensors, other: Tensors) -> bool:
    shared = [np.shares_memory(one[name], other[name]) for name in one]
    assert len(set(shared)) == 1
    return shared[0]


@pytest.fixture
def process(tmp_path: Path) -> TrainerProcess:
    return TrainerProcess(tree(), 1, None, str(tmp_path))


def test_a_publication_is_copied_into_the_buffers_of_the_one_before_the_last(process: TrainerProcess) -> None:
    tensors = list[Tensors]()
    for round_ in range(6):
        if round_:
            trained(process, round_)
        notice, found, _ = process.publication(round_)
        assert (notice.round, notice.version, digest(found)) == (round_, round_, notice.digest)
        tensors.append(found)
    # Round n is copied while what round n - 1 returned may still be sent; the call that returned it came after that
    # of round n - 2, whose buffers are free: two sets of buffers take turns.
    pairs = {(one, other) for one in range(6) for other in range(one) if share_memory(tensors[one], tensors[other])}
    assert pairs == {(one, other) for one in range(6) for other in range(one % 2, one, 2)}


def test_what_may_still_be_sent_is_not_written_over(process: TrainerProcess) -> None:
    notice, sent, _ = process.publication(0)
    trained(process, 1, 2)  # two publications are made meanwhile, and nobody has asked for the next
    assert digest(sent) == notice.digest
    later = [process.publication(round_) for round_ in (1, 2)]
    assert [digest(tensors) for _, tensors, _ in later] == [one.digest for one, _, _ in later]
    assert digest(sent) == notice.digest
    assert len({notice.digest, *(one.digest for one, _, _ in later)}) == 3
    trained(process, 3, 4)  # the calls for rounds 1 and 2 freed the buffers of rounds 0 and 1
    process._await_copy()  # of round 4, which no later update has waited for
    assert digest(sent) != notice.digest


def test_a_trainer_that_is_far_ahead_of_its_digests_waits_for_them(process: TrainerProcess) -> None:
    process.publication(0)
    gate = threading.Event()
    process._digesting.submit(gate.wait)
    steps = fed(process, *range(1, MOST_UNDIGESTED + 3))
    for step in steps[:MOST_UNDIGESTED]:
        assert m.LOSS in step.result(timeout=60)
    assert not wait(steps[MOST_UNDIGESTED:], timeout=0.5).done
    gate.set()
    assert steps[-1].result(timeout=60)[m.PUBLISH_SECONDS] >= 0.4
    notice, tensors, _ = process.publication(MOST_UNDIGESTED + 2)
    assert digest(tensors) == notice.digest


def test_the_next_gradient_is_made_while_weights_are_copied_and_only_the_update_waits(
    process: TrainerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.publication(0)
    trainer, gate, has_gradient = process._trainer, threading.Event(), threading.Event()
    made, accumulate = trainer.snapshot, trainer._accumulate

    def copied_late(*args: Any) -> Any:
        assert gate.wait(60)
        return made(*args)

    def told(*args: Any) -> Any:
        found = accumulate(*args)
        if trainer.version == 1:
            has_gradient.set()
        return found

    monkeypatch.setattr(trainer, "snapshot", copied_late)
    monkeypatch.setattr(trainer, "_accumulate", told)
    first, second, third = fed(process, 1, 2, 3)
    assert first.result(timeout=60)[m.VERSION] == 1  # published after this step, and the copy hangs
    assert has_gradient.wait(60)
    assert not wait([second], timeout=0.5).done
    assert trainer.version == 1
    gate.set()
    record = second.result(timeout=60)
    assert record[m.PUBLISH_SECONDS] >= 0.4  # what waited for the copy is no work of the step
    assert record[m.STEP_SECONDS] < record[m.PUBLISH_SECONDS]
    assert third.result(timeout=60)[m.VERSION] == 3
    for round_ in (1, 2, 3):
        notice, tensors, _ = process.publication(round_)
        assert (notice.version, digest(tensors)) == (round_, notice.digest)


def test_a_copy_that_does_not_come_is_named(process: TrainerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process.publication(0)
    gate = threading.Event()
    monkeypatch.setattr(process._trainer, "snapshot", lambda *args: gate.wait(60))
    process._limit_s = 0.2
    first, second = fed(process, 1, 2)
    assert first.result(timeout=60)[m.VERSION] == 1
    with pytest.raises(TimeoutError, match=r"weights of version 1 was not made within 0.2 s \(async.wait_limit_s\)"):
        second.result(timeout=60)
    gate.set()


def test_a_copy_that_fails_is_told_to_who_asks_and_fails_the_next_step(
    process: TrainerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.publication(0)

    def fails(*args: Any) -> Any:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(process._trainer, "snapshot", fails)
    first, second = fed(process, 1, 2)
    assert first.result(timeout=60)[m.VERSION] == 1
    with pytest.raises(MemoryError, match="no room"):
        process.publication(1)
    with pytest.raises(MemoryError, match="no room"):
        second.result(timeout=60)
    assert process._trainer.version == 1


def test_a_digest_that_fails_is_told_to_who_asks_and_leaves_room(process: TrainerProcess) -> None:
    process.publication(0)
    for _ in range(MOST_UNDIGESTED + 1):
        process._undigested.acquire()
        failed: Future[Any] = Future()
        with pytest.raises(AttributeError):
            process._digest(None, failed)  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            failed.result(timeout=1)
    trained(process, 1)


# ---- through Ray ---------------------------------------------------------------------------------


@contextlib.contextmanager
def own_ray() -> Iterator[None]:
    import ray

    with tempfile.TemporaryDirectory(prefix="tba-") as temp:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temp,
                 logging_level=logging.ERROR)
        try:
            yield
        finally:
            ray.shutdown()


@pytest.mark.slow
def test_the_store_has_its_own_copy_before_a_buffer_is_used_again(tmp_path: Path) -> None:
    """Each publication is read where the store has it, without a copy, while later ones are made."""
    import ray

    wide = tree(model="new-llama", architecture={"layers": 2, "width": 64, "heads": 2, "positions": 8},
                engine={"name": "transformers"})
    make: Any = ray.remote(concurrency_groups={"feed": 1, "publish": 1})
    rounds = SIZES["steps"]  # the learning rate is above zero until the last
    with own_ray():
        process = make(TrainerProcess).remote(wide, 1, None, str(tmp_path))
        ray.get(process.ready.remote(str(tmp_path)), timeout=120)
        asked = [process.publication.options(num_returns=3).remote(0)]
        for step in range(1, rounds):
            trained = process.step.remote(step, process.feed.remote(step, drawn(step)))
            asked.append(process.publication.options(num_returns=3).remote(step))  # as the driver: ahead of the step
        ray.get(trained, timeout=120)
        notices = [ray.get(notice, timeout=60) for notice, _, _ in asked]
        tensors = [ray.get(found, timeout=60) for _, found, _ in asked]
        assert sum(tensor.nbytes for tensor in tensors[0].values()) > 2 * 100 * 1024  # beyond what travels in messages
        assert not any(tensor.flags.owndata or tensor.flags.writeable for tensor in tensors[0].values())
        assert [digest(found) for found in tensors] == [notice.digest for notice in notices]
        assert len({notice.digest for notice in notices}) == rounds
        del tensors
