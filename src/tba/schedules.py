"""Learning rate and beta by step, and the controller that steers beta to a KL."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tba.sections import Line

KL_ERROR_LIMIT = 0.2
"""Largest relative error of KL that the controller acts on in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedules:
    """Learning rate and beta as functions of the step, counted from 1."""

    steps: int
    learning_rate: float
    schedule: str
    warmup_steps: int
    beta: float
    beta_final: float | None
    beta_steps: int
    beta_stop: int | None = None
    stable_steps: int = 0
    decay_steps: int | None = None
    prior_temperature: float | Line | None = None
    target_temperature: float | Line | None = None

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then constant for good, or for `stable_steps`; then down to zero over `decay_steps`, or one
        step after the last. A decay longer than the run ends above zero, as in arXiv 2503.18929's GSM8K run.
        """
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        before = self.warmup_steps + self.stable_steps
        length = max(1, self.steps - before) if self.decay_steps is None else self.decay_steps
        done = max(0.0, min(1.0, (step - 1 - before) / length))
        if self.schedule == "linear":
            return self.learning_rate * (1 - done)
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate

    def tempered(self, beta: float, step: int) -> tuple[float, float]:
        """Beta T and 1 / (gamma T): the log-reward of arXiv 2405.18540, (log p_ref / gamma + r / beta) / T, as a beta
        and a weight of the reference's log-prob, so that any trajectory is weighed as its step says, however old.
        """
        over_all = moving(self.target_temperature, step)
        return beta * over_all, 1.0 / (moving(self.prior_temperature, step) * over_all)

    def beta_at(self, step: int) -> float:
        """Linear from `beta` at step 1 to `beta_final` at step `beta_steps` + 1, then constant.

        From step `beta_stop` on it is `beta_final`, however far the line has come: the early stop of arXiv
        2503.18929's released code, where beta_steps is T and beta_stop is stop.
        """
        if self.beta_final is None:
            return self.beta
        if self.beta_stop is not None and step >= self.beta_stop:
            return self.beta_final
        done = 1.0 if self.beta_steps == 0 else min(1.0, (step - 1) / self.beta_steps)
        return self.beta + (self.beta_final - self.beta) * done


def moving(value: float | Line | None, step: int) -> float:
    """A setting at a step, counted from 1; 1 if it is None."""
    if not isinstance(value, Line):
        return 1.0 if value is None else value
    return value.from_ + (value.to - value.from_) * min(1.0, (step - 1) / value.steps)


class KlControl:
    """Beta of the next step from the KL of this one: above the target beta rises, below it falls.

    beta <- beta (1 + gain clip((KL - target) / target, -0.2, 0.2)), the proportional controller of arXiv
    1909.08593, section 2.2.
    """

    def __init__(self, beta: float, *, target: float, gain: float) -> None:
        """`beta` is that of step 1; `target` is in nats per completion."""
        self.beta = beta
        self._target, self._gain = target, gain

    def update(self, kl: float) -> None:
        """Takes in a step's KL, nats per completion; one that is not finite changes nothing."""
        if math.isfinite(kl):
            error = (kl - self._target) / self._target
            self.beta *= 1 + self._gain * max(-KL_ERROR_LIMIT, min(KL_ERROR_LIMIT, error))
