"""Log-probs from hidden states piece by piece: the same numbers and slopes as from all logits, in little memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support import STOP, TEMPERATURE, llama_policy, table_policy
from tba import policy as policy_module
from tba.batch import make_rows
from tba.head import Head, head_of, target_logps
from tba.limits import FREE, Limits
from tba.policy import Policy, load_policy
from tba.sections import LoraSettings
from tba.settings import ArchitectureSettings

NUM_PLACES, WIDTH, VOCABULARY = 11, 5, 37
LONG, SHORT = (1, 3, 4, 3, 5, 3), (1, 5, 3, 5)
SIBLINGS = [
    (LONG, (5, 0, STOP)), (LONG, (STOP,)), (SHORT, (4, 4, 4, 0)), (SHORT, (3, STOP)),
    (LONG, (0, 5, 5, 3)), (SHORT, (STOP,)), (LONG, (4, STOP)), (SHORT, (0, STOP)),
]
APART = [((1, 3), (5, 4, 4, 0, STOP)), ((1, 4), (4, STOP))]


def made(*, bias: bool = True, seed: int = 3) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A head, hidden states, targets, and what each log-prob counts in a sum."""
    torch.manual_seed(seed)
    linear = torch.nn.Linear(WIDTH, VOCABULARY, bias=bias)
    hidden = (3 * torch.randn(NUM_PLACES, WIDTH)).requires_grad_()
    return linear, hidden, torch.randint(VOCABULARY, (NUM_PLACES,)), torch.randn(NUM_PLACES)


def slopes(logps: torch.Tensor, weight_M: torch.Tensor, *wanted: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.autograd.grad((logps * weight_M).sum(), [x for x in wanted if x is not None]))


def naive(
    linear: torch.nn.Linear, hidden: torch.Tensor, target: torch.Tensor, limits: Limits = FREE,
    place: torch.Tensor | None = None, stop: torch.Tensor | None = None,
) -> torch.Tensor:
    logits = linear(hidden)
    if place is not None and stop is not None:
        logits = limits.banned(logits, place, stop)
    return target_logps(logits[None], target[None], torch.ones(1, len(target), dtype=torch.bool), 0.7)[0]


def test_a_log_prob_worked_out_by_hand() -> None:
    linear = torch.nn.Linear(3, 3, bias=False)
    linear.weight.data = torch.eye(3)
    found = Head(body=None, linear=linear).logps(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), 0.5)
    assert found.tolist() == pytest.approx([-0.142932], abs=1e-6)  # -log(1 + e^-2 + e^-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_values_and_slopes_are_those_of_all_logits(bias: bool, is_frozen: bool, rows: int) -> None:
    linear, hidden, target, weight_M = made(bias=bias)
    linear.requires_grad_(not is_frozen)
    found = Head(body=None, linear=linear).logps(hidden, target, 0.7, piece=rows * VOCABULARY)
    expected = naive(linear, hidden, target)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, atol=1e-5)
    wanted = [hidden] if is_frozen else [hidden, linear.weight, linear.bias]
    for one, other in zip(slopes(found, weight_M, *wanted), slopes(expected, weight_M, *wanted), strict=True):
        assert one.abs().max() > 0.01
        assert torch.allclose(one, other, atol=1e-4)


def test_limits_hold_in_every_piece() -> None:
    linear, hidden, target, weight_M = made()
    target[:] = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5])
    place, stop, limits = torch.arange(NUM_PLACES) % 4, torch.tensor([7, 9]), Limits(first=2)
    found = Head(body=None, linear=linear).logps(
        hidden, target, 0.7, limits=limits, place_M=place, stop_S=stop, piece=3 * VOCABULARY
    )
    expected = naive(linear, hidden, target, limits, place, stop)
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, naive(linear, hidden, target), atol=1e-3)
    wanted = (hidden, linear.weight, linear.bias)
    for one, other in zip(slopes(found, weight_M, *wanted), slopes(expected, weight_M, *wanted), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_autocast_multiplies_in_its_precision_and_sums_in_float32(is_frozen: bool) -> None:
    linear, hidden, target, weight_M = made()
    linear.requires_grad_(not is_frozen)
    with torch.autocast("cpu", torch.bfloat16):
        found = Head(body=None, linear=linear).logps(hidden, target, 0.7, piece=4 * VOCABULARY)
        expected = naive(linear, hidden, target)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, atol=1e-5)  # of the same logits in bfloat16
    assert not torch.allclose(found, naive(linear, hidden, target), atol=1e-3)
    wanted = [hidden] if is_frozen else [hidden, linear.weight]
    for one, other in zip(slopes(found, weight_M, *wanted), slopes(expected, weight_M, *wanted), strict=True):
        assert torch.allclose(one, other, rtol=0.03, atol=0.03)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize("is_frozen", [True, False])
def test_never_more_than_a_piece_of_the_logits_is_there(is_frozen: bool) -> None:
    vocabulary, places, width, rows = 5000, 60, 4, 2
    linear = torch.nn.Linear(width, vocabulary, bias=False).requires_grad_(not is_frozen)
    hidden, target = torch.randn(places, width, requires_grad=True), torch.randint(vocabulary, (places,))
    sizes = []
    for compute in (
        lambda: Head(body=None, linear=linear).logps(hidden, target, 0.7, piece=rows * vocabulary),
        lambda: naive(linear, hidden, target),
    ):
        with Largest() as largest:
            compute().sum().backward()
        sizes.append(largest.numbers)
    assert sizes == [width * vocabulary, places * vocabulary]  # the weight is larger than a piece, 10,000


# ---- which models have such a head --------------------------------------------------------------


def adapted_policy() -> Policy:
    shape = ArchitectureSettings(layers=2, width=16, heads=2, positions=32)
    return load_policy(
        "new-llama", architecture=shape, characters="abcde", seed=1, temperature=TEMPERATURE,
        adapter=LoraSettings(rank=3),
    )


def test_a_llama_has_a_head_of_its_own_with_and_without_adapter() -> None:
    for policy in (llama_policy(3), adapted_policy()):
        inner = policy.model.get_base_model() if hasattr(policy.model, "get_base_model") else policy.model
        found = head_of(policy.model)
        assert found is not None
        assert found.linear is inner.lm_head
        assert found.body is inner.model


def test_a_head_that_is_adapted_or_missing_is_left_to_the_model() -> None:
    assert head_of(table_policy(3).model) is None
    adapted = llama_policy(3).model
    adapted.lm_head = torch.nn.Sequential(adapted.lm_head)
    assert head_of(adapted) is None


@pytest.mark.parametrize("change", [lambda z: 30 * torch.tanh(z / 30), lambda z: 0.99 * z, lambda z: z + 0.01])
def test_logits_that_are_changed_after_the_head_are_left_to_the_model(change: Any) -> None:
    model = llama_policy(3).model

    def changed(module: Any, args: Any, given: Any, output: Any) -> Any:
        output.logits = change(output.logits)
        return output

    model.register_forward_hook(changed, with_kwargs=True)
    assert head_of(model) is None


def test_hidden_states_that_are_changed_before_the_head_are_left_to_the_model() -> None:
    model = llama_policy(3).model
    model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert head_of(model) is None


def test_trying_leaves_the_model_as_it_was() -> None:
    policy = llama_policy(3)
    before = policy.sequence_logps(SIBLINGS)
    head_of(policy.model)
    assert policy.sequence_logps(SIBLINGS) == before


# ---- the policy's log-probs ---------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [SIBLINGS, APART], ids=["split", "whole"])
@pytest.mark.parametrize("limits", [FREE, Limits(first=1, last=4)])
def test_a_policys_log_probs_are_the_same_by_either_way(
    pairs: Any, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, slope = [], []
    for worth in (2**60, 0):
        monkeypatch.setattr(policy_module, "WORTH", worth)
        policy = dataclasses.replace(llama_policy(3).trainable_copy(), limits=limits)
        assert head_of(policy.model) is not None  # tried: from now on the model is run for log-probs alone
        reads: list[str] = []
        policy.model.register_forward_pre_hook(lambda *_, reads=reads: reads.append("whole model"))
        rows = make_rows(pairs)
        logps_NT = policy.token_logps(rows)
        assert bool(reads) is bool(worth)
        kept_NT = torch.where(logps_NT.isfinite(), logps_NT, 0.0)  # a stop where it is banned
        (kept_NT * torch.linspace(0.3, 1.7, kept_NT.numel()).view_as(kept_NT)).sum().backward()
        found.append(logps_NT.detach())
        slope.append({name: x.grad for name, x in policy.model.named_parameters()})
    assert torch.allclose(*found, atol=1e-5)
    assert not found[1][~rows.completion_NT].any()
    for name, one in slope[0].items():
        assert torch.allclose(one, slope[1][name], atol=1e-4), name
