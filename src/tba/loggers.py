"""Where else the numbers of a run go: trackio, wandb, TensorBoard, MLflow, each on its own thread."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tba import metrics as m
from tba.metrics import Say
from tba.records import visible
from tba.settings import Settings
from tba.signals import MAY_BE_LEFT

FOLDER = "loggers"
"""Folder of a run directory: what loggers write there, and by which name a resumed run finds each again."""
MOST_WAITING = 10_000
"""Lines that may wait for a logger; one that is further behind is given up."""
CLOSE_S = 60.0
"""Seconds that loggers have, all together, to send the rest when a run ends."""
MOST_KEYS = 64
"""Keys below a metric; a mapping of more is left out."""
NOT_SENT = {m.STEP, m.EVAL_STEP, m.AGE_HISTOGRAM}
"""The horizontal axis, and a histogram, of which no logger makes one number."""


class Logger(Protocol):
    """A run in a logger."""

    id: str
    """What the logger knows it by, where that is not its name."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes numbers at a step in."""
        ...

    def close(self, status: str) -> None:
        """Sends what is left, and ends the run as `done`, `failed` or `interrupted`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A run for a logger to begin, or to go on with."""

    project: str
    name: str
    folder: Path
    """For what it writes."""
    tree: Mapping[str, Any]
    """The resolved settings."""
    step: int
    """Steps done so far."""
    id: str | None
    """What it was known by before; None of a run that begins."""
    space: str | None
    """trackio: the Hugging Face Space that it goes to as well."""


# ---- numbers ------------------------------------------------------------------------------------------


def flat(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record; of a mapping as `name/key`, of an interval as `name/low` and `name/high`."""
    return {
        path: value for name, found in record.items() if name not in NOT_SENT for path, value in _below(name, found)
    }


def _below(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        if len(value) <= MOST_KEYS:
            for key, item in value.items():
                yield from _below(f"{path}/{visible(str(key))[:60].replace('/', '_')}", item)
    elif isinstance(value, (list, tuple)):
        if len(value) == 2:
            yield from _below(f"{path}/low", value[0])
            yield from _below(f"{path}/high", value[1])
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield path, value


def leaves(tree: Mapping[str, Any], above: str = "") -> dict[str, str | int | float | bool]:
    """Settings by dotted path, for loggers that take no tree; what is no number or text is written as JSON."""
    found: dict[str, str | int | float | bool] = {}
    for key, value in tree.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            found |= leaves(value, f"{path}.")
        else:
            found[path] = value if isinstance(value, (str, int, float)) else json.dumps(value)
    return found


# ---- the loggers --------------------------------------------------------------------------------------


class TensorBoard:
    """An event file; a resumed run hides what an earlier life logged after its checkpoint."""

    def __init__(self, run: Named) -> None:
        """Events go below `run.folder`."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.id = "tensorboard"
        purge = None if run.id is None else run.step + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), flush_secs=10, purge_step=purge)
        if run.id is None:
            self._writer.add_text("settings", "".join(f"    {key}: {v}\n" for key, v in leaves(run.tree).items()))
            events: Any = self._writer.file_writer
            for summary in hparams(leaves(run.tree), {}):
                events.add_summary(summary)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One scalar each."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        """Flushes."""
        del status
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; one that a script has begun is used, and left open."""

    def __init__(self, run: Named) -> None:
        """Its files go below `run.folder`."""
        wandb: Any = import_module("wandb")
        self._is_ours = wandb.run is None
        self._run: Any = wandb.run
        if self._is_ours:
            self._run = wandb.init(
                project=run.project, name=run.name, id=run.id, resume="allow", config=dict(run.tree),
                dir=str(run.folder),
            )
        else:
            self._run.config.update(dict(run.tree), allow_val_change=True)
        self.id = str(self._run.id)
        self._run.define_metric("*", step_metric="step")  # an evaluation may come after later steps

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({**numbers, "step": step})

    def close(self, status: str) -> None:
        """Waits until it is uploaded."""
        if self._is_ours:
            self._run.finish(exit_code=0 if status == "done" else 1)


class Trackio:
    """A run of trackio, which is found again by its name."""

    def __init__(self, run: Named) -> None:
        """It keeps its files in a folder of its own."""
        self.id = run.name
        self._run: Any = import_module("trackio").init(
            project=run.project, name=run.name, config=dict(run.tree), resume="allow",
            **({} if run.space is None else {"space_id": run.space}),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(numbers), step=step)

    def close(self, status: str) -> None:
        """Waits until it is written."""
        del status
        self._run.finish()


class Mlflow:
    """A run of MLflow, of the experiment that is named as the project."""

    ENDED: Mapping[str, str] = {"done": "FINISHED", "interrupted": "KILLED"}

    def __init__(self, run: Named) -> None:
        """Where it is kept is MLflow's tracking URI."""
        self._entities: Any = import_module("mlflow.entities")
        self._client: Any = import_module("mlflow").MlflowClient()
        if run.id is not None:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        number = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        self.id = str(self._client.create_run(number, run_name=run.name).info.run_id)
        given = [self._entities.Param(key, str(value)[:6000]) for key, value in leaves(run.tree).items()]
        for at in range(0, len(given), 100):  # as many as it takes at once
            self._client.log_batch(self.id, params=given[at : at + 100])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One request; names with `@`, which it has not, get `_at_`."""
        now = int(1000 * time.time())
        self._client.log_batch(self.id, metrics=[
            self._entities.Metric(_plain(name), float(value), now, step)
            for name, value in numbers.items()
        ])

    def close(self, status: str) -> None:
        """Says how the run ended."""
        self._client.set_terminated(self.id, self.ENDED.get(status, "FAILED"))


def _plain(name: str) -> str:
    """A metric's name as MLflow takes it: no other signs than these, and no part of a path that is empty or dots."""
    return re.sub(r"/\.*(?=/|$)", "/_", re.sub(r"[^\w/. -]", "_", name.replace("@", "_at_")))


LOGGERS: dict[str, Callable[[Named], Logger]] = {
    "trackio": Trackio, "wandb": Wandb, "tensorboard": TensorBoard, "mlflow": Mlflow,
}
"""By the name of their package."""
NO_PROJECT = "tba"
"""Project of a run of which nothing says one."""
PROJECT_OF = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}
"""Environment variables that name the project where `logging.project` does not."""


def missing(names: Sequence[str]) -> list[str]:
    """What is wrong with naming these loggers: those whose package is not installed, in one line."""
    gone = [name for name in names if not _is_installed(name)]
    if not gone:
        return []
    return [f"logging.report_to names {' and '.join(gone)}, which {'is' if len(gone) == 1 else 'are'} not installed; "
            f"install with: pip install {' '.join(gone)}, or leave {'it' if len(gone) == 1 else 'them'} out."]


def _is_installed(name: str) -> bool:
    """Whether there is such a package; a folder of that name without code, as loggers write them, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def in_project(settings: Settings, project: str) -> Settings:
    """The settings with `logging.project` filled in where loggers are named and it is said nowhere."""
    chosen = settings.logging
    is_said = chosen.project is not None or any(PROJECT_OF.get(name, "") in os.environ for name in chosen.report_to)
    if is_said or not chosen.report_to:
        return settings
    return settings.model_copy(update={"logging": chosen.model_copy(update={"project": project})})


# ---- beside a run -------------------------------------------------------------------------------------


class Feed:
    """One logger and the lines that wait for it.

    Consumes lines, waits for them on its own thread, woken by `put`; produces at most one problem, after which it
    takes nothing more.
    """

    def __init__(self, name: str, begin: Callable[[], Logger]) -> None:
        """`begin` is called on the thread."""
        self.name, self.problem = name, ""
        self._lines: queue.Queue[tuple[int, Mapping[str, float]] | str] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, args=(begin,), name=MAY_BE_LEFT, daemon=True)
        self._thread.start()

    def put(self, line: tuple[int, Mapping[str, float]] | str) -> None:
        """Has a step's numbers logged, or, of a status, the logger closed; never waits."""
        if self.problem:
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.problem = f"it is {MOST_WAITING} lines behind"

    def wait(self, limit_s: float) -> None:
        """Waits until it is closed, or has a problem."""
        if not self.problem:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                self.problem = f"it did not end within {CLOSE_S:g} s, and what waits for it is lost"

    def _work(self, begin: Callable[[], Logger]) -> None:
        try:
            logger = begin()
            while not isinstance(line := self._lines.get(), str):
                if not self.problem:
                    logger.log(*line)
            logger.close(line)
        except BaseException as error:  # whatever a logger fails with, SystemExit too, ends no run
            self.problem = self.problem or f"{type(error).__name__}: {error}"


class Loggers:
    """Hears what a run says, and passes it on: to who is told of the run, and to its loggers."""

    def __init__(self, settings: Settings, run_dir: Path, say: Say, *, step: int) -> None:
        """`step` is how many steps a resumed run has done; loggers begin when the run says that it is ready."""
        self._settings, self._run_dir, self._next, self._step = settings, run_dir, say, step
        self._feeds: list[Feed] = []
        self._told: set[str] = set()

    def say(self, kind: str, record: Mapping[str, Any]) -> None:
        """Takes what a run says; see `tba.metrics.Say`."""
        self._next(kind, record)
        if kind == "ready":
            self._feeds = [Feed(name, self._beginning(name)) for name in self._settings.logging.report_to]
        elif kind in ("step", "evaluation") and self._feeds:
            numbers = flat(record)
            for feed in self._feeds:
                feed.put((record[m.STEP if kind == "step" else m.EVAL_STEP], numbers))
        self._tell()

    def close(self, status: str) -> None:
        """Ends the loggers, within a limit; a second call does nothing."""
        feeds, ends = self._feeds, time.monotonic() + CLOSE_S
        for feed in feeds:
            feed.put(status)
        for feed in feeds:
            feed.wait(max(0.0, ends - time.monotonic()))
        self._tell()
        self._feeds = []

    def _tell(self) -> None:
        for feed in self._feeds:
            if feed.problem and feed.name not in self._told:
                self._told.add(feed.name)
                text = visible(f"logger {feed.name} is left alone from now on: {feed.problem}")[:400]
                self._next("note", {"text": text})

    def _beginning(self, name: str) -> Callable[[], Logger]:
        chosen, folder = self._settings.logging, self._run_dir / FOLDER
        project = chosen.project or os.environ.get(PROJECT_OF.get(name, ""), "") or NO_PROJECT

        def begin() -> Logger:
            folder.mkdir(exist_ok=True)
            known = folder / f"{name}.json"
            was: dict[str, str] = json.loads(known.read_text("utf-8")) if known.is_file() else {}
            run = Named(
                project=was.get("project", project), name=was.get("name", chosen.name or self._run_dir.resolve().name),
                folder=folder, tree=self._settings.resolved(), step=self._step, id=was.get("id"), space=chosen.space,
            )
            logger = LOGGERS[name](run)
            partial = folder / f".{name}.partial"
            partial.write_text(json.dumps({"project": run.project, "name": run.name, "id": logger.id}), "utf-8")
            os.replace(partial, known)
            return logger

        return begin
