"""A vLLM server as engine: the contract of every engine over HTTP, weights through a folder, replies that lie."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import test_engines
from support import STOP, llama_policy, make_prompt
from tba.engine_settings import EngineSettings, ServerSettings
from tba.engines.foreign import WrongCanaryError
from tba.engines.vllm_server import ServerFailedError, VllmServerEngine
from tba.limits import Limits
from tba.lora import add_adapter
from tba.policy import Policy, copy_out
from tba.reading import read_settings
from tba.sections import LoraSettings
from tba.settings import SettingsError
from test_engines import PLAIN, PROMPTS, generate, ids, pairs
from vllm_stand_in import StandIn, serving


def with_adapter(seed: int) -> Policy:
    policy = llama_policy(seed)
    return dataclasses.replace(policy, model=add_adapter(policy.model, LoraSettings(rank=2), seed=0))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., tuple[StandIn, VllmServerEngine]]]:
    """Starts a stand-in and an engine that speaks to it."""
    closing: list[Callable[[], Any]] = []

    def start(policy: Policy, served: Policy | None = None, **changes: Any) -> tuple[StandIn, VllmServerEngine]:
        stand_in = StandIn(served or policy.frozen_copy(), "base")
        context = serving(stand_in)
        url = context.__enter__()
        closing.append(lambda: context.__exit__(None, None, None))
        server = ServerSettings(endpoint=url, served_model="base", folder=str(tmp_path), retries=1, backoff_s=0.0,
                                limit_s=20.0, **changes)
        engine = VllmServerEngine(policy, options=EngineSettings(name="vllm_server", server=server))
        closing.append(engine.close)
        return stand_in, engine

    yield start
    for close in reversed(closing):
        close()


# ---- the contract: the same functions, with one more kind -----------------------------------------

SHARED = [
    "test_it_is_an_engine", "test_completions_are_a_function_of_the_seed", "test_log_probs_are_those_of_the_policy",
    "test_the_stop_token_ends_a_completion_and_belongs_to_it", "test_any_of_several_stop_ids_ends_a_completion_b05",
    "test_a_completion_of_one_id", "test_a_prompts_completions_do_not_depend_on_its_neighbours",
    "test_load_makes_the_samples_those_of_a_fresh_engine", "test_load_copies",
    "test_it_shows_the_weights_it_holds_as_copies", "test_weights_that_do_not_fit_leave_it_as_it_was",
    "test_temperature_zero_takes_the_most_likely_id", "test_another_sampling_distribution_has_its_own_log_probs",
    "test_log_probs_after_a_load_are_the_new_policys_of_the_same_ids",
]
globals().update({name: getattr(test_engines, name) for name in SHARED})


@pytest.fixture(params=["vllm_server"])
def kind(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, up: Callable[..., tuple[StandIn, VllmServerEngine]]
) -> str:
    monkeypatch.setitem(test_engines.KINDS, "vllm_server", (lambda policy: up(policy)[1], llama_policy))
    return request.param


# ---- weights --------------------------------------------------------------------------------------


def test_an_adapter_gets_a_name_of_its_own_for_each_version(
    up: Callable[..., tuple[StandIn, VllmServerEngine]], tmp_path: Path
) -> None:
    policy = with_adapter(1)
    stand_in, engine = up(policy)
    plain = ids(generate(engine))
    rng = np.random.default_rng(3)
    tensors = {name: rng.normal(0, 0.5, t.shape).astype(np.float32) for name, t in copy_out(policy.model).items()}
    engine.load(tensors, 7)
    found = generate(engine)
    assert ids(found) != plain
    for prompt, completion in pairs(found):
        ((logps),) = policy.completion_logps([(prompt.tokens, completion.tokens)])
        assert completion.logps == pytest.approx(logps, abs=1e-5)
    names = [request["lora_name"] for path, request in stand_in.asked if path == "/v1/load_lora_adapter"]
    assert len(set(names)) == len(names) == 2
    assert set(stand_in.adapters) == {"base", names[1]}  # the one before is taken off
    engine.close()
    assert set(stand_in.adapters) == {"base"}
    assert not list(tmp_path.iterdir())  # nothing is left in the folder


def test_whole_weights_are_reloaded_and_the_cache_of_prompts_reset(
    up: Callable[..., tuple[StandIn, VllmServerEngine]]
) -> None:
    stand_in, engine = up(llama_policy(1))
    engine.load(copy_out(llama_policy(2).model), 5)
    paths = [path for path, _ in stand_in.asked]
    assert paths[-3:] == ["/collective_rpc", "/reset_prefix_cache", "/v1/completions"]  # the last is the canary


def test_a_server_with_another_model_is_found_on_the_canary(
    up: Callable[..., tuple[StandIn, VllmServerEngine]]
) -> None:
    with pytest.raises(WrongCanaryError, match="differ from those of the weights"):
        up(llama_policy(1), llama_policy(2))


def test_an_update_that_the_server_only_says_it_made_is_found(
    up: Callable[..., tuple[StandIn, VllmServerEngine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, engine = up(llama_policy(1))
    monkeypatch.setattr(stand_in.policy.model, "load_state_dict", lambda *given, **more: None)
    with pytest.raises(WrongCanaryError):
        engine.load(copy_out(llama_policy(2).model), 5)
    assert engine.version == 0


# ---- requests and replies -------------------------------------------------------------------------


def test_limits_are_asked_for_and_the_forced_stop_is_ours(
    up: Callable[..., tuple[StandIn, VllmServerEngine]]
) -> None:
    stand_in, engine = up(dataclasses.replace(llama_policy(1), limits=Limits(first=2, last=4)),
                          served=llama_policy(1))
    found = [c for _, c in pairs(generate(engine, num_samples=8))]
    asked = [request for path, request in stand_in.asked if "seed" in request]
    assert {(r["min_tokens"], r["max_tokens"], r["ignore_eos"]) for r in asked} == {(2, 4, True)}
    assert {tuple(r["stop_token_ids"]) for r in asked} == {(STOP,)}
    assert len({r["seed"] for r in asked}) == 24
    assert all(c.tokens[-1] == STOP and c.finish == "stop" and len(c.tokens) <= 5 for c in found)


LIES: dict[str, Any] = {
    "no choices": {"choices": []},
    "ids that are text": {"choices": [{"token_ids": ["3"], "logprobs": {"token_logprobs": [-1.0]}}]},
    "a negative id": {"choices": [{"token_ids": [-3], "logprobs": {"token_logprobs": [-1.0]}}]},
    "a log-prob above zero": {"choices": [{"token_ids": [3], "logprobs": {"token_logprobs": [0.5]}}]},
    "no number": {"choices": [{"token_ids": [3], "logprobs": {"token_logprobs": [float("nan")]}}]},
    "no log-probs": {"choices": [{"token_ids": [3], "logprobs": None}]},
    "a page": ["<html>"],
}


@pytest.mark.parametrize("lie", LIES)
def test_replies_that_are_none_end_in_one_message(
    lie: str, up: Callable[..., tuple[StandIn, VllmServerEngine]]
) -> None:
    stand_in, engine = up(llama_policy(1))
    stand_in.twist = lambda path, request, reply: LIES[lie]
    with pytest.raises(ServerFailedError, match=r"/v1/completions failed for 18 of 18 calls: bad_reply"):
        generate(engine)


@pytest.mark.parametrize("tokens", [[], [3] * 9, [STOP, 3]])
def test_too_few_too_many_and_what_goes_on_after_a_stop_is_refused(
    tokens: list[int], up: Callable[..., tuple[StandIn, VllmServerEngine]]
) -> None:
    stand_in, engine = up(llama_policy(1))
    stand_in.twist = lambda path, request, reply: {
        "choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": [-1.0] * len(tokens)}}]}
    with pytest.raises(ValueError, match=r"where 1 to 5 were asked for"):
        generate(engine)


def test_a_refusal_says_what_the_server_needs(up: Callable[..., tuple[StandIn, VllmServerEngine]]) -> None:
    stand_in, engine = up(llama_policy(1))
    stand_in.twist = lambda path, request, reply: 404 if path == "/collective_rpc" else reply
    with pytest.raises(ServerFailedError, match=r"refused, status 404.*whole weights need VLLM_SERVER_DEV_MODE=1"):
        engine.load(copy_out(llama_policy(2).model), 5)


def test_a_call_that_fails_once_is_repeated(up: Callable[..., tuple[StandIn, VllmServerEngine]]) -> None:
    stand_in, engine = up(llama_policy(1))
    expected, failed = ids(generate(engine)), set[int]()

    def twist(path: str, request: dict[str, Any], reply: Any) -> Any:
        seed = request.get("seed", 0)
        if seed in failed:
            return reply
        failed.add(seed)
        return 503

    stand_in.twist = twist
    assert ids(generate(engine)) == expected
    assert len(failed) == 18


def test_what_does_not_fit_into_the_context_is_refused(up: Callable[..., tuple[StandIn, VllmServerEngine]]) -> None:
    _, engine = up(llama_policy(1))
    with pytest.raises(ValueError, match=r"'long' has 30 tokens, with 5 new ones more than the 32"):
        engine.generate([make_prompt("long", (1,) * 30)], num_samples=1, sampling=PLAIN, seeds=[1])
    assert len(generate(engine)) == len(PROMPTS)


# ---- settings -------------------------------------------------------------------------------------


def test_a_server_that_is_not_described_is_refused_with_everything_that_lacks(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings("arithmetic", ["engine.name=vllm_server", f"engine.server.folder={tmp_path / 'none'}"])
    text = str(caught.value)
    for said in ("engine.server.endpoint is missing", "engine.server.served_model is missing",
                 f"engine.server.folder = {str(tmp_path / 'none')!r} is no folder"):
        assert said in text


def test_vllm_that_is_not_installed_is_refused_before_a_model_loads() -> None:
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(SettingsError, match=r"engine\.name = vllm: vLLM is not installed here"):
            read_settings("arithmetic", ["engine.name=vllm"])
    else:
        assert read_settings("arithmetic", ["engine.name=vllm"]).engine.name == "vllm"
