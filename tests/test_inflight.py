"""Weights adopted while a batch is sampled: asked for without waiting, attested, and a journey with them."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from makers import an_answer, balances, settings_with
from support import TEMPERATURE, llama_policy, make_lease, make_prompt, table_policy
from tba import assembly
from tba import metrics as m
from tba.batch import collate
from tba.buffer.export import write_parquet
from tba.buffer.memory import ReplayBuffer
from tba.cluster.notices import Notice
from tba.depot import Depot
from tba.engines.protocol import Sampling
from tba.engines.table import TableEngine
from tba.engines.transformers import TransformersEngine
from tba.exploration import Exploration
from tba.inflight import Lookout
from tba.policy import Policy, copy_out
from tba.reading import read_settings
from tba.records import Completion, Group, Lease, Prompt
from tba.searcher import Searcher
from tba.settings import Settings
from tba.trainer import Trainer
from tba.weights import Tensors, Weights, WrongWeightsError, digest

PROMPTS = [make_prompt("long", (1, 3, 4)), make_prompt("short", (1,)), make_prompt("other", (1, 5))]
LEASES = [make_lease(prompt, number) for number, prompt in enumerate(PROMPTS, 3)]


# ---- the lookout ----------------------------------------------------------------------------------


class Post:
    """Answers and tensors that are on the way until they are let in."""

    def __init__(self) -> None:
        self.newest: tuple[Notice | None, Sequence[Any]] = (None, ())
        self.asked = self.reads = 0
        self.on_the_way: set[Any] = set()
        self.what: dict[Any, Any] = {}

    def publish(self, version: int) -> None:
        self.what[f"tensors {version}"] = {"w": version}
        self.on_the_way.add(f"tensors {version}")
        self.newest = (Notice(version=version, round=version, digest=f"digest {version}"), [f"tensors {version}"])

    def ask(self) -> Any:
        self.asked += 1
        handle = f"answer {self.asked}"
        self.what[handle] = self.newest
        self.on_the_way.add(handle)
        return handle

    def read(self, handle: Any) -> Any:
        assert handle not in self.on_the_way, "whoever reads this waits"
        self.reads += 1
        return self.what[handle]

    def arrive(self, handle: Any = None) -> None:
        self.on_the_way = self.on_the_way - {handle} if handle else set()

    def lookout(self) -> Lookout:
        return Lookout(3, ask=self.ask, is_here=lambda handle: handle not in self.on_the_way, read=self.read)


def test_a_look_begins_what_a_later_one_picks_up() -> None:
    post = Post()
    lookout = post.lookout()
    assert lookout.every == 3
    post.publish(7)
    assert lookout.newer(4) is None  # asks
    assert (post.asked, post.reads) == (1, 0)
    assert lookout.newer(4) is None  # still on the way, and not asked for twice
    assert (post.asked, post.reads) == (1, 0)
    post.arrive("answer 1")
    assert lookout.newer(4) is None  # the answer is here, its tensors are not
    assert post.reads == 1
    post.arrive("tensors 7")
    weights = lookout.newer(4)
    assert weights == Weights(version=7, round=7, digest="digest 7", tensors={"w": 7})
    assert lookout.newer(7) is None


def test_nothing_is_newer_before_the_first_publication() -> None:
    post = Post()
    lookout = post.lookout()
    for _ in range(4):
        assert lookout.newer(0) is None
        post.arrive()


def test_what_the_searcher_got_meanwhile_is_not_adopted_again() -> None:
    post = Post()
    lookout = post.lookout()
    post.publish(7)
    assert lookout.newer(4) is None
    post.arrive("answer 1")
    assert lookout.newer(4) is None  # 7 is coming
    post.arrive()
    assert lookout.newer(9) is None  # the lease after that batch brought 9
    assert post.reads == 1  # the tensors of 7 were not read
    post.publish(11)
    for _ in range(3):
        found = lookout.newer(9)
        post.arrive()
    assert found is not None
    assert found.version == 11


@given(st.lists(st.sampled_from(["publish", "arrive", "look", "lease"]), max_size=60))
def test_looks_never_wait_versions_only_grow_and_the_newest_is_found_in_the_end(events: list[str]) -> None:
    post, held, published = Post(), 0, 0
    lookout = post.lookout()
    for event in [*events, *["look", "arrive"] * 4]:
        if event == "publish":
            published += 2
            post.publish(published)
        elif event == "arrive":
            post.arrive()
        elif event == "lease":
            held = published
        elif (weights := lookout.newer(held)) is not None:
            assert held < weights.version <= published
            assert weights.tensors == {"w": weights.version}
            held = weights.version
    assert held == published


# ---- the searcher ---------------------------------------------------------------------------------


class LengthTask:
    """Rewards a completion's length."""

    characters = "abc"

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        return [float(len(c.tokens)) for c in completions]


class DeafEngine(TableEngine):
    """Takes the version of what it is to load from now on, and ignores the weights."""

    is_deaf = False

    def load(self, tensors: Tensors, version: int) -> None:
        if self.is_deaf:
            self.version = version
        else:
            super().load(tensors, version)


def a_searcher(engine: Any = None, *, reference: Policy | None = None, num_samples: int = 6) -> Searcher:
    return Searcher(
        engine=engine or TableEngine(table_policy(1)), reference=reference or table_policy(2),
        task=LengthTask(),  # type: ignore
        exploration=Exploration(Sampling(max_new_tokens=4, temperature=TEMPERATURE)), num_samples=num_samples,
        batch_prompts=3, seed=8,
    )  # fmt: skip


def a_publication(seed: int, version: int, **more: Any) -> Weights:
    return Weights.of(copy_out(table_policy(seed).model), version=version, round_=version, **more)


def finding(found: Sequence[Weights | None], every: int = 1, read: Callable[[Any], Any] | None = None) -> Lookout:
    """Finds, look after look, these; after that nothing newer."""
    answers = iter(found)

    def newest(handle: Any) -> Any:
        if handle != "newest":
            return handle
        weights = next(answers, None)
        return (None, ()) if weights is None else (Notice.of(weights), [weights.tensors])

    return Lookout(every, ask=lambda: "newest", is_here=lambda handle: True, read=read or newest)


def searched(lookout: Lookout | None, engine: Any = None, **options: Any) -> list[Group]:
    searcher = a_searcher(engine, **options)
    searcher.adopt(a_publication(5, 3))
    if engine is not None:
        engine.is_deaf = True
    return list(searcher.search(LEASES, lookout=lookout))


def test_groups_echo_every_version_that_sampled_their_tokens() -> None:
    newer = [a_publication(6, 8), None, a_publication(7, 11)]
    groups = searched(finding(newer))
    digests = {3: a_publication(5, 3).digest, 8: newer[0].digest, 11: newer[2].digest}
    assert {(g.version, g.digest) for g in groups} == {(3, digests[3])}
    seen = set()
    for group in groups:
        versions = {v for c in group.completions for v in c.token_versions} - {3}
        assert dict(group.echoes) == {version: digests[version] for version in versions}
        for completion in group.completions:
            expected = (3, 8, 8, 11)[: len(completion.tokens)]
            assert completion.version == 3
            assert completion.token_versions == (() if len(completion.tokens) == 1 else expected)
            seen.add(len(completion.tokens))
    assert seen == {1, 2, 3, 4}


def test_a_group_that_ended_before_a_load_echoes_nothing_of_it() -> None:
    groups = searched(finding([None, None, a_publication(6, 8)]), num_samples=2)
    straddling = [any(len(c.tokens) == 4 for c in g.completions) for g in groups]
    assert [bool(g.echoes) for g in groups] == straddling
    assert set(straddling) == {True, False}


def test_nothing_newer_changes_nothing_to_the_bit() -> None:
    assert searched(finding([])) == searched(None)


def test_an_engine_that_does_not_take_the_weights_in_the_midst_of_a_batch_is_told_so() -> None:
    with pytest.raises(WrongWeightsError, match=r"version 8 as .*'logits' is still that of version 3"):
        searched(finding([a_publication(6, 8)]), DeafEngine(table_policy(1)))


def test_the_reference_is_adopted_between_batches_only() -> None:
    reference = copy_out(table_policy(9).model)
    newer = a_publication(6, 8, ref_version=8, reference=reference)
    searcher = a_searcher()
    searcher.adopt(a_publication(5, 3))
    groups = list(searcher.search(LEASES, lookout=finding([newer])))
    assert {t.ref_version for g in groups for t in g.trajectories} == {0}
    for group in groups:
        pairs = [(group.prompt.tokens, t.completion.tokens) for t in group.trajectories]
        expected = table_policy(2).sequence_logps(pairs)
        assert [t.ref_logp for t in group.trajectories] == pytest.approx(expected, abs=1e-5)
    assert not searcher.holds(newer)  # so that it is adopted before the next batch
    searcher.adopt(newer)
    assert searcher.holds(newer)
    assert {t.ref_version for g in searcher.search(LEASES) for t in g.trajectories} == {8}


@pytest.mark.parametrize("change", [{"version": 4}, {"digest": "other"}, {"ref_version": 2}, {"round": 9}])
def test_it_holds_what_it_adopted(change: dict[str, Any]) -> None:
    searcher, weights = a_searcher(), a_publication(5, 3)
    assert not searcher.holds(weights)
    searcher.adopt(weights)
    assert searcher.holds(weights)
    assert searcher.holds(Notice.of(dataclasses.replace(weights, **change))) == ("round" in change)


def test_looking_and_loading_are_not_booked_as_sampling() -> None:
    newer, spent_s = a_publication(6, 8), 0.05

    def read(handle: Any) -> Any:
        deadline = time.perf_counter() + spent_s
        while time.perf_counter() < deadline:
            pass
        return (Notice.of(newer), ["tensors"]) if handle == "newest" else newer.tensors

    searcher = a_searcher()
    started = time.perf_counter()
    list(searcher.search(LEASES, lookout=finding([], read=read)))
    elapsed = time.perf_counter() - started
    times = searcher.times
    assert times.loading_s > 4 * spent_s  # three looks: two reads in the first, one in each later one
    assert times.sampling_s + times.loading_s + times.scoring_s + times.reference_s <= elapsed


def test_randomness_does_not_depend_on_loads() -> None:
    """The same weights loaded again sample the same ids."""
    for engine, policy in ((TableEngine, table_policy), (TransformersEngine, llama_policy)):
        plain, loaded = (a_searcher(engine(policy(1)), reference=policy(2)) for _ in range(2))
        again = [Weights.of(copy_out(policy(1).model), version=v, round_=v) for v in (1, 2, 3)]
        one = [[c.tokens for c in g.completions] for g in plain.search(LEASES)]
        other = [[c.tokens for c in g.completions] for g in loaded.search(LEASES, lookout=finding(again))]
        assert one == other


# ---- the depot ------------------------------------------------------------------------------------

SETTINGS = settings_with(
    seed=11, search={"num_samples": 3, "batch_prompts": 4}, objective={"name": "ppo_clip"},
    trainer={"steps": 12, "groups_per_step": 2, "group_size": 2, "sync_every": 3},
)


def a_depot() -> Depot:
    depot = Depot(PROMPTS, SETTINGS, lead=None)
    depot.expect(0, "zero")
    depot.expect(3, "three")
    return depot


def straddling(lease: Lease, versions: tuple[int, ...] = (0, 3, 3), **more: Any) -> Group:
    """An answer of two completions, of which the longer one straddles."""
    group = an_answer(lease, tokens=[(4, 2), (5, 6, 2)], digest="zero", **more)
    last = group.trajectories[1]
    made = dataclasses.replace(last, completion=dataclasses.replace(last.completion, token_versions=versions))
    return dataclasses.replace(group, trajectories=(group.trajectories[0], made))


@pytest.mark.parametrize(("echoes", "refusal"), [
    (((3, "three"),), ""),
    (((3, "zero"),), "wrong weights"),
    (((3, "blank"),), "wrong weights"),
    (((3, "three"), (0, "blank")), "wrong weights"),
    (((5, "not published, or long ago"),), "wrong weights"),  # 3 is not attested
    ((), "wrong weights"),
])
def test_every_version_must_be_echoed_with_its_own_digest(echoes: Any, refusal: str) -> None:
    depot = a_depot()
    lease = depot.take(0)[0]
    assert depot.deliver(straddling(lease, echoes=echoes)) == refusal
    assert depot.ledger()["trajectories"]["rejected"] == ({refusal: 2} if refusal else {})
    assert balances(depot.ledger())


def test_the_share_that_straddles_is_told_and_survives_a_save(tmp_path: Path) -> None:
    depot = a_depot()
    leases = depot.take(0)
    for lease in leases[:2]:
        depot.deliver(an_answer(lease, digest="zero"))
    depot.deliver(straddling(leases[2], echoes=((3, "three"),)))
    assert depot.draw(3)[1][m.STRADDLING] == 1 / 6
    depot.save(tmp_path)
    resumed = Depot(PROMPTS, SETTINGS, lead=None)
    resumed.load(tmp_path)
    assert resumed.draw(3)[1][m.STRADDLING] == 1 / 6


def test_versions_of_tokens_survive_the_buffer_and_age_is_that_of_the_oldest(tmp_path: Path) -> None:
    depot = a_depot()
    lease = depot.take(0)[0]
    depot.deliver(straddling(lease, echoes=((3, "three"),)))
    draws, _ = depot.draw(4)
    assert {(t.completion.version, t.completion.token_versions) for d in draws for t in d.trajectories} == {
        (0, ()), (0, (0, 3, 3))
    }  # fmt: skip
    assert {age for draw in draws for age in draw.ages} == {4}
    assert {int(v) for micro in collate(draws, max_tokens=99).micro_batches for v in micro.version_N} == {0}
    depot.save(tmp_path)
    loaded = ReplayBuffer(depot.buffer.options).load(tmp_path)
    assert [e for _, e in loaded.entries()] == [e for _, e in depot.buffer.entries()]
    write_parquet(loaded, tmp_path / "buffer.parquet")


# ---- the journey ----------------------------------------------------------------------------------


class Beside:
    """A trainer whose rounds pass while the searcher samples: one at each look."""

    def __init__(self, settings: Settings, rounds: int) -> None:
        task = assembly.make_task_of(settings)
        policy = assembly.make_policy(settings, task)
        self.trainer = Trainer(policy.trainable_copy(), settings)
        self.searcher = assembly.make_searcher(settings, task, policy, "searcher-0")
        self.depot = Depot(assembly.make_questions(settings, task, policy).training, settings, lead=None)
        self.settings, self.rounds_left = settings, rounds
        self.steps: list[dict[str, Any]] = []
        self.adopted: list[int] = []

    def publish(self) -> Weights:
        weights = self.trainer.publish(self.trainer.steps // self.settings.trainer.sync_every)
        self.depot.expect(weights.version, weights.digest)
        self.adopted.append(weights.version)
        return weights

    def ask(self) -> Any:
        """Trains a round, if there is something to train on, and publishes."""
        if not len(self.depot.buffer) or not self.rounds_left:
            return None, ()
        self.rounds_left -= 1
        with torch.enable_grad():
            for _ in range(self.settings.trainer.sync_every):
                draws, found = self.depot.draw(self.trainer.version)
                self.steps.append({**self.trainer.step(collate(draws, max_tokens=9999)), **found})
        weights = self.publish()
        return Notice.of(weights), [weights.tensors]

    def run(self) -> None:
        lookout = Lookout(1, ask=self.ask, is_here=lambda handle: True, read=lambda handle: handle)
        round_ = 0
        while self.rounds_left:
            self.searcher.adopt(self.publish())
            for group in self.searcher.search(self.depot.take(round_), lookout=lookout):
                assert self.depot.deliver(group) == ""
            round_ += 1


def test_a_journey_that_publishes_inside_every_batch_adds_up_and_learns() -> None:
    settings = read_settings("enumerable", ["mode=async", "engine.adopt_every=1", "trainer.sync_every=4"])
    beside = Beside(settings, rounds=10)
    beside.run()
    ledger, steps = beside.depot.ledger(), beside.steps
    assert ledger["trajectories"]["rejected"] == {}
    assert balances(ledger)
    assert beside.adopted == sorted(beside.adopted)
    assert 0.25 < steps[-1][m.STRADDLING] < 1.0
    held = [e.trajectory.completion for _, e in beside.depot.buffer.entries()]
    assert {len(set(c.token_versions)) for c in held} == {0, 2}
    assert all(step[m.AGE_MAX] >= 0 for step in steps)
    early, late = (math.fsum(s[m.SEARCH_REWARD] for s in part if s[m.SEARCH_REWARD] == s[m.SEARCH_REWARD])
                   for part in (steps[:16], steps[-16:]))
    assert late > early
    weights = digest(beside.trainer.publish(0).tensors)
    again = Beside(copy.deepcopy(settings), rounds=10)
    again.run()
    assert digest(again.trainer.publish(0).tensors) == weights  # a function of settings and seed
