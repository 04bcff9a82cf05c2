"""Objectives that correct for the age of data by an importance ratio, cut in one way or another."""

# Shape legend: N trajectories of a batch (rows of one group id form one group), T positions.
#
# All take
#   logps            [N T]  log pi of each token, nats, zero outside completions; carries the gradient
#   ref_logps        [N T]  log pi_ref of each token, nats; None where beta is 0
#   behaviour_logps  [N T]  log-prob of each token under the distribution that it was drawn from, nats
#   weight           [N T]  share of each token in the loss, from `token_weight`; zero outside completions
#   reward           [N]    reward units; finite
#   group            [N]    any integers; equal ones form a group
#   beta                    reward units per nat, times the tokens that `weight` divides by; 0 leaves KL out

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.objectives.groups import STD_FLOOR, Objective, centred, found, group_mean

Clip = tuple[float, float]
"""How far a ratio may be below and above 1."""


def grpo(
    logps: Float[Tensor, "N T"],
    ref_logps: Float[Tensor, "N T"] | None,
    behaviour_logps: Float[Tensor, "N T"],
    weight: Float[Tensor, "N T"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
    clip: Clip = (0.2, 0.2),
) -> Objective:
    """Group relative policy optimisation: clipped ratio, rewards divided by their deviation, k3 KL in the loss::

        A_j    = (reward_j - mean reward) / (std reward + 1e-6)
        rho_jt = exp(logps_jt - behaviour_logps_jt)
        k3_jt  = exp(u) - u - 1,  u = ref_logps_jt - logps_jt
        loss   = -sum_jt weight_jt (min(rho_jt A_j, clip(rho_jt, 1 - low, 1 + high) A_j) - beta k3_jt)

    Source: arXiv 2402.03300, equations 3 and 4. Only A is without gradient. std divides by K. A ratio that is cut
    has no gradient, which is what limits a step; a token of A > 0 is cut above, one of A < 0 below.

    Differs from the source in that the old policy is the distribution that sampled, of any age, and in that
    the two clips may differ (arXiv 2503.14476).
    """
    return _clipped(_deviation(reward, group), logps, ref_logps, behaviour_logps, weight, reward, group, beta, clip)


def dr_grpo(
    logps: Float[Tensor, "N T"],
    ref_logps: Float[Tensor, "N T"] | None,
    behaviour_logps: Float[Tensor, "N T"],
    weight: Float[Tensor, "N T"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
    clip: Clip = (0.2, 0.2),
) -> Objective:
    """GRPO without its two biases: no division by the deviation, and weights by a constant::

        A_j  = reward_j - mean reward
        loss = as in `grpo`, with weight from a constant number of tokens

    Source: arXiv 2503.20783, section 3. Detached as in `grpo`.

    Differs from the source in that KL is optional (it has none: beta 0).
    """
    return _clipped(centred(reward, group), logps, ref_logps, behaviour_logps, weight, reward, group, beta, clip)


def ppo_clip(
    logps: Float[Tensor, "N T"],
    ref_logp: Float[Tensor, " N"],
    behaviour_logps: Float[Tensor, "N T"],
    weight: Float[Tensor, "N T"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
    clip: Clip = (0.2, 0.2),
) -> Objective:
    """PPO's clipped ratio with the group's mean for a critic, and KL in the reward, as it was when sampled::

        f_j  = reward_j - beta (sum_t behaviour_logps_jt - ref_logp_j)
        A_j  = f_j - mean f
        loss = -sum_jt weight_jt min(rho_jt A_j, clip(rho_jt, 1 - low, 1 + high) A_j)

    Source: arXiv 1707.06347, equation 7; KL in the reward as in arXiv 2203.02155. `ref_logp` is log pi_ref(y_j),
    nats. A is fixed when sampled and carries no gradient.

    Differs from the source in having no critic: the baseline is the group's, and every token of a completion has
    the whole advantage (lambda = gamma = 1 without a value).
    """
    value = reward - beta * (behaviour_logps.sum(-1) - ref_logp)
    term, cut = _surrogate(logps - behaviour_logps, centred(value, group), weight > 0, clip)
    return found(-(weight * term).sum(), logps.sum(-1) - ref_logp, reward, group, beta, cut)


def cispo(
    logps: Float[Tensor, "N T"],
    ref_logps: Float[Tensor, "N T"] | None,
    behaviour_logps: Float[Tensor, "N T"],
    weight: Float[Tensor, "N T"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
    ratio_max: float = 8.0,
) -> Objective:
    """REINFORCE with a truncated importance weight, so that every token keeps its gradient::

        loss = -sum_jt weight_jt (sg(min(rho_jt, ratio_max)) A_j logps_jt - beta k3_jt)

    with A, rho and k3 of `grpo`. Source: arXiv 2506.13585. The ratio is detached: it weighs, and is
    not itself moved.

    Differs from the source in that `ratio_max` is the bound itself, that there is no lower bound (the source's is
    never reached), and that KL is optional (it has none: beta 0).
    """
    ratio = (logps - behaviour_logps).exp().detach()
    cut = ((ratio > ratio_max) & (weight > 0)).sum(-1)
    term = ratio.clamp(max=ratio_max) * _deviation(reward, group)[:, None] * logps
    return _with_kl(term, logps, ref_logps, weight, reward, group, beta, cut)


def gspo(
    logps: Float[Tensor, "N T"],
    ref_logps: Float[Tensor, "N T"] | None,
    behaviour_logps: Float[Tensor, "N T"],
    weight: Float[Tensor, "N T"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    *,
    beta: float,
    clip: Clip = (3e-4, 4e-4),
) -> Objective:
    """Group sequence policy optimisation: one ratio per completion, the geometric mean of its tokens'::

        s_j  = exp(mean_t (logps_jt - behaviour_logps_jt))
        loss = -sum_jt weight_jt (min(s_j A_j, clip(s_j, 1 - low, 1 + high) A_j) - beta k3_jt)

    with A and k3 of `grpo`, and weights per sequence. Source: arXiv 2507.18071. A is detached.
    The clip is far narrower than a token's, since the mean of many tokens is nearer to 1.

    Differs from the source in that KL is optional (its experiments have none: beta 0).
    """
    counts = weight > 0
    length = counts.sum(-1).clamp(min=1)
    log_ratio = ((logps - behaviour_logps) * counts).sum(-1) / length
    shared = log_ratio[:, None].expand_as(logps)
    term, cut = _surrogate(shared, _deviation(reward, group), counts, clip)
    return _with_kl(term, logps, ref_logps, weight, reward, group, beta, cut)


def _deviation(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Each reward's distance from its group's mean, in standard deviations."""
    distance = centred(reward, group)
    return distance / (group_mean(distance.square(), group).sqrt() + STD_FLOOR)


def _surrogate(
    log_ratio: Float[Tensor, "N T"], advantage: Float[Tensor, " N"], counts: Bool[Tensor, "N T"], clip: Clip
) -> tuple[Float[Tensor, "N T"], Int[Tensor, " N"]]:
    """min(ratio A, clip(ratio) A), and the tokens of each row where the second is the smaller."""
    ratio = log_ratio.exp()
    free = ratio * advantage[:, None]
    held = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage[:, None]
    return torch.minimum(free, held), ((held < free) & counts).sum(-1)


def _clipped(
    advantage: Float[Tensor, " N"],
    logps: Float[Tensor, "N T"],
    ref_logps: Float[Tensor, "N T"] | None,
    behaviour_logps: Float[Tensor, "N T"],
    weight: Float[Tensor, "N T"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    beta: float,
    clip: Clip,
) -> Objective:
    term, cut = _surrogate(logps - behaviour_logps, advantage, weight > 0, clip)
    return _with_kl(term, logps, ref_logps, weight, reward, group, beta, cut)


def _with_kl(
    term: Float[Tensor, "N T"],
    logps: Float[Tensor, "N T"],
    ref_logps: Float[Tensor, "N T"] | None,
    weight: Float[Tensor, "N T"],
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    beta: float,
    cut: Int[Tensor, " N"],
) -> Objective:
    """The loss of `term`, a gain, with beta k3 taken off it."""
    if not beta:
        return found(-(weight * term).sum(), logps.sum(-1), reward, group, beta, cut)
    if ref_logps is None:
        raise ValueError(f"objective.beta = {beta} needs the reference log-prob of each token, and there is none.")
    gap = ref_logps - logps
    k3 = gap.exp() - gap - 1
    return found(-(weight * (term - beta * k3)).sum(), -gap.sum(-1), reward, group, beta, cut)
