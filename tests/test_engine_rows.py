"""An engine of few rows: prompts take the place of what has ended, and nothing else changes."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import TEMPERATURE, llama_policy, make_lease, make_prompt
from tba.cluster.notices import Notice
from tba.engines.cache import RoomyCache
from tba.engines.protocol import Pause, Sampling
from tba.engines.reading import Queue
from tba.engines.transformers import TransformersEngine
from tba.exploration import Exploration
from tba.inflight import Lookout
from tba.policy import copy_out
from tba.reading import read_settings
from tba.records import Completion
from tba.searcher import Searcher
from tba.settings import SettingsError
from tba.weights import Weights
from test_engines import gpt2_policy
from test_searcher import LengthTask

SAMPLES = 3
PROMPTS = [make_prompt(f"p{n}", ids) for n, ids in enumerate(
    [(1, 3, 4, 5, 3), (1,), (1, 5, 4), (1, 4), (1, 3, 3, 3, 3, 3, 3, 3, 3, 3), (1, 4, 4), (1, 5)]
)]
SEEDS = list(range(20, 20 + len(PROMPTS)))
SAMPLING = Sampling(max_new_tokens=9, temperature=TEMPERATURE)
POLICIES: dict[str, Any] = {"llama": llama_policy, "gpt2": gpt2_policy}


def flat(found: list[list[Completion]]) -> list[Completion]:
    return [completion for of_prompt in found for completion in of_prompt]


def generate(engine: TransformersEngine, pause: Pause | None = None) -> list[Completion]:
    return flat(engine.generate(PROMPTS, num_samples=SAMPLES, sampling=SAMPLING, seeds=SEEDS, pause=pause))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [3, 4, 6, 11, 21, 99])
def test_what_is_sampled_does_not_depend_on_the_rows(policy: str, rows: int) -> None:
    everything = generate(TransformersEngine(POLICIES[policy](1)))
    found = generate(TransformersEngine(POLICIES[policy](1), rows))
    assert [c.tokens for c in found] == [c.tokens for c in everything]
    assert [(c.text, c.finish, c.version) for c in found] == [(c.text, c.finish, c.version) for c in everything]
    for one, other in zip(found, everything, strict=True):
        assert one.logps == pytest.approx(other.logps, abs=1e-5)
    assert {len(c.tokens) for c in found} >= {1, 9}  # of very different lengths
    assert {c.finish for c in found} == {"stop", "length"}


def test_with_room_for_all_it_is_the_same_to_the_bit() -> None:
    size = SAMPLES * len(PROMPTS)
    assert generate(TransformersEngine(llama_policy(1), size)) == generate(TransformersEngine(llama_policy(1)))


def widths(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows under way at each draw."""
    from tba.engines import transformers

    seen: list[int] = []

    def draw(logits_NV: torch.Tensor, *given: Any) -> Any:
        seen.append(len(logits_NV))
        return transformers_draw(logits_NV, *given)

    transformers_draw = transformers.draw_ids
    monkeypatch.setattr(transformers, "draw_ids", draw)
    generate(engine)
    return seen


def test_a_long_completion_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [len(c.tokens) for c in generate(TransformersEngine(llama_policy(1)))]
    seen = widths(TransformersEngine(llama_policy(1), 6), monkeypatch)
    assert max(seen) <= 6
    assert sum(seen) == sum(lengths)  # each row is drawn for once a token, and never after its end
    batches = [lengths[at : at + 6] for at in range(0, len(lengths), 6)]
    assert len(seen) < sum(map(max, batches))  # fewer steps than batch after batch, each as long as its longest


def test_log_probs_and_versions_are_those_of_the_weights_that_drew_each_token() -> None:
    policies = {10 * seed: llama_policy(seed) for seed in (1, 2, 3)}
    engine = TransformersEngine(llama_policy(1), 6)
    engine.load(copy_out(policies[10].model), 10)
    stops = itertools.count(1)

    def do() -> None:
        if (version := {3: 20, 6: 30}.get(next(stops))) is not None:
            engine.load(copy_out(policies[version].model), version)

    found = generate(engine, Pause(every=2, do=do))
    seen = Counter[tuple[int, ...]]()
    for prompt, of_prompt in zip(PROMPTS, [found[at : at + SAMPLES] for at in range(0, len(found), SAMPLES)],
                                 strict=True):
        assert len({c.version for c in of_prompt}) == 1  # dispatched together
        for completion in of_prompt:
            versions = completion.token_versions or (completion.version,) * len(completion.tokens)
            assert completion.version == versions[0] == min(versions)
            assert list(versions) == sorted(versions)
            expected = {v: p.completion_logps([(prompt.tokens, completion.tokens)])[0] for v, p in policies.items()}
            assert completion.logps == pytest.approx(
                [expected[version][place] for place, version in enumerate(versions)], abs=1e-5)
            seen[tuple(dict.fromkeys(versions))] += 1
    assert {(10,), (10, 20), (30,)} <= set(seen)


def test_a_group_that_began_after_a_load_names_the_weights_that_began_it() -> None:
    old, new = (Weights.of(copy_out(llama_policy(n).model), version=n, round_=n) for n in (1, 2))
    searcher = Searcher(
        engine=TransformersEngine(llama_policy(1), 2), reference=llama_policy(3), task=LengthTask(),
        exploration=Exploration(SAMPLING), num_samples=2, batch_prompts=5, seed=8,
    )
    searcher.adopt(old)
    handed = iter([None, None, (Notice.of(new), ["tensors"])])  # found at the third question
    lookout = Lookout(
        1, ask=lambda: next(handed, (None, [])) or (None, []), is_here=lambda handle: True,
        read=lambda handle: new.tensors if handle == "tensors" else handle,
    )
    leases = [make_lease(prompt, number) for number, prompt in enumerate(PROMPTS[:5])]
    groups = list(searcher.search(leases, lookout=lookout))
    assert (groups[0].version, groups[0].digest) == (1, old.digest)
    assert (groups[-1].version, groups[-1].digest, groups[-1].echoes) == (2, new.digest, ())
    echoed = {echo for group in groups for echo in group.echoes}
    assert echoed == {(2, new.digest)}  # one straddles the load
    for group in groups:
        versions = {v for t in group.trajectories for v in t.completion.token_versions} - {group.version}
        assert {version for version, _ in group.echoes} == versions


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 60), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_queue_hands_out_each_prompt_once_and_never_more_than_there_is_room(
    prompts: int, samples: int, rows: int, random: Any
) -> None:
    queue, handed, alive = Queue(prompts, samples, rows), [], 0
    most = max(rows, samples)
    while queue.waiting:
        if alive == 0 or queue.has_room(alive):
            taken = queue.take(alive)
            assert len(taken) > 0
            handed += taken
            alive += len(taken) * samples
        assert alive <= most
        alive -= random.randint(0, alive)
    assert handed == list(range(prompts))
    assert not queue.has_room(0)


@pytest.mark.parametrize(("mine", "theirs", "drop"), [((3, 7), (2, 4), 0), ((3, 7), (2, 4), 2), ((1, 2), (4, 9), 1)])
def test_caches_end_at_the_same_position(mine: tuple[int, int], theirs: tuple[int, int], drop: int) -> None:
    caches, parts = [RoomyCache(), RoomyCache()], []
    for cache, (rows, width) in zip(caches, (mine, theirs), strict=True):
        keys, values = torch.randn(2, rows, 2, width, 3, generator=torch.Generator().manual_seed(rows))
        parts.append([(keys + layer, values - layer) for layer in (0, 1)])
        for layer, (k, v) in enumerate(parts[-1]):
            cache.update(k, v, layer)
    caches[0].take_in(caches[1], drop)
    width = max(mine[1] - drop, theirs[1])
    for number, both in enumerate(zip(*parts, strict=True)):
        one = torch.ones(mine[0] + theirs[0], 2, 1, 3)
        for got, own, more in zip(caches[0].update(one, one, number), *both, strict=True):
            assert got.shape == (mine[0] + theirs[0], 2, width + 1, 3)
            held = got[:, :, :width]
            assert torch.equal(held[: mine[0], :, width - (mine[1] - drop) :], own[:, :, drop:])
            assert torch.equal(held[mine[0] :, :, width - theirs[1] :], more)
            assert not held[: mine[0], :, : width - (mine[1] - drop)].any()
            assert not held[mine[0] :, :, : width - theirs[1]].any()


def test_rows_without_room_for_a_prompts_completions_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"engine\.rows = 7 has no room for the 8 completions"):
        read_settings("arithmetic", ["search.num_samples=8", "engine.rows=7"])
    with pytest.raises(SettingsError, match=r"engine\.rows = 64 is for engine\.name=transformers or vllm, not table"):
        read_settings("enumerable", ["engine.name=table", "engine.rows=64"])
