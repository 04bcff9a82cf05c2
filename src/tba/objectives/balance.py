"""Trajectory balance, with the log partition function estimated from the group or learned."""

# Shape legend: N trajectories of a batch (rows of one group id form one group).

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from tba.objectives.groups import Objective, check_positive, group_mean, mean_over_groups

TARGET = "the target is pi_ref exp(reward / beta)"


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
    factor = _factor(beta, scale)
    log_ratio = logp - ref_logp
    log_z = group_mean((reward / beta - log_ratio).detach(), group)
    residual = log_z + log_ratio - reward / beta
    loss = factor * mean_over_groups(residual.square(), group)
    return Objective(loss=loss, residual=residual.detach(), log_z=log_z)


def trajectory_balance_learned_z(
    logp: Float[Tensor, " N"],
    ref_logp: Float[Tensor, " N"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    log_z: Float[Tensor, " N"],
    *,
    beta: float,
    scale: str = "advantage",
) -> Objective:
    """Trajectory balance with a learned log partition function::

        delta_j = log_z_j + logp_j - ref_logp_j - reward_j / beta
        loss    = mean over groups of (beta / 2) mean_j delta_j^2

    Source: arXiv 2201.13259, for pi_ref exp(reward / beta); red-teaming in arXiv 2405.18540 learns
    log Z this way. Nothing is detached: the gradient with respect to log_z of a group is beta mean_j delta_j over
    the number of groups. Residuals of a group no longer sum to zero, so that an error of log Z moves every
    completion of the group up or down together.

    Differs from the source in the factor beta / 2, as `trajectory_balance` does, and in that groups of one row
    are left out.

    Args:
        logp: log pi(y_j), nats, stop token included; carries the gradient.
        ref_logp: log pi_ref(y_j), nats, at the same temperature.
        reward: reward units; finite.
        group: any integers; equal ones form a group.
        log_z: log Z of each row's prompt, nats; may carry a gradient.
        beta: reward units per nat, positive.
        scale: `advantage` or `paper`.

    Raises:
        ValueError: `beta` is not positive, or `scale` is unknown.
    """
    factor = _factor(beta, scale)
    residual = log_z + logp - ref_logp - reward / beta
    loss = factor * mean_over_groups(residual.square(), group)
    return Objective(loss=loss, residual=residual.detach(), log_z=log_z.detach())


def _factor(beta: float, scale: str) -> float:
    check_positive(beta, TARGET)
    if scale not in ("advantage", "paper"):
        raise ValueError(f"objective.scale = {scale!r} is unknown; known: advantage, paper.")
    return beta / 2 if scale == "advantage" else 1.0
