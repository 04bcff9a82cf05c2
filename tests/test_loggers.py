"""Loggers: every number of a run reaches them under its name, and none of them can end it."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from makers import settings_with
from tba import loggers
from tba import metrics as m
from tba.cli import main
from tba.loggers import Feed, Loggers, flat, leaves
from tba.reading import check_settings, read_settings
from tba.run import Run, RunDirectory, resumed
from tba.settings import Settings, SettingsError

pytestmark = pytest.mark.usefixtures("one_thread")

WANDB = '''
import types
run, calls, fails_at = None, [], None

class Run:
    def __init__(self, given):
        self.id = given["id"] or "made-up"
        self.config = types.SimpleNamespace(update=lambda tree, **more: calls.append(("config", tree)))
    def define_metric(self, *names, **more):
        calls.append(("axis", names, more))
    def log(self, row):
        if fails_at == row["step"]:
            raise OSError(f"no network at {row['step']} \\x1b[31m")
        calls.append(("log", row))
    def finish(self, exit_code):
        calls.append(("finish", exit_code))

def init(**given):
    calls.append(("init", given))
    if fails_at == "init":
        raise SystemExit("no key")
    return Run(given)
'''
TRACKIO = '''
calls = []

class Run:
    def log(self, row, step=None):
        calls.append(("log", {**row, "step": step}))
    def finish(self):
        calls.append(("finish",))

def init(**given):
    calls.append(("init", given))
    return Run()
'''
MLFLOW = '''
import re, types
from . import entities
calls, experiments = [], {}

class MlflowClient:
    def get_experiment_by_name(self, name):
        return experiments.get(name)
    def create_experiment(self, name):
        experiments[name] = types.SimpleNamespace(experiment_id="e1")
        return "e1"
    def create_run(self, experiment, run_name):
        calls.append(("init", {"experiment": experiment, "name": run_name}))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r7"))
    def update_run(self, id, status):
        calls.append(("again", id, status))
    def log_batch(self, id, metrics=(), params=()):
        assert len(params) <= 100 and all(re.fullmatch(r"[\\w/. -]+", key) for key, *_ in [*metrics, *params])
        if metrics:
            calls.append(("log", {**{key: value for key, value, *_ in metrics}, "step": metrics[0][3]}))
        else:
            calls.append(("params", dict(params)))
    def set_terminated(self, id, status):
        calls.append(("finish", status))
'''
ENTITIES = "def Metric(*given): return given\ndef Param(*given): return given\n"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts a package in the path, and out again; gives a function of its name."""
    place = tmp_path / "packages"
    made: list[str] = []
    for name in loggers.PROJECT_OF.values():
        monkeypatch.delenv(name, raising=False)

    def make(name: str) -> ModuleType:
        (place / name).mkdir(parents=True)
        text = {"wandb": WANDB, "trackio": TRACKIO, "mlflow": MLFLOW}[name]
        (place / name / "__init__.py").write_text(text, "utf-8")
        (place / name / "entities.py").write_text(ENTITIES, "utf-8")
        monkeypatch.syspath_prepend(str(place))
        for known in [known for known in sys.modules if known.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        made.append(name)
        return importlib.import_module(name)

    yield make
    for known in [known for known in sys.modules if known.split(".")[0] in made]:
        del sys.modules[known]


def few(*names: str, steps: int = 32, **more: Any) -> Settings:
    return settings_with(
        trainer={"steps": steps}, evaluation={"every": 16, "samples": 4}, logging={"report_to": list(names), **more},
        checkpoint={"every": 16},
    )


class Told:
    """Hears a run, and may do something at a step."""

    def __init__(self, at: int = 0, do: Any = None) -> None:
        self.notes: list[str] = []
        self._at, self._do = at, do

    def __call__(self, kind: str, record: Mapping[str, Any]) -> None:
        if kind == "note":
            self.notes.append(record["text"])
        if kind == "step" and record[m.STEP] == self._at:
            self._do()


def execute(settings: Settings, path: Path, told: Told) -> dict[str, Any]:
    directory = RunDirectory(path)
    directory.create(settings)
    return Run(settings, directory, told).execute()


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rows_of(package: ModuleType) -> list[dict[str, Any]]:
    return [call[1] for call in package.calls if call[0] == "log"]


# ---- numbers ------------------------------------------------------------------------------------


def test_numbers_are_flat_and_finite() -> None:
    record = {
        m.STEP: 7, m.EVAL_STEP: 7, m.LOSS: 0.25, m.KL: math.nan, m.AGE_HISTOGRAM: {"0": 3},
        m.DRAWN_BY: {"recent": 5, "a\x1bb": 1}, m.PASS_EACH: {"1": 0.5, "2": 0.75}, m.PASS_1_INTERVAL: (0.2, 0.8),
        m.BY_LEVEL: {"easy": {"pass@1": 0.5, "interval": [0.25, 0.625], "prompts": 8}}, m.PASS_K: True,
        m.UNMET: {str(n): n for n in range(loggers.MOST_KEYS + 1)},
    }
    assert flat(record) == {
        "train/loss": 0.25, "buffer/drawn_by/recent": 5, "buffer/drawn_by/a\\x1bb": 1, "pass@each/1": 0.5,
        "pass@each/2": 0.75, "pass@1_interval/low": 0.2, "pass@1_interval/high": 0.8,
        "pass@1_by_level/easy/pass@1": 0.5, "pass@1_by_level/easy/interval/low": 0.25,
        "pass@1_by_level/easy/interval/high": 0.625, "pass@1_by_level/easy/prompts": 8,
    }  # fmt: skip


def test_names_for_mlflow_are_plain() -> None:
    # of a level named so by the data: no way out of a folder, no empty part, none of the signs that are refused
    assert loggers._plain("pass@1_by_level/a:b/..") == "pass_at_1_by_level/a_b/_"
    assert loggers._plain("a//b/...c/") == "a/_/b/...c/_"
    assert flat({m.BY_LEVEL: {"../x": {"": 1}}}) == {"pass@1_by_level/.._x/": 1}


def test_settings_are_leaves() -> None:
    assert leaves({"a": {"b": 0.5, "c": {"d": None}}, "e": [1, "x"], "f": True, "g": "t"}) == {
        "a.b": 0.5, "a.c.d": "null", "e": '[1, "x"]', "f": True, "g": "t"}


# ---- what a recipe says -------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "names"), [("[tensorboard]", ("tensorboard",)), ("wandb", ("wandb",)), ("none", ()),
                                              ("[]", ()), ("[mlflow, trackio]", ("mlflow", "trackio"))])
def test_loggers_are_named_on_the_command_line(given: str, names: tuple[str, ...]) -> None:
    assert read_settings("arithmetic", [f"logging.report_to={given}"]).logging.report_to == names


def test_a_logger_that_there_is_not_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"logging.report_to.0 = 'comet': should be 'trackio', 'wandb'"):
        read_settings("arithmetic", ["logging.report_to=[comet]"])


def test_a_project_is_filled_in_where_nothing_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert loggers.in_project(few("wandb"), "mine").logging.project == "mine"
    assert loggers.in_project(few("wandb", project="given"), "mine").logging.project == "given"
    assert loggers.in_project(few(), "mine").logging.project is None
    monkeypatch.setenv("WANDB_PROJECT", "outside")
    assert loggers.in_project(few("wandb"), "mine").logging.project is None
    assert loggers.in_project(few("trackio"), "mine").logging.project == "mine"


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_package_that_is_missing_is_said_before_anything_is_made(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # which is how Python marks what cannot be imported
    run = tmp_path / "run"
    words = [command, "enumerable", "logging.report_to=[wandb,trackio]", *(["--run", str(run)] * (command == "train"))]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert "wandb and trackio, which are not installed; install with: pip install wandb trackio" in error
    assert not run.exists()


def test_a_folder_of_files_as_a_logger_leaves_it_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_by_a_logger").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not loggers._is_installed("left_by_a_logger")
    assert loggers._is_installed("numpy")


# ---- whole runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_run_and_its_resumption_are_one_run_of_a_logger(name: str, fakes: Any, tmp_path: Path) -> None:
    package, told, path = fakes(name), Told(), tmp_path / "run"
    settings = few(name, project="here", steps=48)
    interrupted = Told(20, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert execute(settings, path, interrupted)["status"] == "interrupted"
    ended = package.calls[-1]
    assert ended == {"wandb": ("finish", 1), "trackio": ("finish",), "mlflow": ("finish", "KILLED")}[name]
    assert resumed(path, settings, told).execute()["status"] == "done"
    rename = (lambda key: key.replace("@", "_at_")) if name == "mlflow" else str
    sent = [{**flat(line), "step": line.get(m.STEP, line.get(m.EVAL_STEP))} for line in lines_of(path)]
    rows = rows_of(package)
    assert [{rename(key): value for key, value in row.items() if key != m.WALL} for row in sent] == [
        {key: value for key, value in row.items() if key != m.WALL} for row in rows]
    assert sum("train/loss" in row for row in rows) == 48
    known = json.loads((path / "loggers" / f"{name}.json").read_text())
    ids = {"wandb": "made-up", "trackio": "run", "mlflow": "r7"}
    assert known == {"project": "here", "name": "run", "id": ids[name]}
    begun = [call[1] for call in package.calls if call[0] == "init"]
    if name == "mlflow":
        assert begun == [{"experiment": "e1", "name": "run"}]
        assert [call for call in package.calls if call[0] == "again"] == [("again", "r7", "RUNNING")]
        params = {key: value for call in package.calls if call[0] == "params" for key, value in call[1].items()}
        assert (params["trainer.steps"], params["logging.project"]) == ("48", "here")
    else:
        assert [(given["project"], given["name"], given["resume"]) for given in begun] == [("here", "run", "allow")] * 2
        assert begun[0]["config"] == settings.resolved()
    if name == "wandb":
        assert [given["id"] for given in begun] == [None, "made-up"]
    assert told.notes == ["resuming from step 32"]
    assert package.calls[-1] == {"wandb": ("finish", 0), "trackio": ("finish",), "mlflow": ("finish", "FINISHED")}[name]


@pytest.mark.parametrize(("at", "sent"), [("init", 0), (3, 3)])  # one evaluation and two steps come before step 3
def test_a_logger_that_fails_is_named_once_and_left_alone(
    at: str | int, sent: int, fakes: Any, tmp_path: Path
) -> None:
    package, told = fakes("wandb"), Told()
    package.fails_at = at
    alone = execute(few(), tmp_path / "alone", Told())
    assert execute(few("wandb"), tmp_path / "run", told)["status"] == alone["status"] == "done"
    (note,) = told.notes
    assert note.startswith("logger wandb is left alone from now on: ")
    assert note.endswith("SystemExit: no key" if at == "init" else "OSError: no network at 3 \\x1b[31m")
    assert len(rows_of(package)) == sent
    assert "finish" not in [call[0] for call in package.calls]
    digests = [(tmp_path / run / "final" / "model.safetensors").read_bytes() for run in ("alone", "run")]
    assert digests[0] == digests[1]


def test_a_logger_is_closed_when_the_run_fails(fakes: Any, tmp_path: Path) -> None:
    package = fakes("wandb")

    def fail() -> None:
        raise RuntimeError("the disk is on fire")

    assert execute(few("wandb"), tmp_path / "run", Told(5, fail))["status"] == "failed"
    assert package.calls[-1] == ("finish", 1)
    assert rows_of(package)[-1]["step"] == 4


def test_a_run_that_a_script_has_begun_is_used_and_left_open(fakes: Any, tmp_path: Path) -> None:
    package = fakes("wandb")
    package.run = package.Run({"id": "theirs"})
    execute(few("wandb"), tmp_path / "run", Told())
    assert {call[0] for call in package.calls} == {"config", "axis", "log"}


# ---- slow ones ----------------------------------------------------------------------------------


class Stuck:
    """A logger that waits, until it is let go."""

    id = "stuck"

    def __init__(self) -> None:
        self.entered, self.go, self.logged, self.status = threading.Event(), threading.Event(), list[int](), ""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.entered.set()
        assert self.go.wait(60)
        self.logged.append(step)

    def close(self, status: str) -> None:
        self.status = status


def test_a_logger_that_hangs_is_left_after_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stuck, told = Stuck(), Told()
    monkeypatch.setattr(loggers, "CLOSE_S", 0.01)
    monkeypatch.setitem(loggers.LOGGERS, "wandb", lambda run: stuck)
    made = Loggers(few("wandb"), tmp_path, told, step=0)
    made.say("ready", {})
    made.say("step", {m.STEP: 1, m.LOSS: 0.5})
    made.close("done")
    made.close("failed")
    assert told.notes == ["logger wandb is left alone from now on: it did not end within 0.01 s, and what waits for it "
                          "is lost"]
    stuck.go.set()


def test_one_that_is_far_behind_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    monkeypatch.setattr(loggers, "MOST_WAITING", 2)
    feed = Feed("stuck", lambda: stuck)
    feed.put((1, {}))
    assert stuck.entered.wait(60)
    for step in (2, 3):
        feed.put((step, {}))
    assert feed.problem == ""
    feed.put((4, {}))
    assert feed.problem == "it is 2 lines behind"
    stuck.go.set()


# ---- the real TensorBoard -----------------------------------------------------------------------


def test_tensorboard_has_every_number_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'tba[loggers]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings, path = few("tensorboard", steps=48), tmp_path / "run"
    interrupted = Told(20, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert execute(settings, path, interrupted)["status"] == "interrupted"
    assert resumed(path, settings, Told()).execute()["status"] == "done"
    found = EventAccumulator(str(path / "loggers" / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in lines_of(path):
        for name, value in flat(line).items():
            expected.setdefault(name, []).append((line.get(m.STEP, line.get(m.EVAL_STEP)), value))
    tags = found.Tags()
    assert set(tags["scalars"]) == set(expected)
    for name, points in expected.items():
        if name != m.WALL:
            events = sorted((event.step, event.value) for event in found.Scalars(name))
            assert [step for step, _ in events] == [step for step, _ in sorted(points)]
            assert [value for _, value in events] == pytest.approx([value for _, value in sorted(points)], rel=1e-6)
    assert "settings/text_summary" in tags["tensors"]
    assert b"trainer.steps: 48" in found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def test_a_checked_tree_keeps_its_loggers() -> None:
    settings = few("wandb", "mlflow", space="me/mine")
    assert check_settings(settings.resolved()).logging == settings.logging
