"""Keys and values of what has been read, in memory that has room for more."""

# Shape legend: N rows, H heads, S positions, D width of a head.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 32
"""Positions, at least, that there is room for when memory is taken anew."""


class RoomyLayer(DynamicLayer):
    """One layer's keys and values as a part of larger tensors: a step writes what is new, and copies nothing else.

    transformers' own layer is made anew at every step, and again when a row ends: several times the traffic of
    attention itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Tensor] = []
        """Keys and values, [N H S D] each, N and S as large as there is room."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes in [N H S D] more; returns all, in memory that the next call overwrites beyond their end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, rows = self.get_seq_length(), key_states.shape[0]
        width = before + key_states.shape[-2]
        if not self._held or width > self._held[0].shape[-2]:
            room = width + max(ROOM, width // 4)
            old = self._held or [key_states, value_states]
            self._held = [_of_rows(held[:, :, :before], torch.arange(rows), room) for held in old]
        for held, new in zip(self._held, (key_states, value_states), strict=True):
            held[:rows, :, before:width] = new
        self.keys, self.values = (held[:rows, :, :width] for held in self._held)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Makes row n what row `indices[n]` was; rows that stay where they are cost nothing."""
        width, rows = self.get_seq_length(), len(indices)
        if not width:
            return
        if rows > self._held[0].shape[0]:
            self._held = [_of_rows(held[:, :, :width], indices, held.shape[-2]) for held in self._held]
        else:
            moved = indices != torch.arange(rows, device=indices.device)
            if bool(moved.any()):
                to, source = moved.nonzero()[:, 0], indices[moved]
                for held in self._held:
                    held[to, :, :width] = held[source, :, :width]
        self.keys, self.values = (held[:rows, :, :width] for held in self._held)

    def take_in(self, other: RoomyLayer, drop: int) -> None:
        """Adds the rows of `other` after the own ones, which lose their first `drop` positions.

        Both end at the same position; what is shorter begins with blanks, which the mask has to cover.
        """
        rows, kept = self._held_rows(), self.get_seq_length() - drop
        more, taken = other._held_rows(), other.get_seq_length()
        width = max(kept, taken)
        room = width + max(ROOM, width // 4)
        for place, (own, new) in enumerate(zip(self._held, other._held, strict=True)):
            both = own.new_zeros(rows + more, own.shape[1], room, own.shape[3])
            both[:rows, :, width - kept : width] = own[:rows, :, drop : drop + kept]
            both[rows:, :, width - taken : width] = new[:more, :, :taken]
            self._held[place] = both
        self.keys, self.values = (held[:, :, :width] for held in self._held)

    def _held_rows(self) -> int:
        return 0 if self.keys is None else len(self.keys)


class RoomyCache(DynamicCache):
    """A cache of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = RoomyLayer

    def take_in(self, other: RoomyCache, drop: int) -> None:
        """Adds the rows of `other`, in every layer; see `RoomyLayer.take_in`."""
        for layer, more in zip(self.layers, other.layers, strict=True):
            assert isinstance(layer, RoomyLayer)
            assert isinstance(more, RoomyLayer)
            layer.take_in(more, drop)


def _of_rows(old: Tensor, indices: Tensor, room: int) -> Tensor:
    """Rows of `old` in new memory with room for `room` positions."""
    held = old.new_empty(len(indices), old.shape[1], room, old.shape[3])
    held[:, :, : old.shape[-2]] = old[indices]
    return held
