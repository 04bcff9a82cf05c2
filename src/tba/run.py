"""One run from settings to summary: consumes the journey's steps, evaluates, saves, stops."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml

from tba import assembly, checkpoint
from tba import metrics as m
from tba.advice import advice, spent_in, times_of
from tba.catalog import OWN_TASKS
from tba.control import Hold, check_free
from tba.evaluate import Evaluation
from tba.evaluations import Beside, EvaluationLateError, EvaluatorLostError
from tba.loggers import Loggers
from tba.loop import Ask, Evaluate, Journey, Lockstep
from tba.metrics import Say
from tba.policy import copy_out
from tba.report import write_report
from tba.settings import DEBUG, Settings, SettingsError
from tba.tasks.protocol import Task, fingerprint
from tba.tasks.script import Brought
from tba.weights import Tensors


class RunDirectory:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        """`path` exists, or is made by `create`."""
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.completions = path / "completions.jsonl"

    def create(self, settings: Settings, *, into: bool = False) -> None:
        """Makes the folder and writes `config.yaml`; with `into`, into a folder that is there and holds no run.

        Raises:
            SettingsError: something is already there, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=into and not (self.path / "config.yaml").exists())
        except OSError as error:
            raise SettingsError([f"run directory {str(self.path)!r} cannot be made: {error}."]) from error
        self._replace("config.yaml", yaml.safe_dump(settings.resolved(), sort_keys=False, allow_unicode=True))

    def append(self, file: Path, lines: list[str]) -> None:
        """Adds whole lines to one of the two logs."""
        with file.open("a", encoding="utf-8") as out:
            out.write("".join(line + "\n" for line in lines))

    def sizes(self) -> dict[str, int]:
        """Bytes of each log, to cut it back to on resume."""
        return {f.name: f.stat().st_size if f.exists() else 0 for f in (self.metrics, self.completions)}

    def cut(self, sizes: Mapping[str, int]) -> list[str]:
        """Removes what was logged after a checkpoint: the resumed run logs it again. Returns what is missing, in words.

        Of a log that has lost its end, what is left of its last line goes too.
        """
        missing = []
        there = self.sizes()
        for name, size in sizes.items():
            if there[name] < size:
                missing.append(f"{name} has lost {size - there[name]} of the {size} bytes it had at the checkpoint")
                size = (self.path / name).read_bytes().rfind(b"\n") + 1 if there[name] else 0
            if there[name]:
                os.truncate(self.path / name, size)
        return missing

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replaces a JSON file, whole or not at all."""
        self._replace(name, json.dumps(m.finite(value), indent=1, allow_nan=False))

    def _replace(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.partial"
        partial.write_text(text, "utf-8")
        os.replace(partial, self.path / name)


class Run:
    """Everything between a checked settings tree and a finished run directory."""

    def __init__(
        self, settings: Settings, directory: RunDirectory, say: Say, *, resume_from: Path | None = None,
        brought: Brought | None = None,
    ) -> None:
        """`resume_from` is a complete checkpoint folder of this run; None starts afresh.

        `brought` is what a script hands over, for the task of that name.

        Raises:
            SettingsError: the prompts are wrong, or not those that the checkpoint was saved with; or another process
                has the directory.
        """
        self._settings, self._directory = settings, directory
        self._hold = Hold(directory.path)
        self.asks: set[Literal["stop", "save", "evaluate"]] = set()
        """What who is told of the steps may ask for: that the run ends, is saved at the next end of a round, or is
        evaluated after this step. Taken out when it is done."""
        self._facts: dict[str, Any] = {"wall_s": 0.0, "start": {}, "step": 0, "version": 0, "data": "", "beta": None}
        if resume_from is not None:
            self._facts |= checkpoint.facts_of(resume_from)
        self._loggers = Loggers(settings, directory.path, say, step=self._facts["step"])
        self._say, self._status = self._loggers.say, "failed"
        try:
            is_own = settings.task.name in OWN_TASKS  # the user's own code, which may be wrong
            task = self._own = assembly.examined_task_of(settings, brought) if is_own else None
            self._journey: Journey = make_journey(settings, resume_from, say, directory.path, brought)
        except BaseException:
            self._hold.close()
            raise
        try:
            self._prepare(task or assembly.examined_task_of(settings))
        except BaseException:
            self._close()
            raise
        if resume_from is not None:
            for lost in directory.cut(self._facts["logs"]):
                say("note", {"text": lost})
        self._wants_stop = threading.Event()
        self._step: int = self._facts["step"]
        self._version: int = self._facts["version"]
        self._wall_before: float = self._facts["wall_s"]
        self._started = time.perf_counter()
        self._spent = {"wait_s": 0.0, "draw_s": 0.0, "publish_s": 0.0, "step_s": 0.0, "checkpoint_s": 0.0}

    def _prepare(self, task: Task) -> None:
        settings = self._settings
        beside = "cpu" if settings.mode == "async" else None  # GPUs are the other processes'
        self._start_policy = assembly.make_policy(settings, task, beside)
        questions = assembly.make_questions(settings, task, self._start_policy)
        for note in assembly.notes_of(task):
            self._say("note", {"text": note})
        found = fingerprint(questions.training)
        if self._facts["data"] not in ("", found):
            raise SettingsError([
                f"the training prompts (fingerprint {found}) are not those that the checkpoint was saved with "
                f"({self._facts['data']}); restore the data, or start a new run."
            ])
        self._facts["data"] = found
        self._questions = questions
        self._journey.start(settings, questions, self._start_policy)
        self._evaluate_with(self._journey.evaluator())

    def _evaluate_with(self, evaluator: Evaluate | None) -> None:
        """Has evaluations made by `evaluator`, or here if there is none."""
        settings = self._settings
        self._evaluator = evaluator or assembly.make_evaluator(settings, self._questions, self._start_policy).evaluate
        self._beside = Beside(self._evaluator, settings.evaluation.limit_s) if settings.mode == "async" else None

    @property
    def step(self) -> int:
        """Steps so far, those before a resumption included."""
        return self._step

    def execute(self) -> dict[str, Any]:
        """Runs to the last step, the time limit, or the first interrupt; returns the summary.

        What ends it otherwise is in the summary, with status `failed`; only a second interrupt is raised again.
        All processes are gone afterwards.
        """
        final: Mapping[str, Any] = {}
        self._say("ready", {})
        try:
            with self._interrupts():
                is_evaluated = bool(self._questions.held_out)
                if is_evaluated and not self._facts["start"]:
                    start = self._evaluate(copy_out(self._start_policy.model), 0)
                    self._record_evaluation(start)
                    self._facts["start"] = dict(start.metrics)
                self._started = time.perf_counter()
                status = self._train()
                self._facts["wall_s"] = self._wall()
                self._save(self._facts["wall_s"])
                self._journey.save_model(self._directory.path / "final")
                if status == "done" and is_evaluated:
                    newest = self._journey.weights()
                    evaluation = self._evaluate(newest.tensors, newest.version)
                    self._record_evaluation(evaluation)
                    final = evaluation.metrics
            return self._finish(status, "", final)
        except Exception as error:
            # Whatever a part of the run raises ends here, as a failed run with its message.
            if DEBUG in os.environ:
                traceback.print_exc()
            return self._finish("failed", f"{type(error).__name__}: {error}", final)
        except KeyboardInterrupt:
            self._finish("interrupted", "interrupted twice: what came after the newest checkpoint is lost", final)
            raise
        except BaseException as error:
            self._finish("failed", type(error).__name__, final)
            raise
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._journey.close()
        finally:
            self._loggers.close(self._status)
        if self._own is not None and (close := getattr(self._own, "close", None)) is not None:
            close()  # the processes that score
        self._hold.close()

    # ---- training ----

    def _train(self) -> str:
        settings = self._settings
        for record in self._journey.steps(self._ask):
            self._step, self._version = record[m.STEP], record[m.VERSION]
            self._facts["beta"] = record[m.BETA]
            for part, seconds in spent_in(record).items():
                self._spent[part] += seconds
            line = {**record, m.WALL: self._wall()}
            self._directory.append(self._directory.metrics, [m.to_json(line)])
            self._say("step", line)
            self._collect_evaluation(wait=False)
            is_due = settings.evaluation.every and self._step % settings.evaluation.every == 0
            if (is_due or "evaluate" in self.asks) and self._questions.held_out:
                self._evaluate_beside()
            self.asks.discard("evaluate")
            if self._is_due(self._step):
                self._save(self._wall())
        self._collect_evaluation(wait=True)
        return "interrupted" if self._wants_stop.is_set() else "done"

    def _ask(self, step: int) -> Ask:
        """Whether the round after `step` steps may start."""
        settings = self._settings
        minutes = settings.trainer.max_minutes
        if self._wants_stop.is_set() or "stop" in self.asks or step >= settings.trainer.steps:
            return "stop"
        if minutes is not None and self._wall() >= 60 * minutes:
            return "stop"
        if step > self._step:
            return "hold" if self._is_due(step) or "save" in self.asks else "go"
        if "save" in self.asks:  # everything before this round has been consumed
            self._save(self._wall())
        return "go"

    def _is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after `step` steps: at the first end of a round after each multiple."""
        every, sync = self._settings.checkpoint.every, self._settings.trainer.sync_every
        return every > 0 and step % sync == 0 and step // every > (step - sync) // every

    def _wall(self) -> float:
        """Seconds of training, earlier attempts included."""
        return self._wall_before + time.perf_counter() - self._started

    def _save(self, wall_s: float) -> None:
        started = time.perf_counter()
        kept = {name: self._facts[name] for name in ("start", "data", "beta")}
        facts = {**kept, "version": self._version, "wall_s": wall_s, "logs": self._directory.sizes()}
        checkpoint.save(
            self._directory.path, self._step, self._journey.save, facts, keep=self._settings.checkpoint.keep
        )
        self._directory.write_json("ledger.json", self._journey.ledger())
        self.asks.discard("save")
        self._spent["checkpoint_s"] += time.perf_counter() - started
        self._say("checkpoint", {"step": self._step})

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run after the round, with a checkpoint; the second at once."""
        def on_signal(number: int, frame: object) -> None:
            if self._wants_stop.is_set():
                raise KeyboardInterrupt
            self._wants_stop.set()
            self._say("note", {"text": "stopping after this round, with a checkpoint; interrupt again to stop at once"})

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---- evaluating ----

    def _evaluate(self, tensors: Tensors, version: int) -> Evaluation:
        """The evaluation before training, or the last one, which is waited for."""
        options = self._options(during=False)
        if self._beside is None:
            return self._evaluator(tensors, version, **options)
        self._beside.start(tensors, version, **options)
        try:
            found = self._beside.take(wait=True)
        except EvaluatorLostError as error:
            self._say("note", {"text": f"{error}; evaluations are made in the driver from now on"})
            self._evaluate_with(None)
            return self._evaluate(tensors, version)
        assert found is not None, "an evaluation was started and is gone"
        return found

    def _options(self, *, during: bool) -> dict[str, Any]:
        chosen = self._settings.evaluation
        return {
            "prompts": chosen.during_prompts if during else chosen.prompts,
            "samples": chosen.during_samples if during else chosen.samples,
            "greedy": not during, "beta": self._target_beta(),
        }

    def _target_beta(self) -> float:
        """Beta of the exact target: the last step's where a KL steers it, else the one that training ends with."""
        last: float | None = self._facts["beta"]
        is_steered = self._settings.objective.target_kl is not None
        return last if is_steered and last is not None else self._settings.final_beta

    def _evaluate_beside(self) -> None:
        """Evaluates the newest weights: in lockstep now, in async beside training, one at a time."""
        if self._beside is not None and self._beside.is_busy:
            return
        newest, options = self._journey.weights(), self._options(during=True)
        if self._beside is None:
            self._record_evaluation(self._evaluator(newest.tensors, newest.version, **options))
        else:
            self._beside.start(newest.tensors, newest.version, **options)

    def _collect_evaluation(self, *, wait: bool) -> None:
        if self._beside is None:
            return
        try:
            found = self._beside.take(wait=wait)
        except EvaluationLateError as error:
            self._say("note", {"text": f"{error} This one is left out."})
            return
        except EvaluatorLostError as error:
            self._say("note", {"text": f"{error}; this evaluation is lost, and the next ones are made in the driver"})
            self._evaluate_with(None)
            return
        if found is not None:
            self._record_evaluation(found)

    def _record_evaluation(self, evaluation: Evaluation) -> None:
        line = {**evaluation.metrics, m.WALL: self._wall() if self._step else 0.0}
        self._directory.append(self._directory.metrics, [m.to_json(line)])
        self._directory.append(
            self._directory.completions, [json.dumps(m.finite(shown), ensure_ascii=True) for shown in evaluation.shown]
        )
        self._say("evaluation", line)

    # ---- the end ----

    def _finish(self, status: str, message: str, final: Mapping[str, Any]) -> dict[str, Any]:
        is_whole, self._status = not message, status
        wall = self._facts["wall_s"] if is_whole else self._wall()
        trained_s = wall - self._wall_before
        waited_s = self._spent["wait_s"] + self._spent["publish_s"]
        ledger = self._journey.ledger() if is_whole else {}
        summary = {
            "status": status, "run": str(self._directory.path), "steps": self._step,
            "version": self._version, "wall_s": wall, "seed": self._settings.seed,
            "start": self._facts["start"], "final": final, "ledger": ledger, "message": message,
            "trainer": {**self._spent, "wait_share": waited_s / trained_s if trained_s > 0 else None},
            "searchers": self._journey.times() if is_whole else {},
        }
        summary["advice"] = advice(times_of(summary), self._settings) if is_whole else ""
        if ledger:
            self._directory.write_json("ledger.json", ledger)
        try:
            self._directory.write_json("summary.json", summary)
            write_report(self._directory.path)
        except OSError as error:
            if is_whole:
                raise
            self._say("note", {"text": f"the report, and perhaps the summary, were not written: {error}"})
        return m.finite(summary)


def make_journey(
    settings: Settings, resume_from: Path | None, say: Say, run_dir: Path, brought: Brought | None = None
) -> Journey:
    """The journey of the settings' mode, its processes on their way up; they score with what is `brought`."""
    if settings.mode == "async":
        from tba.cluster.driver import Cluster

        return Cluster(settings, resume_from, say, run_dir, None if brought is None else brought.for_scoring())
    return Lockstep(resume_from, run_dir)


def resumed(path: Path, settings: Settings, say: Say, brought: Brought | None = None) -> Run:
    """The run in the folder `path`, at its newest complete checkpoint; `brought` is as for `Run`.

    Raises:
        SettingsError: there is no complete checkpoint in it, or it is under way.
    """
    check_free(path)
    found = checkpoint.complete(path)
    for left in checkpoint.incomplete(path):
        broken = checkpoint.damage(left) if (left / checkpoint.MARK).is_file() else ""
        why = f"is damaged ({broken} is gone or of another size)" if broken else "was not finished"
        say("note", {"text": f"{left} {why} and is not used"})
    if not found:
        raise SettingsError([
            f"{str(path)!r} holds no complete checkpoint to resume from; start again with: "
            f"tba train {path / 'config.yaml'}"
        ])
    step, newest = found[-1]
    say("note", {"text": f"resuming from step {step}"})
    return Run(settings, RunDirectory(path), say, resume_from=newest, brought=brought)
