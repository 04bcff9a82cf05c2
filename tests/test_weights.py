"""Published weights: their digest, and the contract of every store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tba import assembly, lora
from tba.depot import Depot
from tba.loop import lockstep
from tba.reading import read_settings
from tba.searcher import Searcher
from tba.trainer import Trainer
from tba.weights import MemoryStore, Tensors, Weights, WeightStore, WrongWeightsError, check_held, digest, digests

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


# ---- attestation -----------------------------------------------------------------------------------


Change = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
CHANGES: dict[str, tuple[Change, str]] = {
    "zeros": (lambda held: {**held, "bias": np.zeros_like(held["bias"])}, "'bias' is all zeros"),
    "stale": (lambda held: {**held, "bias": np.array([0.125, 4.0], np.float32)}, "'bias' is still that of version 6"),
    "other": (lambda held: {**held, "bias": held["bias"] * 3}, "'bias' has other values, or another type or shape"),
    "type": (lambda held: {**held, "bias": held["bias"].astype(np.float64)}, "'bias' has other values"),
    "lost": (lambda held: {"bias": held["bias"]}, "'embed.weight' was published and is not there"),
    "added": (lambda held: {**held, "head": held["bias"]}, "'head' is there and was not published"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_engine_holds_otherwise_than_published_is_named(name: str):
    change, said = CHANGES[name]
    published = Weights.of(tensors(), version=7, round_=2)
    before = {5: digests({"bias": np.array([9.0, 9.0], np.float32)}),
              6: digests({"bias": np.array([0.125, 4.0], np.float32)})}
    assert check_held(published, tensors(), before) == published.digest
    with pytest.raises(WrongWeightsError) as error:
        check_held(published, change(tensors()), before)
    assert f"does not hold version 7 as it was published: 1 of {2 + (name == 'added')} tensors" in str(error.value)
    assert said in str(error.value)


def test_at_most_three_tensors_are_named():
    published = Weights.of({f"w{n}": np.ones(2) for n in range(5)}, version=1, round_=0)
    said = r"5 of 5 tensors differ: 'w0' is all zeros; .*'w2' is all zeros; and 2 more"
    with pytest.raises(WrongWeightsError, match=said):
        check_held(published, {f"w{n}": np.zeros(2) for n in range(5)}, {})


class Tampering(MemoryStore):
    """Hands out other weights than were published, from the second publication on."""

    def latest(self) -> Weights:
        whole = super().latest()
        if whole.version == 0:
            return whole
        first = min(whole.tensors)
        return dataclasses.replace(whole, tensors={**whole.tensors, first: np.zeros_like(whole.tensors[first])})


def journey_of(store: WeightStore, *words: str) -> tuple[Iterator[dict[str, Any]], Depot, Searcher]:
    settings = read_settings("enumerable", ["trainer.sync_every=2", *words])
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    depot = Depot(assembly.make_questions(settings, task, policy).training, settings, lead=None)
    searcher = assembly.make_searcher(settings, task, policy, "searcher-0")
    trainer = Trainer(policy.trainable_copy(), settings)
    return lockstep(trainer, depot, searcher, store, settings.trainer), depot, searcher


def test_corrupted_weights_end_the_journey_at_the_first_sync():
    journey, depot, _ = journey_of(Tampering())
    assert [next(journey)["version"] for _ in range(2)] == [1, 2]
    delivered = depot.ledger()["trajectories"]["delivered"]
    with pytest.raises(WrongWeightsError, match=r"version 2 as .*: 1 of \d+ tensors differ: .* is all zeros"):
        next(journey)
    assert depot.ledger()["trajectories"] == {**depot.ledger()["trajectories"], "delivered": delivered, "rejected": {}}


def test_an_adapter_that_is_not_applied_is_named_at_the_first_sync():
    words = ("model=new-llama", "engine.name=transformers", "policy.lora.rank=2", "architecture.layers=1")
    journey, _, searcher = journey_of(MemoryStore(), *words)
    next(journey), next(journey)
    lora.turn_off(searcher._engine._policy.model)
    with pytest.raises(WrongWeightsError, match=r"lora_A.*' was published and is not there"):
        next(journey)


def test_one_tensor_that_an_engine_keeps_from_before_is_named(monkeypatch: pytest.MonkeyPatch):
    journey, _, searcher = journey_of(MemoryStore())
    next(journey), next(journey)
    engine, load = searcher._engine, searcher._engine.load
    kept = sorted(engine.tensors())[0]

    def load_most(tensors: Tensors, version: int) -> None:
        load({**tensors, kept: engine.tensors()[kept]}, version)

    monkeypatch.setattr(engine, "load", load_most)
    with pytest.raises(WrongWeightsError, match=f"'{kept}' is still that of version 0"):
        next(journey)


def test_groups_that_echo_another_digest_are_rejected_and_counted():
    _, depot, searcher = journey_of(MemoryStore())
    published = Weights.of(searcher._engine.tensors(), version=0, round_=0)
    searcher.adopt(published)
    groups = list(searcher.search(depot.take(0)))
    depot.expect(published.version, published.digest)
    assert depot.deliver(groups[0]) == ""
    assert depot.deliver(dataclasses.replace(groups[1], digest="0" * 32)) == "wrong weights"
    assert depot.ledger()["trajectories"]["rejected"] == {"wrong weights": len(groups[1].trajectories)}
