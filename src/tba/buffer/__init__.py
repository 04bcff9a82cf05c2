"""The replay buffer: bounded pools per prompt, drawn from by age and reward, with a ledger."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.buffer.entries import Draw, EmptyBufferError, Entry
    from tba.buffer.memory import ReplayBuffer
    from tba.buffer.shards import ShardedBuffer

__all__ = ["Draw", "EmptyBufferError", "Entry", "ReplayBuffer", "ShardedBuffer"]
_ROOMS = {"ReplayBuffer": "memory", "ShardedBuffer": "shards"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tba.buffer' has no attribute {name!r}; it exports {', '.join(__all__)}.")
    return getattr(import_module(f"tba.buffer.{_ROOMS.get(name, 'entries')}"), name)
