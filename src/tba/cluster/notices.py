"""What the processes of an async run tell each other of weights and leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tba.records import Lease
from tba.weights import Tensors, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A publication, without its tensors."""

    version: int
    round: int
    digest: str
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """By tensor."""
    ref_version: int = 0

    @staticmethod
    def of(weights: Weights) -> Notice:
        """What is to be said of `weights`."""
        return Notice(
            version=weights.version, round=weights.round, digest=weights.digest, digests=weights.digests,
            ref_version=weights.ref_version,
        )

    def weights(self, tensors: Tensors, reference: Tensors | None = None) -> Weights:
        """The publication with its tensors, and with its reference's where they are needed."""
        return Weights(
            version=self.version, round=self.round, digest=self.digest, digests=self.digests, tensors=tensors,
            ref_version=self.ref_version, reference=reference,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a searcher is to do next."""

    leases: Sequence[Lease]
    notice: Notice
    """The newest publication."""
    tensors: Sequence[Any]
    """One reference to its tensors, owned by the driver."""
    reference: Sequence[Any]
    """The same to the tensors of the policy's reference; None are there for the start policy."""
    run_attempt: int
