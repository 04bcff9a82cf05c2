"""Pure functions from log-probs and rewards to a loss: trajectory balance and its rivals."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.objectives.balance import trajectory_balance, trajectory_balance_learned_z
    from tba.objectives.groups import Objective, group_mean, mean_over_groups, token_weight
    from tba.objectives.policy_gradient import kimi_k15, online_dpo, reinforce, rloo, tba_prime
    from tba.objectives.ratio import cispo, dr_grpo, grpo, gspo, ppo_clip
    from tba.objectives.table import OBJECTIVES

__all__ = [
    "OBJECTIVES", "Objective", "cispo", "dr_grpo", "group_mean", "grpo", "gspo", "kimi_k15", "mean_over_groups",
    "online_dpo", "ppo_clip", "reinforce", "rloo", "tba_prime", "token_weight", "trajectory_balance",
    "trajectory_balance_learned_z",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tba.objectives' has no attribute {name!r}; it exports {', '.join(__all__)}.")
    table = import_module("tba.objectives.table")
    if name in table.OBJECTIVES:
        return table.OBJECTIVES[name]
    return getattr(table if name.isupper() else import_module("tba.objectives.groups"), name)
