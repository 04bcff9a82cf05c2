"""What a trainer asks of the ranks that share its model and its batch; here the one that is alone."""

# Shape legend: N rows, T positions.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from tba.batch import Batch, Rows
from tba.policy import Policy

V = TypeVar("V")


@runtime_checkable
class Ranks(Protocol):
    """Processes with a trainer each, that do the same steps in the same order, each on its groups.

    Whatever all must take part in is called by all, in the same order; only `tell` is the first one's own.
    """

    @property
    def rank(self) -> int:
        """This one's number; the first is 0."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def begun(self) -> int:
        """Passes and collectives that this one has begun: who waits for another has begun more than it."""
        ...

    def take(self, policy: Policy) -> None:
        """Leaves this rank its share of the policy's tensors, before anything names them."""
        ...

    def own(self, batch: Batch) -> Batch:
        """The micro-batches of this rank, with the denominators of the whole batch."""
        ...

    def passes(self, policy: Policy, rows: Sequence[Rows]) -> Iterator[Tensor]:
        """The policy's log-probs [N T] by token of each of `rows`, nats, in order; to be gone through to the end.

        With gradients on, each is followed by its way back, or by `skip`, before the next is asked for.
        """
        ...

    def skip(self, logps_NT: Tensor) -> None:
        """The way back of a pass that adds nothing to the gradient."""
        ...

    def totals(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, the same on each."""
        ...

    def gathered(self, items: Sequence[V], *, everywhere: bool) -> list[V]:
        """Everybody's items, in the order of the ranks; on the first one, or `everywhere`; else none."""
        ...

    def clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        """Scales the gradient down to a norm of `limit`; returns the norm that it had."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of which each rank has a share, in host memory of the first one; what others get is of no use."""
        ...

    def part(self, like: Tensor, file: Any, name: str) -> Tensor:
        """This rank's share of the tensor `name` of an open safetensors file, to go in place of `like`."""
        ...

    def tell(self, word: str, *values: object) -> None:
        """Has the other ranks do the same as the first; what they make of `word` is theirs to know."""
        ...


class Alone:
    """One process with the whole model."""

    rank, count, begun = 0, 1, 0

    def take(self, policy: Policy) -> None:
        """Nothing: all of it is here."""

    def own(self, batch: Batch) -> Batch:
        """All of it."""
        return batch

    def passes(self, policy: Policy, rows: Sequence[Rows]) -> Iterator[Tensor]:
        """See `Ranks.passes`."""
        return (policy.token_logps(piece) for piece in rows)

    def skip(self, logps_NT: Tensor) -> None:
        """Nothing: nobody waits for it."""

    def totals(self, values: Sequence[float]) -> list[float]:
        """The values."""
        return list(values)

    def gathered(self, items: Sequence[V], *, everywhere: bool) -> list[V]:
        """The items."""
        del everywhere
        return list(items)

    def clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        """See `Ranks.clip`."""
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    def whole(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor.detach()

    def part(self, like: Tensor, file: Any, name: str) -> Tensor:
        """All of it."""
        return file.get_tensor(name).to(like.device)

    def tell(self, word: str, *values: object) -> None:
        """Nothing: there are no others."""


ALONE = Alone()


def rows_of_share(shape: Sequence[int], rank: int, count: int) -> slice:
    """Rows of a tensor that a rank has: as many as the others, but for the last ones, which may have fewer or none."""
    each = -(-shape[0] // count)
    return slice(min(rank * each, shape[0]), min((rank + 1) * each, shape[0]))


EMPTY = Rows(
    input_NT=torch.zeros(1, 3, dtype=torch.long), target_NT=torch.zeros(1, 3, dtype=torch.long),
    attention_NT=torch.ones(1, 3, dtype=torch.bool), completion_NT=torch.tensor([[False, True, True]]),
    prompt_N=torch.zeros(1, dtype=torch.long),
)
"""What goes through the model of a rank that has nothing left while others have: a prompt of two ids, two more."""
