"""TBATrainer and TBAConfig: the shape that users of TRL's GRPOTrainer know."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.trainer_api.config import TBAConfig
    from tba.trainer_api.trainer import TBATrainer

__all__ = ["TBAConfig", "TBATrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tba.trainer_api' has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f"tba.trainer_api.{'config' if name == 'TBAConfig' else 'trainer'}"), name)
