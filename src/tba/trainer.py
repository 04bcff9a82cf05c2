"""Batch to loss to one optimizer step."""

# Shape legend: N trajectories of a micro-batch, U distinct ones among them, R those of a piece, T positions.

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tba import metrics as m
from tba.batch import Batch, MicroBatch, Rows
from tba.loss import Loss, widened
from tba.newest import Newest
from tba.policy import Policy, copy_out, named_tensors
from tba.ranks import ALONE, Ranks, copied_to
from tba.recorder import Entered, Recorder, Source
from tba.reference import MovingReference
from tba.schedules import KlControl, Schedules
from tba.settings import Settings
from tba.tensor_file import write_tensors
from tba.weights import Tensors, Weights

FLAT_TOLERANCE = 1e-6
"""Rewards of a group that differ by no more than this are equal, in reward units."""


class TrainingFailedError(RuntimeError):
    """Training cannot go on; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A publication in the making: everything but its digests."""

    tensors: Tensors
    version: int
    round: int
    ref_version: int
    reference: Tensors | None

    def weights(self) -> Weights:
        """The publication."""
        return Weights.of(
            self.tensors, version=self.version, round_=self.round, ref_version=self.ref_version,
            reference=self.reference,
        )


class Trainer:
    """Owns the policy's master weights and the optimizer."""

    def __init__(
        self, policy: Policy, settings: Settings, recorder: Recorder | None = None, newest: Newest | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Trains `policy` in place, with the settings' objective, optimizer and schedules.

        `recorder` is told what entered the losses, and `newest` of each batch. Over `ranks` the policy is spread: each
        has a trainer, and whatever one of them does all do. Only the first one's has recorder and `newest`.
        """
        trainer, objective = settings.trainer, settings.objective
        self.policy, self._recorder, self._newest, self._ranks = policy, recorder, newest, ranks
        self._sync_every = trainer.sync_every
        self.version = 0
        """Optimizer steps that the weights have had."""
        self.steps = 0
        """Steps tried; those skipped for a non-finite loss or gradient included."""
        self._loss = Loss(settings)
        self._schedules = Schedules(
            steps=trainer.steps, learning_rate=trainer.learning_rate, schedule=trainer.schedule,
            warmup_steps=trainer.warmup_steps, stable_steps=trainer.stable_steps, decay_steps=trainer.decay_steps,
            beta=objective.beta, beta_final=objective.beta_final,
            beta_steps=objective.beta_steps, beta_stop=objective.beta_stop,
            prior_temperature=objective.prior_temperature, target_temperature=objective.target_temperature,
        )
        self._control = None if objective.target_kl is None else KlControl(
            objective.beta, target=objective.target_kl, gain=objective.target_kl_gain
        )
        self._reference = MovingReference(policy, settings.reference, ranks)
        ranks.take(policy)
        self._resets_optimizer = settings.reference.reset_optimizer
        self._clip_norm, self._max_age = trainer.clip_norm, settings.buffer.max_age
        self._max_bad_steps = trainer.max_bad_steps
        self._bad_in_a_row = 0
        self._parameters = {n: p for n, p in named_tensors(policy.model).items() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=trainer.learning_rate, betas=trainer.adam_betas,
            weight_decay=trainer.weight_decay, fused=True,
        )

    def step(
        self, batch: Batch, sources: Sequence[Source] = (), *, search_kl: float = math.nan,
        before_update: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """One optimizer step on `batch`, whose groups come from `sources`; returns its metrics, on the first rank.

        Until `before_update` returns, which is called when the gradient is there, weights and reference stay the same.

        `search_kl`, nats per completion, is what steers beta to a target KL. That of the batch cannot: its
        trajectories are no sample of the policy.

        The gradient is that of the mean over the batch's groups, whatever the micro-batches. A step whose
        loss or gradient is not finite leaves the weights alone and is counted.

        Raises:
            TrainingFailedError: `max_bad_steps` steps in a row were not finite; or a trajectory of the batch is older
                than `buffer.max_age`, and nothing is done then.
        """
        started = time.perf_counter()
        self._check_age(batch)
        step = self.steps + 1
        rate = self._schedules.learning_rate_at(step)
        beta, prior = self._schedules.tempered(
            self._schedules.beta_at(step) if self._control is None else self._control.beta, step
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        rescored, ref_version = self._reference.rescore(self._ranks.own(batch)), self._reference.version
        parts = self._accumulate(rescored.batch, beta, prior)
        loss, num_rescored = self._ranks.totals([sum(part["loss"] for part in parts), rescored.count])
        parts = self._ranks.gathered(parts, everywhere=self._loss.learned_z is not None)
        limit = math.inf if self._clip_norm is None else self._clip_norm
        norm = self._ranks.clip(list(self._parameters.values()), limit)
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        self.steps = step
        record_s = self._record(parts, sources, {"beta": beta, "prior": prior, "loss": loss}, is_finite=is_finite)
        if self._newest is not None:
            record_s += self._newest.tell(step, self.version, batch, sources)
        if is_finite:
            before_update()
            self._optimizer.step()
            self._loss.learn(parts)
            self.version += 1
            self._bad_in_a_row = 0
        else:
            self._count_bad_step(loss, norm)
        consumed = _consumed(batch, parts, self.version - is_finite) if self._ranks.rank == 0 else {}
        if is_finite:
            self._after(search_kl)
        return {
            m.STEP: step, m.VERSION: self.version, m.LOSS: loss, m.GRAD_NORM: norm, m.LEARNING_RATE: rate,
            m.BETA: beta, m.PRIOR: prior, m.SKIPPED: self.steps - self.version, **consumed,
            m.REF_VERSION: ref_version, m.RESCORED: int(num_rescored), m.RESCORE_SECONDS: rescored.seconds,
            m.RECORD_SECONDS: record_s, m.RECORDS_LOST: 0 if self._recorder is None else self._recorder.lost,
            m.STEP_SECONDS: time.perf_counter() - started,
        }

    def _check_age(self, batch: Batch) -> None:
        """Refuses what is older than the bound on age; see docs/asynchrony.md."""
        oldest = min((int(micro.version_N.min()) for micro in batch.micro_batches), default=self.version)
        if self._max_age is not None and self.version - oldest > self._max_age:
            raise TrainingFailedError(
                f"step {self.steps + 1} got a trajectory that version {oldest} sampled, which is "
                f"{self.version - oldest} steps old for version {self.version}, and buffer.max_age = {self._max_age}: "
                f"a fault of the buffer; nothing was trained on it, so that tba resume can go on from the newest "
                f"checkpoint."
            )

    def _record(
        self, parts: Sequence[dict[str, Any]], sources: Sequence[Source], facts: dict[str, float], *, is_finite: bool
    ) -> float:
        """Records the step if it is due, or if it is to be skipped; returns the seconds that took."""
        recorder, started = self._recorder, time.perf_counter()
        if recorder is None or (is_finite and not recorder.is_due(self.steps)):
            return 0.0
        is_learned = self._loss.learned_z is not None
        entered = [
            Entered(micro=part["micro"], logps_NT=part["logps_NT"], log_z_N=part["log_z_N"] if is_learned else None)
            for part in parts
        ]
        place = {"round": (self.steps - 1) // self._sync_every, "policy_version": self.version}
        recorder.add(self.steps, entered, sources, {**place, **facts})
        if not is_finite:
            recorder.flush()
        return time.perf_counter() - started

    def _after(self, kl: float) -> None:
        """What follows an optimizer step: the next step's beta, and the reference if it is due to move."""
        if self._control is not None:
            self._control.update(kl)
        if self._reference.follow(self.policy, self.version) and self._resets_optimizer:
            self._optimizer.state.clear()

    def _accumulate(self, batch: Batch, beta: float, prior: float) -> list[dict[str, Any]]:
        """Makes the gradient of the batch loss; returns each micro-batch's share of loss and metrics.

        The loss takes groups whole. So a micro-batch that was cut goes through the model without gradient first, for
        the slope of the loss at each log-prob, and with it a second time.
        """
        cut = [rows for micro in batch.micro_batches if len(micro.rows) > 1 for rows in micro.rows]
        with torch.no_grad():
            first = iter(list(self._ranks.passes(self.policy, cut)))
        found: dict[int, dict[str, Any]] = {}
        work: list[tuple[Rows, int, Tensor | None]] = []
        for place, micro in enumerate(batch.micro_batches):
            if len(micro.rows) == 1:
                work.append((micro.rows[0], place, None))
                continue
            logps_UT = widened([next(first) for _ in micro.rows]).requires_grad_(True)
            found[place], loss = self._share(micro, batch, logps_UT, beta, prior)
            if micro.num_groups:
                (slope_UT,) = torch.autograd.grad(loss, logps_UT)
                pieces = slope_UT.split([len(rows.input_NT) for rows in micro.rows])
                work += [(rows, place, slope_RT) for rows, slope_RT in zip(micro.rows, pieces, strict=True)]
        passes = self._ranks.passes(self.policy, [rows for rows, _, _ in work])
        for number, logps_RT in enumerate(passes):
            _, place, slope_RT = work[number]
            micro = batch.micro_batches[place]
            if slope_RT is None:
                found[place], loss = self._share(micro, batch, logps_RT, beta, prior)
            else:
                loss = (logps_RT * slope_RT[:, : logps_RT.shape[1]]).sum()
            if micro.num_groups:
                loss.backward()
            else:
                self._ranks.skip(logps_RT)
        if not batch.num_groups:
            self._optimizer.zero_grad(set_to_none=True)  # nothing is to move; a zero gradient would
        return [part for _, part in sorted(found.items())]

    def _share(
        self, micro: MicroBatch, batch: Batch, logps_UT: Tensor, beta: float, prior: float
    ) -> tuple[dict[str, Any], Tensor]:
        """What a micro-batch adds to the metrics, and to the loss of the batch."""
        logps_NT = logps_UT[micro.row_N]
        found, loss = self._loss.of(micro, batch, logps_NT, beta, prior)
        return {
            "loss": float(loss.detach()), "micro": micro, "logps_NT": logps_NT.detach().cpu(),
            "logp_N": logps_NT.detach().sum(-1).cpu(),
            "residual_N": found.residual.cpu(), "log_z_N": found.log_z.cpu(),
            "cut": None if found.cut is None else int(found.cut.sum()),
        }, loss

    def _count_bad_step(self, loss: float, norm: float) -> None:
        self._bad_in_a_row += 1
        if self._bad_in_a_row >= self._max_bad_steps:
            raise TrainingFailedError(
                f"loss {loss} and gradient norm {norm} were not finite in {self._bad_in_a_row} steps in a row up to "
                f"step {self.steps}; lower trainer.learning_rate, or look at the rewards (trainer.max_bad_steps = "
                f"{self._max_bad_steps})."
            )

    def publish(self, round_: int) -> Weights:
        """A copy of the weights as they are now, and of the reference that goes with them."""
        return self.snapshot(round_).weights()

    def snapshot(self, round_: int, into: Tensors | None = None) -> Snapshot:
        """What `publish` gives, without the digests, which take longer than the copy and may be made elsewhere.

        `into` are the tensors of an earlier snapshot that nobody reads any more; they are written over.
        """
        return Snapshot(
            tensors=copy_out(self.policy.model, into, self._ranks.whole), version=self.version, round=round_,
            ref_version=self._reference.version, reference=self._reference.tensors(),
        )

    # ---- saving ----

    def save(self, path: Path) -> None:
        """Writes weights, optimizer moments, a moving reference and counters into the folder `path`.

        The files are the same whatever the number of ranks; the first one writes them. What is recorded of the steps so
        far is on disk afterwards.
        """
        if self._recorder is not None:
            self._recorder.flush()
        found = {f"weights.{name}": tensor for name, tensor in named_tensors(self.policy.model).items()}
        found |= {f"reference.{name}": tensor for name, tensor in self._reference.state().items()}
        for name, parameter in self._parameters.items():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{kind}.{name}"] = value
        file = path / "trainer.safetensors" if self._ranks.rank == 0 else Path(os.devnull)
        write_tensors(file, found, self._ranks.whole)  # to which all ranks add, and one keeps
        if self._ranks.rank:
            return
        counters: dict[str, Any] = {
            "version": self.version, "steps": self.steps, "bad_in_a_row": self._bad_in_a_row,
            "ref_version": self._reference.version, "beta": None if self._control is None else self._control.beta,
        }
        if self._loss.learned_z is not None:
            counters["log_z"] = self._loss.learned_z.values
        (path / "trainer.json").write_text(json.dumps(counters), "utf-8")

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Continues from what `save` wrote into `path`, with as many ranks as there are now."""
        counters = json.loads((path / "trainer.json").read_text("utf-8"))
        with safe_open(path / "trainer.safetensors", "pt") as file:
            names = {*file.keys()}

            def read(like: Tensor, name: str) -> Tensor:
                return self._ranks.part(like, file, name)

            for name, tensor in named_tensors(self.policy.model).items():
                tensor.copy_(read(tensor, f"weights.{name}"))
            for name, parameter in self._parameters.items():
                keys = {kind: f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq")}
                if f"optimizer.step.{name}" in names:
                    state = {kind: read(parameter, key) for kind, key in keys.items()}
                    self._optimizer.state[parameter] = {
                        "step": copied_to(file.get_tensor(f"optimizer.step.{name}"), parameter.device), **state,
                    }
            self._reference.restore(lambda like, name: read(like, f"reference.{name}"), counters["ref_version"])
        if self._control is not None:
            self._control.beta = counters["beta"]
        self.version, self.steps = counters["version"], counters["steps"]
        self._bad_in_a_row = counters["bad_in_a_row"]
        if self._loss.learned_z is not None:
            self._loss.learned_z.values = counters["log_z"]
        if self._recorder is not None:
            self._recorder.rewind(self.steps)


def _consumed(batch: Batch, parts: list[dict[str, Any]], version: int) -> dict[str, Any]:
    """Metrics of the trajectories that a step consumed, under the policy before it; `version` is that policy's."""
    logp_N = torch.cat([part["logp_N"] for part in parts])
    micro = [part["micro"] for part in parts]
    length_N = torch.cat([x.length_N for x in micro])
    age_N = version - torch.cat([x.version_N for x in micro])
    fresh_N = age_N == 0
    gap_N = (logp_N - torch.cat([x.searcher_logp_N for x in micro])).abs() / length_N
    reward_N = torch.cat([x.reward_N for x in micro])
    rewards: dict[int, list[float]] = {}
    for group, reward in zip(torch.cat([x.group_N for x in micro]).tolist(), reward_N.tolist(), strict=True):
        rewards.setdefault(group, []).append(reward)
    ages = Counter(age_N.tolist())
    log_z = {
        group: value for part in parts
        for group, value in zip(part["micro"].group_N.tolist(), part["log_z_N"].tolist(), strict=True)
    }
    return {
        m.RESIDUAL_MSE: float(torch.cat([part["residual_N"] for part in parts]).square().mean()),
        m.LOG_Z: m.mean(log_z.values()),
        m.RATIO_CUT: None if parts[0]["cut"] is None else
        sum(part["cut"] for part in parts) / max(1, batch.num_counted_tokens),
        m.REWARD: float(reward_N.double().mean()),
        m.KL: float((logp_N - torch.cat([x.ref_logp_N for x in micro])).mean()),
        m.ENTROPY: float(-logp_N.sum() / length_N.sum()),
        m.LENGTH: float(length_N.float().mean()),
        m.TRAIN_TOKENS: batch.num_tokens,
        m.FLAT_GROUPS: sum(max(group) - min(group) <= FLAT_TOLERANCE for group in rewards.values()),
        m.LOGP_GAP: float(gap_N[fresh_N].max()) if bool(fresh_N.any()) else None,
        m.AGE_MEAN: float(age_N.float().mean()), m.AGE_MAX: max(ages),
        m.AGE_HISTOGRAM: {str(age): ages[age] for age in sorted(ages)},
    }
