"""Small makers that tests share: records, draws, tiny policies, settings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from tba.buffer.entries import Draw
from tba.policy import Policy, load_policy
from tba.records import Completion, Finish, Group, Lease, Prompt, Trajectory
from tba.settings import ArchitectureSettings, Settings

LETTERS = "abcdefgh"
"""Alphabet of the tiny policies; with pad 0, bos 1 and eos 2 the ids are 3 to 10."""
STOP = 2
TEMPERATURE = 0.7
"""Of the tiny policies: not 1, so that a formula without it shows."""


# ---- records ------------------------------------------------------------------------------------


def make_prompt(id: str = "p", tokens: Sequence[int] = (1, 3, 4), **columns: object) -> Prompt:
    return Prompt(id=id, tokens=tuple(tokens), text=id, columns=columns)


def make_completion(
    tokens: Sequence[int] = (5, STOP), *, version: int = 0, finish: Finish = "stop", text: str = "",
    logps: Sequence[float] | None = None,
) -> Completion:
    logps = [-0.25 * (n + 1) for n in range(len(tokens))] if logps is None else logps
    return Completion(tokens=tuple(tokens), text=text, logps=tuple(logps), version=version, finish=finish)


def make_trajectory(
    prompt_id: str = "p", tokens: Sequence[int] = (5, STOP), *, reward: float = 0.0, ref_logp: float = -1.5,
    version: int = 0, logps: Sequence[float] | None = None,
) -> Trajectory:
    completion = make_completion(tokens, version=version, logps=logps)
    return Trajectory(prompt_id=prompt_id, completion=completion, reward=reward, ref_logp=ref_logp)


def make_group(prompt: Prompt, trajectories: Sequence[Trajectory], **fields: Any) -> Group:
    return Group(prompt=prompt, trajectories=tuple(trajectories), **fields)


def make_draw(prompt: Prompt, trajectories: Sequence[Trajectory], *, sampler: str = "recent") -> Draw:
    size = len(trajectories)
    return Draw(
        prompt=prompt, trajectories=tuple(trajectories), sampler=sampler, prompt_probability=0.5,
        item_probabilities=(1 / size,) * size, ages=(0,) * size, uses=tuple(range(size)),
    )


def make_lease(prompt: Prompt, number: int = 0, *, visit: int = 0, attempt: int = 0) -> Lease:
    return Lease(prompt=prompt, visit=visit, attempt=attempt, number=number, round=0)


def random_draws(sizes: Sequence[int], *, seed: int = 0, longest: int = 6) -> list[Draw]:
    """One draw per size: prompts and completions of unequal lengths, pad, bos and stop ids inside them."""
    rng = random.Random(seed)
    draws = []
    for number, size in enumerate(sizes):
        prompt = make_prompt(f"p{number}", [1, *rng.choices(range(3, 11), k=rng.randint(1, 4))])
        made = [
            make_trajectory(
                prompt.id, rng.choices(range(11), k=rng.randint(1, longest)), reward=rng.gauss(0.3, 1.0),
                ref_logp=rng.uniform(-9.0, -2.0), version=rng.randint(0, 3),
            )
            for _ in range(size)
        ]
        draws.append(make_draw(prompt, made))
    return draws


# ---- policies -----------------------------------------------------------------------------------


def llama_policy(seed: int = 0, *, temperature: float = TEMPERATURE, sharpness: float = 4.0) -> Policy:
    """A two-layer Llama of width 16 whose matrices are scaled up, so that its distributions are far from flat."""
    shape = ArchitectureSettings(layers=2, width=16, heads=2, positions=32)
    policy = load_policy("new-llama", architecture=shape, characters=LETTERS, seed=seed, temperature=temperature)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(sharpness)
    return policy


def table_policy(
    seed: int = 0, *, temperature: float = TEMPERATURE, characters: str = "abc", positions: int = 5
) -> Policy:
    """A table over pad, bos, eos and `characters`."""
    shape = ArchitectureSettings(positions=positions)
    return load_policy("new-table", architecture=shape, characters=characters, seed=seed, temperature=temperature)


def wide_table(seed: int, **options: Any) -> Policy:
    """A table over more letters, of fewer places."""
    return table_policy(seed, characters=LETTERS, positions=4, **options)


def make_settings(**sections: Any) -> Settings:
    """Settings with some sections given as dictionaries; `async_` is `async`."""
    return Settings.model_validate({name.rstrip("_"): value for name, value in sections.items()})


# ---- slow twins ---------------------------------------------------------------------------------


def slow_logps(policy: Policy, prompt: Sequence[int], completion: Sequence[int]) -> list[torch.Tensor]:
    """Log-prob of each completion id: one unpadded forward, float64 from the logits on."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = policy.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    found = []
    for place, token in enumerate(completion):
        row = logits[len(prompt) - 1 + place].double() / policy.temperature
        found.append(row[token] - row.logsumexp(0))
    return found
