"""Supervised warm start: a model learns a task's demonstrations before TBA improves it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from tba.batch import make_rows
from tba.policy import Policy
from tba.records import Prompt
from tba.settings import Settings, SettingsError
from tba.tasks.protocol import Task

WARMUP_SHARE = 0.05
"""Share of the steps over which the learning rate rises."""


@runtime_checkable
class Demonstrates(Protocol):
    """A task that can write completions to imitate."""

    def demonstration(self, prompt: Prompt, rng: random.Random, wrong_share: float) -> str:
        """Text of one completion; wrong in `wrong_share` of the cases."""
        ...


def demonstrations_of(task: Task) -> Demonstrates:
    """`task` as a source of demonstrations.

    Raises:
        SettingsError: it has none.
    """
    if not isinstance(task, Demonstrates):
        raise SettingsError([f"task {type(task).__name__} has no demonstrations to imitate; tba sft needs some."])
    return task


def sft(policy: Policy, task: Task, prompts: Sequence[Prompt], settings: Settings) -> Iterator[dict[str, Any]]:
    """Trains `policy` in place on demonstrations of `prompts`; yields step, loss (nats per token) and rate.

    The prompt is masked: only completion tokens, stop token included, are imitated. Every step draws its
    prompts and their demonstrations anew, as a function of the seed and the step.
    """
    teacher, sft = demonstrations_of(task), settings.sft
    stop = policy.tokenizer.eos_token_id
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=sft.learning_rate, betas=(0.9, 0.98), weight_decay=sft.weight_decay, fused=True
    )
    for step in range(1, sft.steps + 1):
        rng = random.Random(f"sft {settings.seed} {step}")
        pairs = []
        for prompt in rng.choices(prompts, k=sft.batch_size):
            text = teacher.demonstration(prompt, rng, sft.wrong_share)
            ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
            pairs.append((prompt.tokens, (*ids, stop)))
        rate = learning_rate_at(step, sft.steps, sft.learning_rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss = _backward(policy, pairs, settings.trainer.micro_batch_tokens)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield {"step": step, "loss": loss, "learning_rate": rate}


def _backward(policy: Policy, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], max_tokens: int) -> float:
    """Adds the gradient of the mean loss per completion token, in pieces of `max_tokens`; returns that mean, nats."""
    tokens = sum(len(completion) for _, completion in pairs)
    step = max(1, max_tokens // max(len(prompt) + len(completion) for prompt, completion in pairs))
    total = 0.0
    for at in range(0, len(pairs), step):
        loss = -policy.token_logps(make_rows(pairs[at : at + step])).sum() / tokens
        loss.backward()
        total += float(loss.detach())
    return total


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5 % of the steps, then a half cosine to zero; steps count from 1."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
