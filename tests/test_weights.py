"""Published weights: their digest, and the contract of every store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tba import assembly
from tba.buffer.entries import EmptyBufferError
from tba.depot import Depot
from tba.loop import lockstep
from tba.reading import read_settings
from tba.trainer import Trainer
from tba.weights import MemoryStore, Weights, WeightStore, digest

STORES: dict[str, Callable[[], WeightStore]] = {"memory": MemoryStore}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> WeightStore:
    return STORES[request.param]()


def tensors() -> dict[str, np.ndarray]:
    return {"embed.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.array([0.5, -0.25], np.float32)}


def weights(version: int, round_: int) -> Weights:
    return Weights.of({"w": np.full(3, 0.1 * version, np.float32)}, version=version, round_=round_)


# ---- stores ----------------------------------------------------------------------------------------


def test_a_store_keeps_the_protocol(store):
    assert isinstance(store, WeightStore)


def test_nothing_is_handed_out_before_the_first_publication(store):
    with pytest.raises(RuntimeError, match="no weights have been published"):
        store.latest()


def test_the_newest_publication_is_handed_out_whole(store):
    for version, round_ in ((0, 0), (3, 1), (57, 2)):
        published = weights(version, round_)
        store.publish(published)
        newest = store.latest()
        assert (newest.version, newest.round, newest.digest) == (version, round_, published.digest)
        assert digest(newest.tensors) == published.digest
    assert store.latest().version == 57


def test_a_version_that_goes_backwards_is_refused_and_the_newest_stays(store):  # case h07
    store.publish(weights(57, 4))
    with pytest.raises(ValueError, match=r"version went backwards: 1 \(round 5\) was published after 57 \(round 4\)"):
        store.publish(weights(1, 5))
    with pytest.raises(ValueError, match="version went backwards"):
        store.publish(weights(57, 3))
    assert store.latest().version == 57


def test_the_same_version_may_be_published_for_the_next_round(store):
    store.publish(weights(4, 1))
    store.publish(weights(4, 1))
    store.publish(weights(4, 2))  # every step of a round was skipped
    assert store.latest().round == 2


# ---- digest ----------------------------------------------------------------------------------------


def test_the_digest_is_of_the_contents_not_of_the_order_or_the_memory():
    one, other = tensors(), dict(reversed(tensors().items()))
    assert digest(one) == digest(other)
    one["embed.weight"] = np.asfortranarray(one["embed.weight"])
    one["bias"] = np.array([0.5, 9.0, -0.25, 9.0], np.float32)[::2]
    assert digest(one) == digest(other)


def test_one_bit_of_any_byte_changes_the_digest():
    found = {digest(tensors())}
    for name, tensor in tensors().items():
        for place in range(tensor.nbytes):
            changed = tensors()
            changed[name].view(np.uint8).reshape(-1)[place] ^= 1
            found.add(digest(changed))
    assert len(found) == 1 + 24 + 8


def test_name_type_and_shape_are_part_of_the_digest():
    flat = np.zeros(6, np.float32)
    variants = [
        {"a": flat}, {"b": flat}, {"a": flat.astype(np.float64)}, {"a": flat.view(np.int32)},
        {"a": flat.reshape(2, 3)}, {"a": flat.reshape(3, 2)}, {"a": flat.reshape(1, 6)}, {"a": flat[:5]},
        {"a": flat[:3], "b": flat[:3]}, {"a": flat, "b": flat[:0]}, {"a": flat[:0], "b": flat}, {},
    ]
    assert len({digest(v) for v in variants}) == len(variants)


def test_a_scalar_is_not_a_row_of_one():
    assert digest({"step": np.array(0.5, np.float32)}) != digest({"step": np.array([0.5], np.float32)})


def test_blank_weights_have_another_digest_than_the_trained():
    blank = {name: np.zeros_like(tensor) for name, tensor in tensors().items()}
    assert digest(blank) != digest(tensors())
    assert digest({"w": np.float32([0.0])}) != digest({"w": np.float32([-0.0])})


class Tampering(MemoryStore):
    """Hands out other weights than were published."""

    def latest(self) -> Weights:
        whole = super().latest()
        return dataclasses.replace(whole, tensors={name: array + 0.25 for name, array in whole.tensors.items()})


@pytest.mark.parametrize(("make", "counted"), [(MemoryStore, False), (Tampering, True)])
def test_what_was_sampled_with_other_weights_is_rejected_in_lockstep_too(make: type[MemoryStore], counted: bool):
    settings = read_settings("enumerable", [])
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    depot = Depot(assembly.make_questions(settings, task, policy).training, settings, lead=None)
    journey = lockstep(
        Trainer(policy.trainable_copy(), settings), depot,
        assembly.make_searcher(settings, task, policy, "searcher-0"), make(), settings.trainer,
    )
    if counted:
        with pytest.raises(EmptyBufferError, match="wrong weights"):
            next(journey)
    else:
        next(journey)
    account = depot.ledger()["trajectories"]
    assert account["rejected"] == ({"wrong weights": account["delivered"]} if counted else {})
