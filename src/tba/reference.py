"""The policy that KL is measured against, and re-scoring of what an older one has scored."""

# Shape legend: N trajectories of a micro-batch, U distinct ones among them, T positions.

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tba.batch import Batch, MicroBatch, Rows
from tba.loss import widened
from tba.policy import Policy, copy_out, named_tensors
from tba.ranks import ALONE, Ranks
from tba.sections import ReferenceSettings
from tba.weights import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A batch whose reference log-probs are all of the newest reference."""

    batch: Batch
    count: int
    """Trajectories whose reference log-prob was an older reference's."""
    seconds: float


class MovingReference:
    """The trainer's reference: one that follows the policy, or the start policy for ever.

    Its version is the policy's version that it last took in; 0 is the start.
    """

    def __init__(self, policy: Policy, settings: ReferenceSettings, ranks: Ranks = ALONE) -> None:
        """`policy` is the start policy, not yet spread over `ranks`, over which the reference is.

        A fixed reference keeps no copy of it: nothing is ever re-scored.
        """
        self.version = 0
        self._ranks = ranks
        self._decay = 0.0 if settings.decay is None else settings.decay
        self._every = 1 if settings.every is None else settings.every
        self._policy = None if settings.kind == "fixed" else policy.frozen_copy().without_limits()
        self._copied: tuple[int, Tensors] | None = None
        if self._policy is not None:
            ranks.take(self._policy)

    @torch.no_grad()
    def follow(self, policy: Policy, version: int) -> bool:
        """Takes in the policy after the optimizer step that made `version`; whether the reference has changed.

        Changes fall on multiples of `reference.every`: reference <- decay reference + (1 - decay) policy, with
        decay zero for a reset.
        """
        if self._policy is None or version == self.version or version % self._every:
            return False
        newest = named_tensors(policy.model)
        for name, tensor in named_tensors(self._policy.model).items():
            if self._decay and tensor.is_floating_point():
                tensor.lerp_(newest[name].detach(), 1 - self._decay)
            else:
                tensor.copy_(newest[name])
        self.version = version
        return True

    @torch.no_grad()
    def rescore(self, batch: Batch) -> Rescored:
        """`batch` with the reference log-probs that an older reference gave computed again.

        Per micro-batch, its stale rows go through the reference together, each distinct one once.
        """
        started = time.perf_counter()
        if self._policy is None:
            return Rescored(batch=batch, count=0, seconds=0.0)
        work = [piece for micro in batch.micro_batches for piece in _stale_pieces(micro, self.version)]
        found = self._ranks.passes(self._policy, [_chosen(rows, stale_U) for rows, stale_U in work])
        logps = iter([logps_UT.cpu() for logps_UT in found])
        count, micros = 0, list[MicroBatch]()
        for micro in batch.micro_batches:
            stale_N = micro.ref_version_N != self.version
            if bool(stale_N.any()):
                count += int(stale_N.sum())
                pieces = [_placed(logps, *piece) for piece in _pieces(micro, self.version)]
                logps_NT, kept_NT = widened(pieces)[micro.row_N], micro.ref_logps_NT
                micro = dataclasses.replace(
                    micro, ref_logp_N=torch.where(stale_N, logps_NT.sum(-1), micro.ref_logp_N),
                    ref_logps_NT=None if kept_NT is None else torch.where(stale_N[:, None], logps_NT, kept_NT),
                    ref_version_N=torch.full_like(micro.ref_version_N, self.version),
                )
            micros.append(micro)
        return Rescored(
            batch=dataclasses.replace(batch, micro_batches=tuple(micros)), count=count,
            seconds=time.perf_counter() - started,
        )

    def tensors(self) -> Tensors | None:
        """A copy for searchers, made once a version; None of the start policy, which they have."""
        if self._policy is None or self.version == 0:
            return None
        if self._copied is None or self._copied[0] != self.version:
            self._copied = self.version, copy_out(self._policy.model, whole=self._ranks.whole)
        return self._copied[1]

    # ---- saving ----

    def state(self) -> dict[str, Tensor]:
        """Tensors by name; nothing of the start policy, which the run's settings name."""
        return {} if self._policy is None else named_tensors(self._policy.model)

    @torch.no_grad()
    def restore(self, read: Callable[[Tensor, str], Tensor], version: int) -> None:
        """Continues from what `state` gave at `version`; `read` gives what the rank has of a tensor, by its name."""
        for name, tensor in self.state().items():
            tensor.copy_(read(tensor, name))
        self.version = version


def _pieces(micro: MicroBatch, version: int) -> list[tuple[Rows, Tensor]]:
    """The pieces of a micro-batch, and which of their [U] rows a reference other than `version` has scored."""
    stale_U = torch.zeros(sum(len(rows.input_NT) for rows in micro.rows), dtype=torch.bool)
    stale_U[micro.row_N[micro.ref_version_N != version]] = True
    parts = stale_U.split([len(rows.input_NT) for rows in micro.rows])
    return list(zip(micro.rows, parts, strict=True))


def _stale_pieces(micro: MicroBatch, version: int) -> list[tuple[Rows, Tensor]]:
    """Those of `_pieces` that have such rows."""
    return [(rows, stale_U) for rows, stale_U in _pieces(micro, version) if bool(stale_U.any())]


def _placed(logps: Iterator[Tensor], rows: Rows, stale_U: Tensor) -> Tensor:
    """[U T] the next of `logps` in the places of the stale rows; zero in the others, and without any, all zero."""
    logps_UT = torch.zeros(rows.input_NT.shape)
    if bool(stale_U.any()):
        logps_UT[stale_U] = next(logps)
    return logps_UT


def _chosen(rows: Rows, chosen_N: Tensor) -> Rows:
    return Rows(
        input_NT=rows.input_NT[chosen_N], target_NT=rows.target_NT[chosen_N],
        attention_NT=rows.attention_NT[chosen_N], completion_NT=rows.completion_NT[chosen_N],
        prompt_N=rows.prompt_N[chosen_N],
    )
