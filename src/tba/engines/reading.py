"""What an engine has under way, and what waits for room."""

# Shape legend: A rows under way, F distinct prefixes of those, T positions read, V vocabulary.

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tba.engines.cache import RoomyCache

SHARE = 4
"""Part of the places, one in so many, that are free before prompts take them: reading a few is as dear as many."""


class Queue:
    """Prompts in their order, taken when their completions have room."""

    def __init__(self, prompts: int, num_samples: int, rows: int | None) -> None:
        """`num_samples` completions a prompt, at most `rows` under way, or those of one prompt if that is more."""
        self.num_samples = num_samples
        self.waiting = prompts
        """Prompts not taken yet."""
        self._prompts = prompts
        self._places = prompts if rows is None else max(1, rows // num_samples)
        self._rows = self._places * num_samples

    def has_room(self, alive: int) -> bool:
        """Whether it is worth while to take prompts beside `alive` rows."""
        free = (self._rows - alive) // self.num_samples
        return self.waiting > 0 and free >= min(self.waiting, max(1, self._places // SHARE))

    def take(self, alive: int) -> range:
        """Numbers of the prompts that have room beside `alive` rows; they wait no longer."""
        first = self._prompts - self.waiting
        taken = range(first, first + min(self.waiting, (self._rows - alive) // self.num_samples))
        self.waiting -= len(taken)
        return taken


class Reading:
    """Rows under way, and what the model has read for them."""

    def __init__(
        self, *, alive_A: Tensor, prefix_A: Tensor, logits_FV: Tensor, cache: RoomyCache, mask_FT: Tensor
    ) -> None:
        """`mask_FT` is of what has been read, padded on the left."""
        self.alive_A, self.prefix_A = alive_A, prefix_A
        """Numbers of the rows, and which prefix each of them has."""
        self.logits_FV, self.cache, self.mask_FT = logits_FV, cache, mask_FT

    def forget(self) -> None:
        """Lets go of what was read."""
        del self.cache, self.logits_FV, self.mask_FT

    def take_in(self, other: Reading) -> None:
        """Adds rows of which other prompts were read; what nobody's prefix reaches back to is dropped."""
        drop = int(self.mask_FT.any(0).long().argmax())
        self.cache.take_in(other.cache, drop)
        masks = [self.mask_FT[:, drop:], other.mask_FT]
        width = max(mask.shape[1] for mask in masks)
        self.mask_FT = torch.cat([pad(mask, (width - mask.shape[1], 0)) for mask in masks])
        self.alive_A = torch.cat([self.alive_A, other.alive_A])
        self.prefix_A = torch.cat([self.prefix_A, len(self.logits_FV) + other.prefix_A])
        self.logits_FV = torch.cat([self.logits_FV, other.logits_FV])
