"""Objectives by the name that recipes give them."""

from __future__ import annotations

from collections.abc import Callable

from tba.objectives.balance import trajectory_balance, trajectory_balance_learned_z
from tba.objectives.groups import Objective
from tba.objectives.policy_gradient import kimi_k15, online_dpo, reinforce, rloo, tba_prime
from tba.objectives.ratio import cispo, dr_grpo, grpo, gspo, ppo_clip

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "trajectory_balance": trajectory_balance,
    "trajectory_balance_learned_z": trajectory_balance_learned_z,
    "tba_prime": tba_prime,
    "kimi_k15": kimi_k15,
    "reinforce": reinforce,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "cispo": cispo,
    "gspo": gspo,
    "ppo_clip": ppo_clip,
    "online_dpo": online_dpo,
}
"""Objectives by `objective.name`. What each needs of the data is in the names of its arguments."""
