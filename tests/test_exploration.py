"""How engine batches are sampled: by the lease, over the whole range, and never in the residual."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest

from support import make_draw, make_lease, make_prompt, make_settings, table_policy
from tba import assembly
from tba import metrics as m
from tba.batch import collate
from tba.engines.protocol import Sampling
from tba.engines.table import TableEngine
from tba.exploration import Exploration
from tba.records import Group
from tba.searcher import Searcher
from tba.sections import RangeSettings
from tba.settings import Settings
from tba.trainer import Trainer

PLAIN = Sampling(max_new_tokens=3, temperature=0.7, top_p=1.0)
PROMPT = make_prompt("p", (1, 3))


def drawn(numbers: range, seed: int = 4, **ranges: Any) -> list[Sampling]:
    exploration = Exploration(PLAIN, seed=seed, **ranges)
    return [exploration.of(make_lease(PROMPT, number)) for number in numbers]


def test_without_ranges_every_batch_is_sampled_alike() -> None:
    assert set(drawn(range(20))) == {PLAIN}


def test_a_range_is_drawn_from_evenly_and_alone() -> None:
    found = drawn(range(4000), temperature=RangeSettings(low=0.7, high=1.1))
    temperatures = [s.temperature for s in found]
    assert {(s.top_p, s.max_new_tokens) for s in found} == {(1.0, 3)}
    assert min(temperatures) >= 0.7
    assert max(temperatures) <= 1.1
    assert statistics.fmean(temperatures) == pytest.approx(0.9, abs=0.01)  # the middle; 0.4 / sqrt(12 x 4000) = 0.002
    assert statistics.pstdev(temperatures) == pytest.approx(0.4 / 12**0.5, abs=0.005)


def test_a_share_of_the_batches_is_drawn_the_others_are_as_the_policy() -> None:
    wide = RangeSettings(low=0.8, high=1.1, share=0.3)
    found = drawn(range(4000), temperature=wide, top_p=RangeSettings(low=0.7, high=0.9, share=0.6))
    hot, cut = [s.temperature != 0.7 for s in found], [s.top_p != 1.0 for s in found]
    assert statistics.fmean(hot) == pytest.approx(0.3, abs=0.03)
    assert statistics.fmean(cut) == pytest.approx(0.6, abs=0.03)
    both = statistics.fmean(a and b for a, b in zip(hot, cut, strict=True))
    assert both == pytest.approx(0.18, abs=0.03)  # apart from each other


def test_what_is_drawn_depends_on_seed_lease_and_attempt_alone() -> None:
    wide = RangeSettings(low=0.7, high=1.1)
    assert drawn(range(9), temperature=wide) == drawn(range(9), temperature=wide)
    assert drawn(range(5, 9), temperature=wide) == drawn(range(9), temperature=wide)[5:]
    assert not set(drawn(range(9), temperature=wide)) & set(drawn(range(9), seed=5, temperature=wide))
    exploration = Exploration(PLAIN, temperature=wide)
    first = exploration.of(make_lease(PROMPT, 3))
    assert exploration.of(make_lease(make_prompt("q", (1, 4)), 3)) == first
    assert exploration.of(make_lease(PROMPT, 3, attempt=1)) != first


# ---- never in the residual --------------------------------------------------------------------------


class Even:
    """Rewards that depend on the ids alone."""

    name = "even"

    def score(self, prompt: Any, completions: Any) -> list[float]:
        return [0.1 * sum(c.tokens) for c in completions]


def searched(exploration: Exploration) -> Group:
    policy = table_policy(3, temperature=0.7)
    searcher = Searcher(
        engine=TableEngine(policy.frozen_copy()), reference=table_policy(4, temperature=0.7), task=Even(),  # type: ignore
        exploration=exploration, num_samples=32, batch_prompts=1, seed=6,
    )  # fmt: skip
    (group,) = searcher.search([make_lease(PROMPT)])
    return group


@pytest.mark.parametrize("exploration", [
    Exploration(dataclasses.replace(PLAIN, temperature=2.0)),
    Exploration(dataclasses.replace(PLAIN, top_p=0.6)),
    Exploration(PLAIN, temperature=RangeSettings(low=1.5, high=3.0), top_p=RangeSettings(low=0.5, high=0.9)),
])
def test_a_completion_gives_the_same_numbers_however_it_was_sampled(exploration: Exploration) -> None:
    plain = {t.completion.tokens: t for t in searched(Exploration(PLAIN)).trajectories}
    varied = {t.completion.tokens: t for t in searched(exploration).trajectories}
    both = sorted(plain.keys() & varied.keys())
    assert len(both) >= 3
    for ids in both:
        assert varied[ids].completion.behaviour_logps
        assert not plain[ids].completion.behaviour_logps
        assert varied[ids].completion.logps == pytest.approx(plain[ids].completion.logps, abs=1e-5)
        assert varied[ids].ref_logp == pytest.approx(plain[ids].ref_logp, abs=1e-5)

    def step_of(found: dict[tuple[int, ...], Any]) -> dict[str, Any]:
        trainer = Trainer(table_policy(5, temperature=0.7).trainable_copy(), make_settings(objective={"beta": 0.37}))
        return trainer.step(collate([make_draw(PROMPT, [found[ids] for ids in both])], max_tokens=999))

    ours, theirs = step_of(plain), step_of(varied)
    for name in (m.LOSS, m.GRAD_NORM, m.RESIDUAL_MSE, m.KL, m.LOG_Z):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name


# ---- settings ---------------------------------------------------------------------------------------


def explored(**search: Any) -> Exploration:
    settings: Settings = make_settings(policy={"temperature": 0.7}, search=search, seed=3)
    again = Settings.model_validate(settings.resolved())
    assert again.search == settings.search or settings.search.temperature is None
    return assembly.make_exploration(again)


def test_settings_give_numbers_or_ranges() -> None:
    lease = make_lease(PROMPT, 12)
    assert explored().of(lease) == Sampling(max_new_tokens=16, temperature=0.7, top_p=1.0)
    assert explored(temperature=1.3, top_p=0.9).of(lease) == Sampling(max_new_tokens=16, temperature=1.3, top_p=0.9)
    found = explored(temperature={"low": 0.8, "high": 0.9}, top_p={"low": 0.5, "high": 0.6}).of(lease)
    assert 0.8 <= found.temperature <= 0.9
    assert 0.5 <= found.top_p <= 0.6
    rarely = explored(temperature={"low": 0.8, "high": 0.9, "share": 1e-9}).of(lease)
    assert rarely.temperature == 0.7


@pytest.mark.parametrize(("search", "message"), [
    ({"temperature": {"low": 0.9, "high": 0.8}}, r"search\.temperature = \{low: 0\.9, high: 0\.8\} is no range"),
    ({"top_p": {"low": 0.5, "high": 1.5}}, r"search\.top_p\.high = 1\.5 is more than 1"),
])
def test_what_is_no_range_is_refused(search: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_settings(search=search)
