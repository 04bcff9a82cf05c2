"""What a run says as it goes, as the events, logs and control of transformers' callbacks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Protocol

from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from tba import metrics as m
from tba.trainer_api.config import TBAConfig

TWINS = {
    "loss": m.LOSS, "grad_norm": m.GRAD_NORM, "reward": m.REWARD, "kl": m.KL, "entropy": m.ENTROPY,
    "completions/mean_length": m.LENGTH, "step_time": m.STEP_SECONDS,
}
"""TRL's name to ours of what both log: the mean over the steps since the last log."""


class Asks(Protocol):
    """A run that may be asked for something."""

    asks: set[Any]


class Events:
    """Tells callbacks of a run, and the run what they want.

    In async mode steps are told of as they are done, while the next ones are under way; in lockstep nothing happens
    meanwhile.
    """

    def __init__(self, args: TBAConfig, callbacks: CallbackHandler, *, steps: int, steps_per_epoch: float) -> None:
        """`steps` of the whole run; `steps_per_epoch` is what one pass over the prompts takes."""
        self.state, self.control = TrainerState(), TrainerControl()
        self.state.max_steps, self.state.epoch = steps, 0.0
        self.state.num_train_epochs = math.ceil(steps / steps_per_epoch)
        self.state.is_local_process_zero = self.state.is_world_process_zero = True
        self.state.compute_steps(args, steps)
        self.run: Asks | None = None
        """The run that is told of, once there is one."""
        self._args, self._callbacks, self._per_epoch = args, callbacks, steps_per_epoch
        self._since: list[Mapping[str, Any]] = []

    def resume_at(self, step: int) -> None:
        """`step` steps have been done before what is told next."""
        self.state.global_step, self.state.epoch = step, step / self._per_epoch

    def call(self, event: str, **more: Any) -> None:
        """Has every callback take part in an event."""
        self.control = getattr(self._callbacks, event)(self._args, self.state, self.control, **more)

    def say(self, kind: str, record: Mapping[str, Any]) -> None:
        """Takes what a run says; see `tba.metrics.Say`."""
        if kind == "ready":
            self.call("on_train_begin")
            self.call("on_epoch_begin")
            self.call("on_step_begin")
        elif kind == "step":
            self._on_step(record)
        elif kind == "evaluation":
            self._on_evaluation(record)
        elif kind == "checkpoint":
            self.call("on_save")
        elif kind == "note":
            logging.getLogger("tba").warning("%s", record["text"])

    def _on_step(self, record: Mapping[str, Any]) -> None:
        before = math.floor((self.state.epoch or 0.0) + 1e-9)
        self.state.global_step = record[m.STEP]
        self.state.epoch = record[m.STEP] / self._per_epoch
        self._since.append(record)
        self.call("on_step_end")
        has_turned = math.floor(self.state.epoch + 1e-9) > before
        if has_turned:
            self.call("on_epoch_end")
        if self.control.should_log:
            self._log(self._logs_of_steps())
            self._since.clear()
        is_last = self.state.global_step >= self.state.max_steps  # a run evaluates and saves at its end by itself
        if self.run is not None:
            wanted = {"stop": self.control.should_training_stop, "evaluate": self.control.should_evaluate,
                      "save": self.control.should_save}
            self.run.asks |= {what for what, is_wanted in wanted.items() if is_wanted and not is_last}
        self.control.should_save = self.control.should_evaluate = False
        if is_last or self.control.should_training_stop:
            return
        if has_turned:
            self.call("on_epoch_begin")
        self.call("on_step_begin")

    def _on_evaluation(self, record: Mapping[str, Any]) -> None:
        found = prefixed(record, "eval")
        self._log({**found, "epoch": self.state.epoch or 0.0})
        self.call("on_evaluate", metrics=found)
        self._keep_best(found)  # after callbacks have compared it with the best so far
        if self.run is not None and self.control.should_training_stop:
            self.run.asks.add("stop")

    def _keep_best(self, found: Mapping[str, float]) -> None:
        """Remembers the best value of `metric_for_best_model`."""
        name = self._args.metric_for_best_model
        if name is None:
            return
        value = found.get(name if name.startswith("eval_") else f"eval_{name}")
        best = self.state.best_metric
        if value is not None and (best is None or (value > best if self._args.greater_is_better else value < best)):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def _logs_of_steps(self) -> dict[str, float]:
        """Of the steps since the last log, means under TRL's names, and the last of every other number under ours."""
        last = self._since[-1]
        found = {trl: m.mean(record[name] for record in self._since if record.get(name) is not None)
                 for trl, name in TWINS.items()}  # fmt: skip
        found["learning_rate"] = last[m.LEARNING_RATE]
        twins = {*TWINS.values(), m.LEARNING_RATE, m.STEP}
        found |= {name: value for name, value in last.items() if name not in twins}
        return {**numbers(found), "epoch": self.state.epoch or 0.0}

    def _log(self, logs: dict[str, float]) -> None:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs=logs)


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record."""
    return {
        name: value for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def prefixed(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The finite numbers of a record, named as transformers names those of an evaluation."""
    return {f"{prefix}_{name}": value for name, value in numbers(record).items()}
