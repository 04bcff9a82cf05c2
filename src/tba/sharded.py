"""Trainer ranks that share a model (FSDP2): each has a slice of its tensors and its groups."""

# Shape legend: N rows, T positions.

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tba import lora
from tba.batch import Batch, Rows
from tba.head import head_of
from tba.policy import Policy
from tba.ranks import EMPTY, copied_to, rows_of_share

V = TypeVar("V")
STORES: Any = dist
"""Where the stores are, which have no types there."""


class RankMissingError(RuntimeError):
    """A rank has not come within its time; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank meets the others."""

    rank: int
    count: int
    host: str
    """Address of who holds the store that all ranks reach."""
    port: int
    start_limit_s: float
    """Seconds that all ranks have to come."""
    has_gpu: bool = False
    """Whether each rank has a GPU: then NCCL joins them, else gloo."""
    limit_s: float
    """Seconds that any collective may take, and that a look for the next word lasts."""


def hold_store(host: str) -> Any:
    """The store that ranks meet at, in this process, on a free port."""
    return STORES.TCPStore(host, 0, is_master=True)


def reach_store(seat: Seat) -> Any:
    """The store of `hold_store`, from another process."""
    return STORES.TCPStore(seat.host, seat.port, is_master=False, timeout=timedelta(seconds=seat.start_limit_s))


class Sharded:
    """See `Ranks`. The tensors are cut by their first dimension.

    A rank computes with the whole tensors of one block at a time, which are put together for it, forth and back; its
    gradients are summed over the ranks as soon as a block has them. So all ranks go through the model equally often, in
    passes of the same kind, whatever their groups: before the passes of a step they agree on number and kinds, and who
    has nothing left sends two ids of no weight.
    """

    def __init__(self, store: Any, seat: Seat) -> None:
        """Waits for the other ranks at `store`.

        Raises:
            RankMissingError: some did not come within `seat.start_limit_s`.
        """
        self.rank, self.count = seat.rank, seat.count
        self._seat, self._store = seat, store.clone()  # so that who waits for a word does not hold the group's up
        self._device = "cuda" if seat.has_gpu else "cpu"
        _meet(store, seat)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if seat.has_gpu else "gloo", store=STORES.PrefixStore("group", store),
            rank=self.rank, world_size=self.count, timeout=timedelta(seconds=seat.limit_s),
        )
        self._mesh = init_device_mesh(self._device, (self.count,))
        self._spread: dict[nn.Module, nn.Module] = {}
        self._words = self.begun = 0

    # ---- what a step needs ----

    def take(self, policy: Policy) -> None:
        """See `Ranks.take`: each block of the model is cut by itself, then what is left."""
        head_of(policy.model)  # tried now: it calls the model outside the passes that are agreed on
        spread = _Spread(policy)
        kinds = _block_names(policy.model)
        blocks = [module for module in policy.model.modules() if type(module).__name__ in kinds]
        for module in (*blocks, spread):
            made: Any = fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
            made.set_gradient_divide_factor(1.0)  # shares of the loss add up to that of the batch
            made.set_force_sum_reduction_for_comms(True)
        self._spread[policy.model] = spread

    def own(self, batch: Batch) -> Batch:
        """See `Ranks.own`."""
        return share_of(batch, self.rank)

    def passes(self, policy: Policy, rows: Sequence[Rows]) -> Iterator[Tensor]:
        """See `Ranks.passes`."""
        spread = self._spread[policy.model]
        for place, is_split in enumerate(self._agreed([policy.wants_split(piece) for piece in rows])):
            self.begun += 1
            if place < len(rows):
                yield spread(rows[place], is_split)
            else:
                logps_NT = spread(EMPTY, is_split)
                if logps_NT.requires_grad:
                    self.skip(logps_NT)

    def skip(self, logps_NT: Tensor) -> None:
        """See `Ranks.skip`: its gradients are zero, and others wait for them."""
        logps_NT.backward(torch.zeros_like(logps_NT))

    def _agreed(self, wishes: Sequence[bool]) -> list[bool]:
        """As many as the rank with the most has; each is set if no rank that has one of that place is against it."""
        self.begun += 1
        most = torch.tensor(len(wishes))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        agreed = torch.ones(int(most), dtype=torch.int32)
        agreed[: len(wishes)] = torch.tensor(wishes, dtype=torch.int32)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return [bool(wish) for wish in agreed.tolist()]

    def totals(self, values: Sequence[float]) -> list[float]:
        """See `Ranks.totals`; sums in float64, in the order of the ranks."""
        self.begun += 1
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(found, own)
        return torch.stack(found).sum(0).tolist()

    def gathered(self, items: Sequence[V], *, everywhere: bool) -> list[V]:
        """See `Ranks.gathered`."""
        self.begun += 1
        found: list[Any] = [None] * self.count
        if everywhere:
            dist.all_gather_object(found, list(items))
        else:
            dist.gather_object(list(items), found if self.rank == 0 else None)
        return [item for part in found if part is not None for item in part]

    def clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        """See `Ranks.clip`; of shares, the squares of whose norms add up."""
        shares = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        own = float(nn.utils.get_total_norm([share for share in shares if share.numel()]))
        (square,) = self.totals([own * own])
        norm = math.sqrt(square)
        if (scale := limit / (norm + 1e-6)) < 1.0:
            for share in shares:
                share.mul_(scale)
        return norm

    # ---- tensors in and out ----

    def whole(self, tensor: Tensor) -> Tensor:
        """See `Ranks.whole`: shares go to host memory, and from there to the first rank's."""
        if not isinstance(tensor, DTensor):
            return tensor.detach().cpu()  # every rank has all of it
        self.begun += 1
        share = _local(tensor).detach().cpu()
        each = rows_of_share(tensor.shape, 0, self.count).stop
        padded = share.new_zeros((each, *tensor.shape[1:]))
        padded[: len(share)] = share
        found = [torch.empty_like(padded) for _ in range(self.count)] if self.rank == 0 else None
        dist.gather(padded, found)
        return share if found is None else torch.cat(found)[: tensor.shape[0]]

    def part(self, like: Tensor, file: Any, name: str) -> Tensor:
        """See `Ranks.part`; nothing else of the file is read."""
        if not isinstance(like, DTensor):
            return copied_to(file.get_tensor(name), like.device)
        share = file.get_slice(name)[rows_of_share(like.shape, self.rank, self.count)]
        return DTensor.from_local(
            copied_to(share, self._device), like.device_mesh, like.placements, run_check=False, shape=like.shape,
            stride=like.stride(),
        )

    # ---- words ----

    def tell(self, word: str, *values: object) -> None:
        """See `Ranks.tell`; of a batch, each rank is told its share."""
        for rank in range(1, self.count):
            told = [share_of(value, rank) if isinstance(value, Batch) else value for value in values]
            self._store.set(f"word/{self._words}/{rank}", pickle.dumps((word, told)))
        self._words += 1

    def hear(self) -> tuple[str, list[Any]]:
        """The first rank's next word and its values, for the others; waits as long as the store is there.

        Raises:
            dist.DistError: it is not.
        """
        key = f"word/{self._words}/{self.rank}"
        while True:
            try:
                self._store.wait([key], timedelta(seconds=self._seat.limit_s))
            except dist.DistStoreError:
                self._store.check([key])  # fails if nobody is there any more; else nothing was said
                continue
            self._words += 1
            said = pickle.loads(self._store.get(key))
            self._store.delete_key(key)
            return said


class _Spread(nn.Module):
    """Puts the policy's tensors together around all that it does with them, and not only around the model."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model, self._logps = policy.model, policy.token_logps
        self.eval()

    def forward(self, rows: Rows, is_split: bool) -> Tensor:
        return self._logps(rows, is_split)


def share_of(batch: Batch, rank: int) -> Batch:
    """The micro-batches of a rank, with the denominators of the whole batch."""
    own = tuple(micro for micro in batch.micro_batches if micro.rank == rank)
    return Batch(
        micro_batches=own, num_groups=batch.num_groups, num_tokens=batch.num_tokens,
        num_counted_tokens=batch.num_counted_tokens,
    )


def _block_names(model: Any) -> set[str]:
    """Classes of the blocks that a model is a stack of; of one that does not say, none: it is cut as one block."""
    inner = model.get_base_model() if lora.has_adapter(model) else model
    return {*(getattr(inner, "_no_split_modules", None) or ())}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _meet(store: Any, seat: Seat) -> None:
    """Waits until all ranks are there."""
    deadline = time.monotonic() + seat.start_limit_s
    store.set(f"here/{seat.rank}", "")
    for rank in range(seat.count):
        left = max(0.0, deadline - time.monotonic())
        try:
            store.wait([f"here/{rank}"], timedelta(seconds=left + 0.001))
        except dist.DistStoreError as error:
            raise RankMissingError(
                f"trainer rank {rank} of {seat.count} did not start within {seat.start_limit_s:g} s; look for room for "
                f"it (resources.trainer), or lower trainer.processes."
            ) from error
