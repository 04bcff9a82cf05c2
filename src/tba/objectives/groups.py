"""What all objectives share: sums and means over groups, the weight of a token, the result."""

# Shape legend: N trajectories of a batch (rows of one group id form one group), G groups, T positions.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STD_FLOOR = 1e-6
"""Added to the standard deviation that rewards are divided by, reward units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What an objective makes of a batch."""

    loss: Float[Tensor, ""]
    """Scalar to descend; groups of fewer than two trajectories have no part in it."""
    residual: Float[Tensor, " N"]
    """delta_j of DESIGN section 4, nats; zero at pi_ref exp(reward / beta). Detached; NaN where beta is 0."""
    log_z: Float[Tensor, " N"]
    """log Z of each row's group, nats: estimated from it, or learned. Detached; NaN where beta is 0."""
    cut: Int[Tensor, " N"] | None = None
    """Tokens of each row whose importance ratio was cut; None for objectives without a ratio."""


def group_mean(value: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Each row's group mean of `value`."""
    index, size = dense(group)
    total = value.new_zeros(len(size)).index_add(0, index, value)
    return (total / size.to(value.dtype))[index]


def centred(value: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Each row's distance from its group's mean of `value`."""
    return value - group_mean(value, group)


def group_size(group: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Rows of each row's group."""
    index, size = dense(group)
    return size[index]


def mean_over_groups(value: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, ""]:
    """Mean over groups of at least two rows of the group mean of `value`; zero if there is none."""
    index, size = dense(group)
    weight = torch.where(size >= 2, 1.0 / size.to(value.dtype), torch.zeros_like(size, dtype=value.dtype))
    counted = (size >= 2).sum().clamp(min=1).to(value.dtype)
    return (value * weight[index]).sum() / counted


def dense(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Int[Tensor, " G"]]:
    """Group ids as 0..G-1, and each group's size."""
    _, index, size = cast(
        tuple[Tensor, Tensor, Tensor],
        torch.unique(group, return_inverse=True, return_counts=True),  # pyright: ignore[reportUnknownMemberType]
    )
    return index, size


def token_weight(
    mask: Bool[Tensor, "N T"],
    group: Int[Tensor, " N"],
    normalise: str | float,
    *,
    num_groups: int | None = None,
    num_tokens: int | None = None,
) -> Float[Tensor, "N T"]:
    """Share of each token in the loss: the loss of a token-level objective is a sum over tokens of weight x term.

    `sequence`: the mean over groups of the mean over their rows of the mean over a row's tokens. `token`: the mean
    over all tokens. A number: the mean over groups of the mean over rows of the sum over tokens, divided by it.
    Rows of a group of one weigh nothing, and their tokens are not counted. In float64.

    Args:
        mask: completion tokens, stop token included.
        group: any integers; equal ones form a group.
        normalise: `sequence`, `token`, or a number of tokens.
        num_groups: groups of at least two rows in the whole batch, if these rows are a part of it.
        num_tokens: completion tokens of those groups, likewise.

    Raises:
        ValueError: `normalise` is none of these.
    """
    size = group_size(group)
    counts = mask & (size >= 2)[:, None]
    length = counts.sum(-1)
    if normalise == "token":
        total = int(length.sum()) if num_tokens is None else num_tokens
        return counts.double() / max(1, total)
    if normalise != "sequence" and not (isinstance(normalise, float | int) and normalise > 0):
        raise ValueError(f"objective.normalise = {normalise!r} must be sequence, token or a positive number of tokens.")
    per_row = length.clamp(min=1).double() if normalise == "sequence" else float(normalise)
    groups = int((dense(group)[1] >= 2).sum()) if num_groups is None else num_groups
    return counts.double() / (per_row * size.double() * max(1, groups))[:, None]


def found(
    loss: Float[Tensor, ""],
    log_ratio: Float[Tensor, " N"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    beta: float,
    cut: Int[Tensor, " N"] | None = None,
) -> Objective:
    """The result of an objective, with residuals about the group's own log Z; `log_ratio` is log pi - log pi_ref."""
    balance = log_ratio.detach() - reward / beta if beta else torch.full_like(reward, math.nan)
    log_z = -group_mean(balance, group)
    return Objective(loss=loss, residual=log_z + balance, log_z=log_z, cut=cut)


def check_positive(beta: float, why: str) -> None:
    """Refuses a beta that is not positive."""
    if not beta > 0:
        raise ValueError(f"objective.beta = {beta} must be positive: {why}.")
