"""The buffer's shards in processes of their own, told and asked through Ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from tba.buffer.options import Options
from tba.buffer.shards import Call, Shard
from tba.cluster.start import YIELDS, settle

TOGETHER = 16
"""Calls that a shard is told of in one message."""
UNDER_WAY = 8
"""Messages that a shard may be behind before the depot waits for it."""


class ShardLostError(RuntimeError):
    """A shard of the buffer is dead or silent; the message names it."""


class RemoteShards:
    """See `buffer.shards.Shards`; what was told and failed is said by the next `ask` of that shard.

    consumes: what the sharded buffer tells and asks
    waits for: answers, at most half of `async.wait_limit_s`, so that who waits for the depot hears which shard it is
    woken by: the shards
    produces: messages to them, of many calls each
    """

    def __init__(self, handles: Sequence[Any], *, limit_s: float) -> None:
        """`handles` of the shards' processes, in their order; `limit_s` is `async.wait_limit_s`."""
        self._handles, self._limit_s = handles, limit_s / 2
        self._told: list[list[Call]] = [[] for _ in handles]
        self._under_way: list[deque[Any]] = [deque() for _ in handles]

    def tell(self, shard: int, *call: Any) -> None:
        """See `Shards.tell`."""
        self._told[shard].append(call)
        if len(self._told[shard]) >= TOGETHER:
            under_way = self._under_way[shard]
            if len(under_way) >= UNDER_WAY:
                ray.wait([under_way[-UNDER_WAY]], timeout=self._limit_s)  # what it ended with, the next `ask` says
            under_way.append(self._send(shard))

    def ask(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """See `Shards.ask`.

        Raises:
            ShardLostError: a shard has died, or has not answered in time.
        """
        for shard, call in calls.items():
            self._told[shard].append(call)
            self._under_way[shard].append(self._send(shard))
        deadline = time.monotonic() + self._limit_s
        return {shard: self._answer(shard, deadline) for shard in calls}

    def _send(self, shard: int) -> Any:
        message, self._told[shard] = self._told[shard], []
        return self._handles[shard].do.remote(message)

    def _answer(self, shard: int, deadline: float) -> Any:
        """What the newest message gives, once all before it are done."""
        name = f"shard {shard} of {len(self._handles)} of the buffer"
        references = list(self._under_way[shard])
        try:
            answers = ray.get(references, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            raise ShardLostError(
                f"{name} did not answer within half of async.wait_limit_s = {2 * self._limit_s:g} s; go on from the "
                f"newest checkpoint with tba resume RUN."
            ) from error
        except RayActorError as error:
            raise ShardLostError(
                f"{name} died, and what entered it since the last checkpoint is lost; go on from the newest one with "
                f"tba resume RUN."
            ) from error
        except RayTaskError as error:
            raise error.cause from error
        self._under_way[shard].clear()
        return answers[-1]


class ShardProcess:
    """A shard of the buffer.

    consumes: what the depot tells and asks
    waits for: nothing
    woken by: the depot
    produces: groups drawn, reports
    """

    def __init__(self, options: Options) -> None:
        """`options` are the shard's own."""
        self._shard = Shard(options)

    def ready(self) -> None:
        """Nothing, once the shard is up."""
        settle(nicer_by=YIELDS)

    def do(self, calls: Sequence[Call]) -> Any:
        """Does one after another; returns what the last one gives."""
        return [getattr(self._shard, name)(*values) for name, *values in calls][-1]
