"""Where a completion may not stop and where it must, the same when sampled and when trained on."""

# Shape legend: N rows, T positions, S ids that stop, V vocabulary; logits may have any shape before V.

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on the place of the stop token, as part of the policy: a distribution over what they allow.

    A banned stop has probability zero, and the other ids share its mass. A forced one has probability one: its
    log-prob is zero. So the sum over all completions stays one, and both paths that need the log-prob of the same
    ids, sampling and training, give the same. Differs from arXiv 2405.18540's code in that: there a fresh
    completion leaves its forced stop out and a replayed one has it, and a replayed one knows of no ban.
    """

    first: int = 0
    """Least number of tokens before the stop token."""
    last: int | None = None
    """Number of tokens after which the stop token follows for certain; None: never."""

    def of_next(
        self, logits: Float[Tensor, "N V"], place_N: Int[Tensor, " N"], stop_S: Tensor, forced: int
    ) -> Float[Tensor, "N V"]:
        """Logits of the id at a place of each completion, which counts from 0; `forced` is the id that ends one."""
        allowed = self.banned(logits, place_N.to(logits.device), stop_S)
        if self.last is None or not bool((ends_N := place_N == self.last).any()):
            return allowed
        only_V = logits.new_full(logits.shape[-1:], -torch.inf)
        only_V[forced] = 0.0
        return torch.where(ends_N.to(logits.device)[:, None], only_V, allowed)

    def banned(self, logits: Tensor, place: Int[Tensor, ...], stop_S: Tensor) -> Tensor:
        """Logits without the stop ids where `place` is below `first`."""
        if not self.first:
            return logits
        stop_S = stop_S.to(logits.device)
        kept = logits[..., stop_S].masked_fill((place < self.first)[..., None], -torch.inf)
        return logits.index_copy(-1, stop_S, kept)

    def forced(self, logps: Float[Tensor, "N T"], place: Int[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """Log-probs with those of a forced stop at zero."""
        return logps if self.last is None else logps.masked_fill(place == self.last, 0.0)


FREE = Limits()
"""Stops anywhere, or nowhere."""
