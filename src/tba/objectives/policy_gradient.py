"""Objectives whose gradient is an advantage times grad log pi, and the preference of best to worst."""

# Shape legend: N trajectories of a batch (rows of one group id form one group), T positions.

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tba.objectives.groups import (
    Objective,
    centred,
    check_positive,
    dense,
    found,
    group_mean,
    group_size,
    mean_over_groups,
)


def reinforce(
    logp: Float[Tensor, " N"],
    ref_logp: Float[Tensor, " N"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
) -> Objective:
    """REINFORCE with the group's mean as baseline and KL in the reward::

        f_j  = reward_j - beta (logp_j - ref_logp_j)                 detached
        A_j  = f_j - mean f
        loss = -mean over groups of mean_j A_j logp_j

    Source: Williams 1992. All of A_j is detached:
    it is a weight, and its derivative has mean zero on policy. The KL is that of the policy of now, so that the
    gradient is that of `trajectory_balance` for any data; on policy its mean is (K - 1) / K of the gradient of
    E reward - beta KL. There is no importance ratio.

    Differs from common practice in that KL is taken under the policy of now, not under the one that sampled.

    Args:
        logp: log pi(y_j), nats, stop token included; carries the gradient.
        ref_logp: log pi_ref(y_j), nats, at the same temperature.
        reward: reward units; finite.
        group: any integers; equal ones form a group.
        beta: reward units per nat; 0 leaves KL out.
    """
    log_ratio = logp - ref_logp
    value = (reward - beta * log_ratio).detach()
    loss = -mean_over_groups(centred(value, group) * logp, group)
    return found(loss, log_ratio, reward, group, beta)


def rloo(
    logp: Float[Tensor, " N"],
    ref_logp: Float[Tensor, " N"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
) -> Objective:
    """REINFORCE with the mean of the *other* rows of the group as baseline::

        f_j  = reward_j - beta (logp_j - ref_logp_j)                 detached
        A_j  = f_j - mean of f over the other rows = (f_j - mean f) K / (K - 1)
        loss = -mean over groups of mean_j A_j logp_j

    Source: arXiv 2402.14740. Detached as in `reinforce`; on policy the mean gradient is exactly that
    of E reward - beta KL.

    Differs from common practice as `reinforce` does. Arguments are those of `reinforce`.
    """
    log_ratio = logp - ref_logp
    value = (reward - beta * log_ratio).detach()
    size = group_size(group).to(logp.dtype)
    advantage = centred(value, group) * size / (size - 1).clamp(min=1)
    return found(-mean_over_groups(advantage * logp, group), log_ratio, reward, group, beta)


def kimi_k15(
    logp: Float[Tensor, " N"],
    ref_logp: Float[Tensor, " N"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
) -> Objective:
    """The squared residual of Kimi k1.5, with the mean reward for beta log Z::

        loss = mean over groups of 1 / (2 beta) mean_j (reward_j - mean reward - beta (logp_j - ref_logp_j))^2

    Source: arXiv 2501.12599, section 2.3.2; beta is its tau. The baseline holds no log-prob, so nothing is to be
    detached. The gradient is -(1/K) sum_j ((reward_j - mean) - beta l_j) grad logp_j, without the mean of l:
    that of `trajectory_balance` where policy and reference agree, elsewhere beta (mean l)(mean grad logp) away.

    Differs from the source in the factor 1 / (2 beta), which its written gradient has too, and in that the reference is
    not always the policy of the last round: set the reference's own settings for that. Its length penalty belongs
    into the reward.

    Args:
        logp: log pi(y_j), nats, stop token included; carries the gradient.
        ref_logp: log pi_ref(y_j), nats, at the same temperature.
        reward: reward units; finite.
        group: any integers; equal ones form a group.
        beta: reward units per nat, positive.

    Raises:
        ValueError: `beta` is not positive.
    """
    check_positive(beta, "the squared residual is divided by it")
    log_ratio = logp - ref_logp
    gap = centred(reward, group) - beta * log_ratio
    loss = mean_over_groups(gap.square(), group) / (2 * beta)
    return found(loss, log_ratio, reward, group, beta)


def tba_prime(
    logps: Float[Tensor, "N T"],
    ref_logp: Float[Tensor, " N"],
    behaviour_logps: Float[Tensor, "N T"] | None,
    weight: Float[Tensor, "N T"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
    ratio: str = "off",
    ratio_max: float = 8.0,
) -> Objective:
    """The large-model variant of the paper: a detached advantage on every token, with an optional truncated ratio.

    With kl_j = sum_t logps_jt - ref_logp_j under the policy of now::

        A_j    = (reward_j - mean reward) - beta (kl_j - mean kl)          detached
        rho_jt = exp(logps_jt - behaviour_logps_jt)
        loss   = -sum_jt weight_jt A_j x  logps_jt                         ratio off
                                          min(rho_jt, ratio_max)           clamp: no gradient where cut
                                          sg(min(rho_jt, ratio_max)) logps_jt     cispo: a gradient everywhere

    Source: arXiv 2503.18929, TBA'; cispo: arXiv 2506.13585. With the ratio off and weights
    of a constant 1, the gradient is that of `trajectory_balance`.

    Differs from the source in that both KL terms are the live policy's (there the mean is the lagged policy's, so
    that advantages have no mean of zero), that log-ratios in KL are not clamped at 10, and that the weight counts
    completion tokens only.

    Args:
        logps: log pi of each token, nats, zero outside completions; carries the gradient.
        ref_logp: log pi_ref(y_j), nats, at the same temperature.
        behaviour_logps: of each token under the distribution that it was drawn from; only read with a ratio.
        weight: share of each token in the loss, from `token_weight`; zero outside completions.
        reward: reward units; finite.
        group: any integers; equal ones form a group.
        beta: reward units per nat; 0 leaves KL out.
        ratio: `off`, `clamp` or `cispo`.
        ratio_max: largest importance ratio of a token.

    Raises:
        ValueError: `ratio` is unknown, or needs behaviour log-probs and there are none.
    """
    log_ratio = logps.sum(-1) - ref_logp
    value = (reward - beta * log_ratio).detach()
    advantage = centred(value, group)[:, None]
    if ratio == "off":
        return found(-(weight * advantage * logps).sum(), log_ratio, reward, group, beta)
    if ratio not in ("clamp", "cispo"):
        raise ValueError(f"objective.ratio = {ratio!r} is unknown; known: off, clamp, cispo.")
    if behaviour_logps is None:
        raise ValueError(f"objective.ratio = {ratio!r} needs behaviour log-probs, and there are none; set it to off.")
    rho = (logps - behaviour_logps).exp()
    cut = ((rho > ratio_max) & (weight > 0)).sum(-1)
    kept = rho.clamp(max=ratio_max)
    term = kept if ratio == "clamp" else kept.detach() * logps
    return found(-(weight * advantage * term).sum(), log_ratio, reward, group, beta, cut)


def online_dpo(
    logp: Float[Tensor, " N"],
    ref_logp: Float[Tensor, " N"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
) -> Objective:
    """Preference of each group's best row to its worst, by reward::

        loss = -mean over groups of log sigmoid(beta (l_best - l_worst)),     l_j = logp_j - ref_logp_j

    Source: arXiv 2402.04792; on K completions a prompt and stale data, arXiv 2410.18252. Nothing is detached. The
    loss is in nats: rewards decide who is best, and how much better does not count.

    Differs from the sources where rewards are equal: among several best or worst rows each pair counts its share,
    so that the order of rows does not matter. A flat group has no pair and a loss of zero; it stays in the mean.

    Args:
        logp: log pi(y_j), nats, stop token included; carries the gradient.
        ref_logp: log pi_ref(y_j), nats, at the same temperature.
        reward: reward units; finite.
        group: any integers; equal ones form a group.
        beta: scale of the implicit reward, reward units per nat, positive.

    Raises:
        ValueError: `beta` is not positive.
    """
    check_positive(beta, "it scales the difference that is preferred")
    log_ratio = logp - ref_logp
    index, size = dense(group)
    same_NN = index[:, None] == index
    limits = [torch.where(same_NN, reward, -math.inf).amax(-1), torch.where(same_NN, reward, math.inf).amin(-1)]
    is_best, is_worst = ((reward == limit) & (limits[0] > limits[1]) for limit in limits)
    share_of = [mark / group_mean(mark, group).clamp(min=1e-30) / size[index]
                for mark in (is_best.to(logp.dtype), is_worst.to(logp.dtype))]
    best, worst = is_best.nonzero()[:, 0], is_worst.nonzero()[:, 0]
    same = index[best][:, None] == index[worst]
    pair_weight = same * share_of[0][best][:, None] * share_of[1][worst]
    gap = torch.nn.functional.logsigmoid(beta * (log_ratio[best][:, None] - log_ratio[worst]))
    loss = -(pair_weight * gap).sum() / (size >= 2).sum().clamp(min=1)
    return found(loss, log_ratio, reward, group, beta)
