"""Published weights: a version, its tensors and their digest; a store that hands out the newest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

Tensors = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One publication."""

    version: int
    """Optimizer steps these weights have had."""
    round: int
    """The round that is searched for with them at lead 0: publications before this one."""
    digest: str
    tensors: Tensors
    ref_version: int = 0
    """Version of the reference that goes with them; 0 is the start policy, which searchers have."""
    reference: Tensors | None = None
    """That reference's tensors; None where it is the start policy, or was published before."""

    @staticmethod
    def of(
        tensors: Tensors, *, version: int, round_: int, ref_version: int = 0, reference: Tensors | None = None
    ) -> Weights:
        """Weights with their digest."""
        return Weights(
            version=version, round=round_, digest=digest(tensors), tensors=tensors, ref_version=ref_version,
            reference=reference,
        )


@runtime_checkable
class WeightStore(Protocol):
    """Holds the newest publication; nobody waits for anybody."""

    def publish(self, weights: Weights) -> None:
        """Makes `weights` the newest, whole or not at all."""
        ...

    def latest(self) -> Weights:
        """The newest publication; RuntimeError before the first."""
        ...


class MemoryStore:
    """The store of a run in one process."""

    def __init__(self) -> None:
        self._newest: Weights | None = None

    def publish(self, weights: Weights) -> None:
        """Makes `weights` the newest.

        Raises:
            ValueError: the version would go backwards.
        """
        check_monotone(self._newest, weights)
        self._newest = weights

    def latest(self) -> Weights:
        """The newest publication.

        Raises:
            RuntimeError: nothing has been published.
        """
        if self._newest is None:
            raise RuntimeError("no weights have been published yet; the trainer publishes before searchers ask.")
        return self._newest


class Publication(Protocol):
    """What a publication says of itself, with or without its tensors."""

    @property
    def version(self) -> int:
        """Optimizer steps the weights have had."""
        ...

    @property
    def round(self) -> int:
        """Publications before it."""
        ...

    @property
    def digest(self) -> str:
        """Of its tensors."""
        ...

    @property
    def ref_version(self) -> int:
        """Version of the reference that goes with it."""
        ...


def check_monotone(newest: Publication | None, weights: Publication) -> None:
    """Raises ValueError if `weights` are older than `newest`."""
    if newest is not None and (weights.version, weights.round) < (newest.version, newest.round):
        raise ValueError(
            f"version went backwards: {weights.version} (round {weights.round}) was published after "
            f"{newest.version} (round {newest.round}); restore the version together with the weights."
        )


def digest(tensors: Tensors) -> str:
    """A digest over names, types, shapes and bytes, in name order."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        total.update(f"{name}\x00{tensor.dtype.str}\x00{tensors[name].shape}\x00".encode())
        total.update(tensor.data.cast("B") if tensor.size else b"")
    return total.hexdigest()
