"""Pure functions from log-probs and rewards to a loss: trajectory balance and its rivals."""

# Shape legend: N trajectories of a batch (rows of one group id form one group), G groups.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What an objective makes of a batch."""

    loss: Float[Tensor, ""]
    """Scalar to descend; the mean over groups of at least two trajectories."""
    residual: Float[Tensor, " N"]
    """delta_j of DESIGN section 4, nats; zero at the optimum. Detached."""
    log_z: Float[Tensor, " N"]
    """Each row's estimate of its group's log partition function, nats. Detached."""


def trajectory_balance(
    logp: Float[Tensor, " N"],
    ref_logp: Float[Tensor, " N"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
    scale: str = "advantage",
) -> Objective:
    """Trajectory balance with the log partition function estimated from the group.

    For a group of K rows, with l_j = logp_j - ref_logp_j::

        logZ^   = mean_j(reward_j / beta - l_j)        detached
        delta_j = logZ^ + l_j - reward_j / beta
        loss    = mean over groups of (beta / 2) mean_j delta_j^2

    Source: arXiv 2503.18929, equations 3 to 5 (VarGrad). Detaching logZ^ changes no gradient, since the
    residuals of a group sum to zero. The gradient is -(1/K) sum_j A_j grad logp_j with
    A_j = (reward_j - mean) - beta (l_j - mean), for data of any age.

    Differs from the paper in the factor beta / 2, which keeps the reward's part of the gradient the same
    when beta is annealed; `scale="paper"` drops it. Rows may come in any order. A group of one row has no
    gradient and is not in the denominator; without any other group the loss is zero.

    Args:
        logp: log pi(y_j), nats, summed over completion tokens, stop token included; carries the gradient.
        ref_logp: log pi_ref(y_j), nats, at the same temperature.
        reward: reward units; finite.
        group: any integers; equal ones form a group.
        beta: reward units per nat, positive.
        scale: `advantage` or `paper`.

    Raises:
        ValueError: `beta` is not positive, or `scale` is unknown.
    """
    if not beta > 0:
        raise ValueError(f"objective.beta = {beta} must be positive: the target is pi_ref exp(reward / beta).")
    if scale not in ("advantage", "paper"):
        raise ValueError(f"objective.scale = {scale!r} is unknown; known: advantage, paper.")
    log_ratio = logp - ref_logp
    log_z = group_mean((reward / beta - log_ratio).detach(), group)
    residual = log_z + log_ratio - reward / beta
    factor = beta / 2 if scale == "advantage" else 1.0
    loss = factor * mean_over_groups(residual.square(), group)
    return Objective(loss=loss, residual=residual.detach(), log_z=log_z)


def group_mean(value: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Each row's group mean of `value`."""
    index, size = _dense(group)
    total = value.new_zeros(len(size)).index_add(0, index, value)
    return (total / size.to(value.dtype))[index]


def mean_over_groups(value: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, ""]:
    """Mean over groups of at least two rows of the group mean of `value`; zero if there is none."""
    index, size = _dense(group)
    weight = torch.where(size >= 2, 1.0 / size.to(value.dtype), torch.zeros_like(size, dtype=value.dtype))
    counted = (size >= 2).sum().clamp(min=1).to(value.dtype)
    return (value * weight[index]).sum() / counted


def _dense(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Int[Tensor, " G"]]:
    """Group ids as 0..G-1, and each group's size."""
    _, index, size = cast(
        tuple[Tensor, Tensor, Tensor],
        torch.unique(group, return_inverse=True, return_counts=True),  # pyright: ignore[reportUnknownMemberType]
    )
    return index, size


OBJECTIVES: dict[str, Callable[..., Objective]] = {"trajectory_balance": trajectory_balance}
"""Objectives by `objective.name`."""
