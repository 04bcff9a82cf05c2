"""Published weights: a version, its tensors and their digest; a store that hands out the newest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digest of each tensor by its name; `digest` is over all of them."""
    ref_version: int = 0
    """Version of the reference that goes with them; 0 is the start policy, which searchers have."""
    reference: Tensors | None = None
    """That reference's tensors; None where it is the start policy, or was published before."""

    @staticmethod
    def of(
        tensors: Tensors, *, version: int, round_: int, ref_version: int = 0, reference: Tensors | None = None
    ) -> Weights:
        """Weights with their digests."""
        parts = digests(tensors)
        return Weights(
            version=version, round=round_, digest=digest_of(parts), tensors=tensors, digests=parts,
            ref_version=ref_version, reference=reference,
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


class WrongWeightsError(RuntimeError):
    """What an engine holds is not what was published; the message names the tensors."""


def check_held(published: Weights, held: Tensors, before: Mapping[int, Mapping[str, str]]) -> str:
    """The digest of `held`, recomputed; `before` are digests by version and name.

    Raises:
        WrongWeightsError: a tensor differs, is missing, or is there without having been published.
    """
    own = digests(held)
    if own == published.digests:
        return digest_of(own)
    names = sorted(own.keys() | published.digests.keys())
    odd = [name for name in names if own.get(name) != published.digests.get(name)]
    said = "; ".join(_difference(name, published, held, own, before) for name in odd[:MOST_NAMED])
    more = f"; and {len(odd) - MOST_NAMED} more" if len(odd) > MOST_NAMED else ""
    raise WrongWeightsError(
        f"the engine does not hold version {published.version} as it was published: {len(odd)} of {len(names)} tensors "
        f"differ: {said}{more}."
    )


MOST_NAMED = 3
"""Tensors that a message names."""


def _difference(
    name: str, published: Weights, held: Tensors, own: Mapping[str, str], before: Mapping[int, Mapping[str, str]]
) -> str:
    """What is wrong with one tensor, in words."""
    if name not in own:
        what = "was published and is not there"
    elif name not in published.digests:
        what = "is there and was not published"
    elif not held[name].any():
        what = "is all zeros"
    else:
        old = [version for version, parts in before.items() if parts.get(name) == own[name]]
        what = f"is still that of version {max(old)}" if old else "has other values, or another type or shape"
    return f"{name!r} {what}"


def digests(tensors: Tensors) -> dict[str, str]:
    """Digest of each tensor over name, type, shape and bytes."""
    found = {}
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        part = hashlib.blake2b(f"{name}\x00{tensor.dtype.str}\x00{tensors[name].shape}\x00".encode(), digest_size=16)
        part.update(tensor.data.cast("B") if tensor.size else b"")
        found[name] = part.hexdigest()
    return found


def digest_of(parts: Mapping[str, str]) -> str:
    """One digest over those of all tensors, in name order."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(parts):
        total.update(f"{name}\x00{parts[name]}\x00".encode())
    return total.hexdigest()


def digest(tensors: Tensors) -> str:
    """The digest of `Weights` that hold `tensors`."""
    return digest_of(digests(tensors))
