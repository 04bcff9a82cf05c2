"""Staleness: the worst-case age of docs/asynchrony.md, by counting, by random delays, and by faults on purpose."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from makers import a_prompt, an_answer, balances, settings_with
from support import make_draw, make_prompt, make_settings, make_trajectory, table_policy
from tba import assembly
from tba import metrics as m
from tba.batch import collate
from tba.buffer.entries import TooOldError
from tba.buffer.rows import Rows
from tba.depot import Depot, check_ages
from tba.leases import Leases, Pace
from tba.records import Group, Lease
from tba.simulation import Simulation
from tba.trainer import Trainer, TrainingFailedError
from tba.weights import Weights

# ---- by counting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_age", "sync_every", "lead"), [
    (0, 1, 0), (1, 1, 1), (3, 1, 3), (3, 4, 0), (4, 4, 0), (6, 4, 0), (7, 4, 1), (15, 4, 3),
])
def test_the_lead_is_the_most_at_which_a_round_finds_its_own_data_young_enough(
    max_age: int, sync_every: int, lead: int
) -> None:
    sizes = {"sync_every": sync_every, "steps": 8}
    chosen = settings_with(mode="async", buffer={"max_age": max_age}, trainer=sizes)
    assert chosen.lead == lead
    assert (lead + 1) * sync_every - 1 <= max_age < (lead + 2) * sync_every - 1
    assert settings_with(mode="async", buffer={"max_age": max_age}, async_={"lead": 9}, trainer=sizes).lead == 9
    assert settings_with(mode="async", trainer=sizes).lead is None


@hypothesis_settings(max_examples=150, deadline=None, derandomize=True)
@given(
    per_round=st.integers(1, 4), more=st.integers(0, 3), lead=st.integers(0, 3), sync=st.integers(1, 4),
    choices=st.lists(st.integers(0, 7), min_size=30, max_size=160), skips=st.sets(st.integers(0, 60)),
)
def test_every_round_has_its_prompts_sampled_by_versions_that_are_young_enough(
    per_round: int, more: int, lead: int, sync: int, choices: list[int], skips: set[int]
) -> None:
    """Leases, deliveries in any order, losses and skipped steps, as the choices will have it."""
    pace = Pace(first=per_round + more, per_round=per_round, lead=lead)
    leases = Leases([a_prompt("a"), a_prompt("b")], seed=0, pace=pace)
    bound = (lead + 1) * sync - 1
    out: list[tuple[Lease, int]] = []
    sampled: list[int] = []
    steps = version = published = 0  # published: the version of the newest publication, that of round steps // sync
    for choice in choices:
        round_ = steps // sync
        if choice < 3 and pace.may_search(leases.next_round, round_):
            out += [(lease, published) for lease in leases.take(1)]
        elif choice < 5 and out:
            lease, of = out.pop(choice % len(out))
            assert leases.deliver(lease.number, lease.attempt)
            assert of >= version - bound or lease.round < round_  # late for its round, or young enough for it
            sampled.append(of)
        elif choice == 5 and out:
            leases.give_back([out.pop(0)[0]])
        elif pace.may_train(round_, leases.delivered):
            # Were it by number, all of the round would be there; by count, as many of this or a later round are.
            assert sum(version - of <= bound for of in sampled) >= per_round
            version += steps not in skips
            steps += 1
            published = version if steps % sync == 0 else published


# ---- by random delays ----------------------------------------------------------------------------


STOP, SYMBOLS = 2, (3, 4, 5)
"""Ids of the enumerable task's completions."""


class Quick:
    """A searcher that needs no model: random completions, stamped as a searcher stamps them."""

    def __init__(self, name: str, num_samples: int, seed: int) -> None:
        self.name, self._num_samples, self._rng = name, num_samples, random.Random(f"{name} {seed}")

    def adopt(self, weights: Weights) -> None:
        self._version, self._digest = weights.version, weights.digest

    def search(self, leases: Sequence[Lease], *, run_attempt: int = 0) -> Iterator[Group]:
        for lease in leases:
            ids = [[*self._rng.choices(SYMBOLS, k=self._rng.randint(0, 2)), STOP] for _ in range(self._num_samples)]
            made = [make_trajectory(lease.prompt.id, one, reward=self._rng.gauss(0.3, 1.0), version=self._version)
                    for one in ids]
            yield Group(prompt=lease.prompt, trajectories=tuple(made), version=self._version, digest=self._digest,
                        number=lease.number, attempt=lease.attempt, searcher=self.name, run_attempt=run_attempt)


class Delays:
    """Costs that are drawn; one search in a hundred takes eight times as long. Watches what leaves unused."""

    def __init__(self, seed: int, means: Mapping[str, float]) -> None:
        self._rng, self._means = random.Random(seed), means
        self.rows: Rows | None = None
        self.unused = 0
        """Trajectories that left as too old, and had never been drawn."""

    def __call__(self, name: str, work: Callable[[], Any]) -> tuple[Any, float]:
        before = self._uses() if name == "draw" else {}
        result = work()
        if name == "draw":
            gone = before.keys() - self._uses().keys()
            self.unused += sum(before[number] == 0 for number in gone)
        slow = 8.0 if name == "search" and self._rng.random() < 0.01 else 1.0
        return result, slow * self._means[name] * self._rng.lognormvariate(0.0, 0.4)

    def _uses(self) -> dict[int, int]:
        """Of what is in the buffer, by number."""
        rows = self.rows
        return {} if rows is None else {rows.number[row]: rows.uses[row] for row in rows.held().tolist()}


def staleness(k: int, max_age: int, *, reuse: float, steps: int, seed: int = 3) -> dict[str, float]:
    """Three searchers and a trainer of about their speed; shares of what was delivered, largest age, and more."""
    chosen = settings_with(
        seed=seed, mode="async", task={"prompts": 64}, search={"searchers": 3, "num_samples": 2, "batch_prompts": 1},
        buffer={"max_age": max_age, "reuse": reuse, "mix": {"recent": 0.6, "uniform": 0.4}, "dedup": "none"},
        trainer={"steps": steps, "groups_per_step": 24, "group_size": 2, "sync_every": k, "learning_rate": 0.01},
    )
    task = assembly.make_task_of(chosen)
    policy = assembly.make_policy(chosen, task)
    small = dict.fromkeys(("publish", "store", "load", "lease", "deliver", "draw"), 0.01)
    delays = Delays(seed, {**small, "search": 1.0, "step": 8.0 / reuse})
    simulated = Simulation(
        chosen, assembly.make_questions(chosen, task, policy), policy, delays,
        searchers=[Quick(f"searcher-{number}", 2, seed) for number in range(3)],
    )
    delays.rows = simulated.depot.buffer.parts[0].storage.rows
    found = [call.result for call in islice((c for c in simulated.calls() if c.name == "step"), steps)]
    ages = Counter[int]()
    for step in found:
        ages.update({int(age): count for age, count in step[m.AGE_HISTOGRAM].items()})
    ledger = simulated.depot.ledger()
    account, prompts = ledger["trajectories"], ledger["prompts"]
    assert balances(ledger)
    assert prompts["leased"] == prompts["delivered"] + prompts["open"] + prompts["lost"]
    assert found[-1][m.STEP] == steps
    assert max(ages) <= max_age
    assert account["rejected"] == {}
    assert set(account["evicted"]) <= {"too old", "came too old"}
    return {
        "oldest": max(ages), "mean age": sum(age * count for age, count in ages.items()) / ages.total(),
        "came too old": account["evicted"].get("came too old", 0) / account["delivered"],
        "too old and unused": delays.unused / account["delivered"],
        "reuse": found[-1][m.REUSE], "trainer busy": simulated.busy()["trainer"],
    }


BOUNDS = [(1, 0), (1, 1), (1, 3), (4, 3), (4, 7), (4, 15)]
"""sync_every k, and max_age: k - 1, 2 k - 1, 4 k - 1."""
MOST = 0.05
"""Share of what is delivered that may leave as too old without having been used."""


@pytest.mark.parametrize(("k", "max_age"), BOUNDS)
def test_the_bound_on_age_holds_under_random_delays(k: int, max_age: int) -> None:
    found = staleness(k, max_age, reuse=4.0, steps=200)
    assert found["too old and unused"] <= MOST, found


@pytest.mark.slow
@pytest.mark.parametrize(("k", "max_age"), BOUNDS)
def test_the_bound_on_age_holds_for_ten_thousand_steps(k: int, max_age: int) -> None:
    found = staleness(k, max_age, reuse=4.0, steps=10_000)
    assert found["too old and unused"] <= MOST, found


# ---- by faults on purpose ------------------------------------------------------------------------


@pytest.mark.parametrize(("sampler", "ages", "fault"), [
    ("uniform", (0, 7), ""), ("recent", (3, 2), ""), ("uniform", (8,), "max_age = 7"),
    ("recent", (0, 4), "recent_age = 3"),
])
def test_a_draw_that_is_too_old_is_named(sampler: str, ages: tuple[int, ...], fault: str) -> None:
    old = [make_trajectory("p", version=20 - age) for age in ages]
    draws = [make_draw(make_prompt("q"), [make_trajectory("q", version=20)]), make_draw(make_prompt(), old)]
    draws = [replace(draw, sampler=sampler) for draw in draws]
    if not fault:
        check_ages(draws, 20, max_age=7, recent_age=3)
        check_ages(draws, 20, max_age=None, recent_age=3)
        return
    with pytest.raises(TooOldError, match=rf"{sampler}.*'p' that is {max(ages)} steps old for version 20.*{fault}"):
        check_ages(draws, 20, max_age=7, recent_age=3)


def test_a_buffer_that_keeps_what_is_too_old_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings_with(buffer={"max_age": 17, "recent_age": 16, "mix": {"recent": 1.0}})
    depot = Depot([a_prompt(f"p{n}") for n in range(3)], chosen, lead=None)
    for lease in depot.take(0):
        depot.deliver(an_answer(lease, tokens=[(4, n, 2) for n in range(16)], version=5))
    depot.draw(21)  # age 16
    monkeypatch.setattr(type(depot.buffer), "advance", lambda self, version: None)
    with pytest.raises(TooOldError, match=r"17 steps old for version 22, and buffer.recent_age = 16"):
        depot.draw(22)
    with pytest.raises(TooOldError, match=r"18 steps old for version 23, and buffer.max_age = 17"):
        depot.draw(23)


def test_a_trainer_refuses_what_is_too_old_and_stays_as_it_was() -> None:
    policy = table_policy()
    trainer = Trainer(policy.trainable_copy(), make_settings(
        buffer={"max_age": 2}, trainer={"groups_per_step": 1, "group_size": 2, "steps": 8, "learning_rate": 0.01},
    ))
    prompt = make_prompt("p", [1, 3])

    def batch(*versions: int) -> Any:
        made = [make_trajectory("p", (3 + n, 2), reward=0.3 * n, version=v) for n, v in enumerate(versions)]
        return collate([make_draw(prompt, made)], max_tokens=64)

    for _ in range(2):
        trainer.step(batch(0, 0))
    assert trainer.step(batch(0, 1))[m.AGE_MAX] == 2
    before = trainer.publish(3).digest
    said = r"step 4 got a trajectory that version 0 sampled, which is 3 steps old for version 3, and buffer.max_age = 2"
    with pytest.raises(TrainingFailedError, match=said):
        trainer.step(batch(3, 0))
    assert (trainer.steps, trainer.version, trainer.publish(3).digest) == (3, 3, before)
