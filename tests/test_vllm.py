"""vLLM keeps the contract of every engine: the tests are those of `test_engines.py`, run where vLLM is installed."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import test_engines
from support import LETTERS, STOP, TEMPERATURE, make_prompt, slow_logps
from tba.engine_settings import EngineSettings
from tba.engines.foreign import WrongCanaryError
from tba.engines.protocol import Pause
from tba.engines.vllm import VllmEngine
from tba.limits import Limits
from tba.policy import Policy, copy_in, copy_out, load_policy
from tba.records import Completion, Prompt
from tba.sections import LoraSettings
from tba.settings import ArchitectureSettings
from test_engines import PROMPTS, SEEDS, generate, ids, pairs

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.vllm, pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("default"),  # vLLM's own are not ours to mend
]
SHAPE = ArchitectureSettings(layers=2, width=64, heads=2, positions=32)
"""Heads of 32, the narrowest that vLLM's attention has on a CPU."""


def a_policy(seed: int, *, tied: bool = False, rank: int = 0) -> Policy:
    """Far from flat; an adapter of `rank` is seeded too, and changes something."""
    policy = load_policy("new-llama", architecture=SHAPE, characters=LETTERS, seed=seed, temperature=TEMPERATURE)
    if tied:
        policy.model.config.tie_word_embeddings = True
        policy.model.tie_weights()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2.5)
    if not rank:
        return policy
    from tba.lora import add_adapter

    policy = dataclasses.replace(policy, model=add_adapter(policy.model, LoraSettings(rank=rank), seed=0))
    return policy


def with_adapter(policy: Policy, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of an adapter that changes the policy."""
    rng = np.random.default_rng(seed)
    found = copy_out(policy.model)
    return {name: rng.normal(0, 0.3, tensor.shape).astype(np.float32) for name, tensor in found.items()}


@cache
def the_engine() -> VllmEngine:
    """One for all tests of the contract: a start takes seconds."""
    return VllmEngine(a_policy(1))


class InTurn:
    """An engine of its own weights and version, of which many may share the one that is up."""

    holder: InTurn | None = None

    def __init__(self, policy: Policy) -> None:
        self._tensors, self._version, self._policy = copy_out(policy.model), 0, policy
        self.gives_logps = True

    def _mine(self) -> VllmEngine:
        engine = the_engine()
        if InTurn.holder is not self:
            engine._policy = dataclasses.replace(self._policy, model=engine._policy.model)
            engine._policy.model.generation_config = self._policy.model.generation_config
            engine.load(self._tensors, self._version)
            InTurn.holder = self
        return engine

    @property
    def version(self) -> int:
        return self._version

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> list[list[Completion]]:
        return self._mine().generate(prompts, **how)

    def load(self, tensors: Mapping[str, np.ndarray[Any, Any]], version: int) -> None:
        engine = self._mine()
        engine.load(tensors, version)
        self._tensors, self._version = dict(engine.tensors()), version

    def tensors(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return self._mine().tensors()


# ---- the contract: the same functions, with vLLM as one more kind ---------------------------------

SHARED = [
    "test_it_is_an_engine", "test_completions_are_a_function_of_the_seed", "test_log_probs_are_those_of_the_policy",
    "test_the_stop_token_ends_a_completion_and_belongs_to_it", "test_any_of_several_stop_ids_ends_a_completion_b05",
    "test_a_completion_of_one_id", "test_a_prompts_completions_do_not_depend_on_its_neighbours",
    "test_load_makes_the_samples_those_of_a_fresh_engine", "test_load_copies",
    "test_it_shows_the_weights_it_holds_as_copies", "test_weights_that_do_not_fit_leave_it_as_it_was",
    "test_temperature_zero_takes_the_most_likely_id", "test_another_sampling_distribution_has_its_own_log_probs",
    "test_frequencies_of_whole_completions_match_the_policy",
    "test_log_probs_after_a_load_are_the_new_policys_of_the_same_ids",
]
"""All but those that name our own random numbers, which vLLM has others of."""
globals().update({name: getattr(test_engines, name) for name in SHARED})


@pytest.fixture(params=["vllm"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(test_engines.KINDS, "vllm", (InTurn, a_policy))
    InTurn.holder = None
    return request.param


# ---- weights --------------------------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[Callable[..., VllmEngine]]:
    engines: list[VllmEngine] = []

    def start(policy: Policy, **options: Any) -> VllmEngine:
        engines.append(VllmEngine(policy, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("tied", [False, True])
def test_an_update_gives_exactly_what_a_fresh_engine_gives(tied: bool, started: Callable[..., VllmEngine]) -> None:
    engine = started(a_policy(1, tied=tied))
    before = ids(generate(engine))
    engine.load(copy_out(a_policy(2, tied=tied).model), 7)  # the prompts are in the prefix cache, of the old weights
    fresh = started(a_policy(2, tied=tied))
    found, expected = generate(engine), generate(fresh)
    assert ids(found) == ids(expected) != before
    assert [c.logps for _, c in pairs(found)] == [c.logps for _, c in pairs(expected)]
    assert engine.gap <= 1e-3


def test_an_adapter_is_adopted_in_place_and_the_base_stays(started: Callable[..., VllmEngine]) -> None:
    policy = a_policy(1, rank=4)
    engine = started(policy.frozen_copy())
    plain = ids(generate(engine))
    tensors = with_adapter(policy, 5)
    copy_in(policy.model, tensors)
    engine.load(tensors, 3)
    found = generate(engine)
    assert ids(found) != plain  # seen after one load
    for prompt, completion in pairs(found):
        slow = torch.stack(slow_logps(policy, prompt.tokens, completion.tokens)).tolist()
        assert completion.logps == pytest.approx(slow, abs=1e-3)
    engine.load({name: np.zeros_like(tensor) for name, tensor in tensors.items()}, 4)
    assert ids(generate(engine)) == plain  # the base is what it was


def test_a_hundred_updates_leak_nothing(started: Callable[..., VllmEngine]) -> None:
    engine, tensors = started(a_policy(1)), [copy_out(a_policy(seed).model) for seed in (1, 2)]

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for version in range(20):
        engine.load(tensors[version % 2], version)
        generate(engine)
    before = resident()
    for version in range(20, 120):
        engine.load(tensors[version % 2], version)
        generate(engine)
    assert resident() - before < 16 << 20
    assert engine._vllm.unfinished == 0


def test_weights_that_the_engine_does_not_compute_with_are_found_on_the_canary(
    started: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(a_policy(1))
    monkeypatch.setattr(engine._vllm, "adopt", lambda model, version: None)  # an update that is lost on the way
    with pytest.raises(WrongCanaryError, match="differ from those of the weights that the engine was given"):
        engine.load(copy_out(a_policy(2).model), 1)
    assert engine.version == 0


def test_bfloat16_samples_with_its_own_log_probs(started: Callable[..., VllmEngine]) -> None:
    policy = a_policy(1)
    engine = started(policy.frozen_copy(), options=EngineSettings(name="vllm", dtype="bfloat16"))
    gaps = []
    for prompt, completion in pairs(generate(engine)):
        slow = torch.stack(slow_logps(policy, prompt.tokens, completion.tokens)).tolist()
        gaps += [abs(one - other) for one, other in zip(completion.logps, slow, strict=True)]
    assert 1e-4 < max(gaps) < 0.3  # not float32 by another name, and no other policy


# ---- stops, limits, many at a time ----------------------------------------------------------------


def test_what_is_drawn_before_a_load_does_not_depend_on_it(started: Callable[..., VllmEngine]) -> None:
    engine = started(a_policy(1))
    stops: list[int] = []
    unloaded = ids(generate(engine, pause=Pause(every=2, do=lambda: stops.append(1))))
    new, at = copy_out(a_policy(2).model), itertools.count(1)

    def do() -> None:
        if next(at) == 2:
            engine.load(new, 5)

    loaded = [c for _, c in pairs(generate(engine, pause=Pause(every=2, do=do)))]
    assert stops == [1, 1]  # between tokens: not before the first, not after the last
    assert [c.tokens[:4] for c in loaded] == [tokens[:4] for of_prompt in unloaded for tokens in of_prompt]
    assert {c.token_versions for c in loaded} >= {(0, 0, 0, 0, 5), ()}


def test_limits_ban_the_stop_and_force_it(started: Callable[..., VllmEngine]) -> None:
    policy = dataclasses.replace(a_policy(1), limits=Limits(first=2, last=4))
    engine = started(policy.frozen_copy())
    found = [c for _, c in pairs(generate(engine, num_samples=12))]
    assert {len(c.tokens) for c in found} == {3, 4, 5}
    assert all(c.tokens[-1] == STOP and c.finish == "stop" for c in found)
    assert all(c.logps[-1] == 0.0 for c in found if len(c.tokens) == 5)
    for prompt, completion in pairs(generate(engine)):
        ((logps),) = policy.completion_logps([(prompt.tokens, completion.tokens)])
        assert completion.logps == pytest.approx(logps, abs=1e-4)


def test_few_at_a_time_are_the_same(started: Callable[..., VllmEngine]) -> None:
    few, many = started(a_policy(1), rows=3), the_engine()
    many.load(copy_out(a_policy(1).model), 0)
    InTurn.holder = None
    assert ids(generate(few)) == ids(generate(many))


def test_what_does_not_fit_into_the_context_is_refused_and_the_engine_goes_on(
    started: Callable[..., VllmEngine]
) -> None:
    engine = started(a_policy(1))
    with pytest.raises(ValueError, match=r"'long' has 30 tokens, with 5 new ones more than the 32"):
        generate(engine, [make_prompt("long", (1,) * 30)], seeds=[1])
    assert len(generate(engine)) == len(PROMPTS) == len(SEEDS)
    assert {len(c.tokens) for _, c in pairs(generate(engine))} >= {1, 5}


# ---- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["mode=lockstep"], ["mode=lockstep", "policy.lora.rank=4"],
                                   ["mode=async", "engine.adopt_every=4"]])
def test_a_run_samples_with_vllm(words: list[str], tmp_path: Path) -> None:
    from test_cluster import adds_up, execute

    summary, steps, notes = execute(
        tmp_path / "run", "arithmetic", *words, "engine.name=vllm", "model=new-llama", "architecture.width=64",
        "architecture.heads=2", "async.threads=1", "trainer.steps=6", "trainer.sync_every=2", "evaluation.prompts=4",
        "trainer.groups_per_step=8", "search.batch_prompts=8", "evaluation.every=0",
    )
    assert summary["status"] == "done", notes
    assert len(steps) == 6
    assert adds_up(summary["ledger"])
    assert summary["ledger"]["trajectories"]["rejected"] == {}
    gaps = [step["train/logp_gap"] for step in steps if step["train/logp_gap"] is not None]
    assert gaps
    assert max(gaps) <= 1e-3
