"""The command line: reads the user's words, calls the rooms, prints what came of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import typer

from tba import control, jobs, loggers
from tba.metrics import Say, finite
from tba.reading import built_in_recipes, read_settings
from tba.records import visible
from tba.settings import DEBUG, Settings, SettingsError
from tba.signals import end_if_one_is_left, terminated_as_interrupted

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""
STATUS_CODES = {"done": DONE, "failed": FAILED, "interrupted": INTERRUPTED}

buffer_app = typer.Typer(no_args_is_help=True, help="Look into a run's buffer.")
redteam_app = typer.Typer(no_args_is_help=True, help="What a red-teaming run found.")
app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False,
    help="Asynchronous post-training of language models with trajectory balance.",
)


class Runs(Protocol):
    """A run that can be executed."""

    def execute(self) -> dict[str, Any]:
        """Runs to the end; returns the summary."""
        ...


Words = Annotated[list[str] | None, typer.Argument(help="[RECIPE] [key.path=value ...]", show_default=False)]
RunPath = Annotated[Path, typer.Argument(help="A run directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="Run directory; default runs/<recipe>-<time>.")]


@app.command()
def train(words: Words = None, run: RunOption = None, as_json: AsJson = False) -> None:
    """Train with TBA: the main job. RECIPE is a built-in name or a path, default arithmetic."""
    started = time.perf_counter()
    recipe, overrides = split_words(words or [])
    directory = run or default_run_directory(recipe)
    settings = loggers.in_project(checked(recipe, overrides, directory, logs=True), Path(recipe).stem)

    def make(say: Say) -> Runs:
        from tba.run import Run, RunDirectory

        place = RunDirectory(directory)
        place.create(settings)
        try:
            return Run(settings, place, say)
        except SettingsError:
            shutil.rmtree(directory)  # made a moment ago: the corrected command may have its name
            raise

    _execute(make, settings.trainer.steps, started, as_json)


@app.command()
def resume(run: RunPath, as_json: AsJson = False) -> None:
    """Go on from the newest complete checkpoint of a run."""
    started = time.perf_counter()
    settings = jobs.settings_of(run)
    if missing := jobs.lacking(settings, logs=True):
        raise SettingsError(missing)

    def make(say: Say) -> Runs:
        from tba.run import resumed

        return resumed(run, settings, say)

    _execute(make, settings.trainer.steps, started, as_json)


@app.command("eval")
def evaluate(
    where: Annotated[str, typer.Argument(metavar="RUN-or-MODEL", help="A run directory, or a model.")],
    task: Annotated[str | None, typer.Option("--task", help="Recipe whose task to use.")] = None,
    variants: Annotated[
        int, typer.Option("--variants", min=0, max=1000, help="Also that many variants of each problem, fresh numbers.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's final model, or any model, on held-out prompts."""
    subject, reference = jobs.subject_of(where, task)
    if missing := jobs.lacking(subject):
        raise SettingsError(missing)
    found = finite(jobs.evaluate(subject, reference, variants=variants))
    _print_table({name: str(value) for name, value in found.items()}, to_stderr=as_json)
    if as_json:
        print(json.dumps({"model": where, **found}, allow_nan=False))


@app.command()
def sft(words: Words = None, run: RunOption = None, as_json: AsJson = False) -> None:
    """Supervised warm start of a recipe's model on its task's demonstrations."""
    recipe, overrides = split_words(words or [])
    directory = run or default_run_directory(recipe)
    settings = checked(recipe, overrides, directory, scores=False)
    directory.mkdir(parents=True)
    found = finite(jobs.warm_start(settings, directory / "final", _to_stderr))
    _print_table({name: str(value) for name, value in found.items()}, to_stderr=as_json)
    if as_json:
        print(json.dumps({"status": "done", "run": str(directory), "final": found}, allow_nan=False))


@app.command("reward-model")
def reward_model(words: Words = None, run: RunOption = None, as_json: AsJson = False) -> None:
    """Train a reward model from a recipe's preference pairs; says how well it knows held-out ones."""
    recipe, overrides = split_words(words or [])
    directory = run or default_run_directory(recipe)
    settings = checked(recipe, overrides, directory, scores=False)
    report = finite(jobs.train_reward_model(settings, directory / "final", _to_stderr))
    (directory / "pairs.json").write_text(json.dumps(report, indent=1, allow_nan=False), "utf-8")
    table = {name: str(value) for name, value in report["final"].items() if name != "reliability"}
    _print_table(table, to_stderr=as_json)
    if as_json:
        print(json.dumps({"status": "done", "run": str(directory), **report}, allow_nan=False))


@app.command()
def check(words: Words = None) -> None:
    """Refuse what can be refused before a model loads; print the batch and memory arithmetic."""
    recipe, overrides = split_words(words or [])
    settings = checked(recipe, overrides, fetches=False, logs=True)
    data = jobs.data_of(settings)
    _print_table({**jobs.arithmetic_of(settings), **data})
    print(f"{recipe}: nothing is wrong that can be seen without loading the model.")


@app.command()
def report(run: RunPath) -> None:
    """Write RUN/report.html."""
    jobs.settings_of(run)
    from tba.report import write_report

    print(write_report(run))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Two or more run directories.")],
    metric: Annotated[str | None, typer.Option("--metric", help="Held-out number to draw against KL.")] = None,
    html: Annotated[Path, typer.Option("--html", help="The page to write.")] = Path("compare.html"),
) -> None:
    """Put runs side by side: a table here, and one HTML page with table, frontier and curves."""
    from tba.report import compare as beside

    problems = [*beside.problems_of(runs), *beside.target_problems(html)]
    if problems:
        raise SettingsError(problems)
    sides = beside.read_sides(runs)
    chosen, problems = beside.metric_of(sides, metric)
    if problems:
        raise SettingsError(problems)
    rows = beside.table(sides, chosen)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(visible("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()))
    beside.write_page(sides, chosen, html)
    print(html)


@app.command("try")
def try_out(
    where: Annotated[str, typer.Argument(metavar="RUN-or-MODEL", help="A run directory, or a model.")],
    prompt: Annotated[str | None, typer.Argument(help="One prompt; without it, lines of standard input.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="Recipe whose settings to use.")] = None,
) -> None:
    """Talk to the result."""
    settings, _ = jobs.subject_of(where, task)
    given = iter([prompt]) if prompt is not None else (line.rstrip("\n") for line in sys.stdin)
    for text in jobs.talk(settings, (line for line in given if line)):
        print(visible(text), flush=True)


@buffer_app.command("stats")
def buffer_stats(run: RunPath) -> None:
    """Numbers of the buffer in a run's newest checkpoint."""
    _print_table(jobs.stats_of(jobs.buffer_of(run)))


@buffer_app.command("show")
def buffer_show(
    run: RunPath,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Only this prompt id.")] = None,
    top: Annotated[Literal["reward", "age", "used"] | None, typer.Option("--top", help="Highest first.")] = None,
    most: Annotated[int, typer.Option("--most", min=0, help="Trajectories shown.")] = 20,
) -> None:
    """Trajectories of the buffer in a run's newest checkpoint, newest first or those with the highest `--top`."""
    from tba.buffer.export import ordered

    for owner, entry in ordered(jobs.buffer_of(run), most, top=top, prompt=prompt):
        completion = entry.trajectory.completion
        text = completion.text or " ".join(map(str, completion.tokens))
        print(
            f"{visible(owner.id)}  reward {entry.trajectory.reward:g}  version {completion.version}  "
            f"used {entry.uses}  {visible(text)}"
        )


@buffer_app.command("export")
def buffer_export(
    run: RunPath, file: Annotated[Path, typer.Argument(help="A new .jsonl or .parquet file.")]
) -> None:
    """Write the buffer of a run's newest checkpoint as JSON lines or Parquet."""
    jobs.export(jobs.buffer_of(run), file)


@buffer_app.command("replay")
def buffer_replay(
    run: RunPath,
    step: Annotated[int, typer.Option("--step", min=1, max=1 << 53, help="A recorded step.")],
    objective: Annotated[str | None, typer.Option("--objective", help="Also under this objective.")] = None,
    top: Annotated[int, typer.Option("--top", min=0, help="Groups shown, the largest residuals first.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Compute a past step again from what was recorded of it, and compare with what was logged."""
    settings = jobs.settings_of(run)
    from tba import replay

    found = replay.replay(run, settings, step, objective)
    _print_table(replay.summary_of(found), to_stderr=as_json)
    for group in replay.groups_of(found)[:top]:
        print(visible(replay.line_of(group)), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(finite(replay.plain(found, top)), allow_nan=False))
    if not found.is_same:
        raise typer.Exit(FAILED)


@app.command("buffer", context_settings={"ignore_unknown_options": True}, add_help_option=False)
def look_into_buffer(words: Words = None) -> None:
    """Look into a run's buffer: stats, show, export, replay."""
    raise typer.Exit(buffer_app(args=words or ["--help"], standalone_mode=False, prog_name="tba buffer") or DONE)


@redteam_app.callback()
def redteam_group() -> None:
    """What a red-teaming run found."""


@redteam_app.command("export")
def redteam_export(
    run: RunPath, file: Annotated[Path, typer.Argument(help="A new .jsonl or .parquet file.")],
    most: Annotated[int, typer.Option("--most", min=1, help="Attacks written, the likeliest.")] = 10_000,
    answers: Annotated[bool, typer.Option("--answers", help="Ask the victim again; write its answers too.")] = False,
) -> None:
    """Write the attacks that work, clustered and with scores, from a run's newest checkpoint: to tune for safety."""
    print(jobs.export_attacks(run, file, most=most, answers=answers))


@app.command("redteam", context_settings={"ignore_unknown_options": True}, add_help_option=False)
def look_into_redteam(words: Words = None) -> None:
    """What a red-teaming run found: export."""
    raise typer.Exit(redteam_app(args=words or ["--help"], standalone_mode=False, prog_name="tba redteam") or DONE)


@app.command()
def searchers(
    run: Annotated[Path, typer.Argument(help="Directory of a run that is under way in async mode.")],
    do: Annotated[Literal["list", "add", "remove"], typer.Argument(help="What to do.")] = "list",
    count: Annotated[int, typer.Argument(min=1, help="How many; those that came last are removed.")] = 1,
    as_json: AsJson = False,
) -> None:
    """List, add or remove searchers of a run that is under way."""
    settings = jobs.settings_of(run)
    if settings.mode != "async":
        raise SettingsError([f"run {str(run)!r} has mode = {settings.mode}: trainer and searcher are one process."])
    found = control.ask(run, {"do": do, "count": count})
    if as_json:
        print(json.dumps(finite(found), allow_nan=False))
        return
    if found["changed"]:
        print(f"{'added' if do == 'add' else 'leaving'}: {', '.join(found['changed'])}")
    for line in found["searchers"]:
        heard = "never" if line["heard_s"] is None else f"{line['heard_s']:.0f} s ago"
        print(f"{line['name']:14} {line['state']:16} delivered {line['delivered'] or 0} groups, last {heard}, "
              f"holds {line['held'] or 0} prompts  {visible(line['where'] or '')}")


@app.command()
def watch(
    run: RunPath,
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, help="Default 7860, or a free one.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show it here instead of in a browser.")] = False,
) -> None:
    """Watch a run, under way or ended, on a live page of this machine; Ctrl-C ends the watching."""
    from tba.watch.follower import check_run

    check_run(run)
    try:
        if terminal:
            from tba.watch.terminal import show

            show(run)
        else:
            from tba.watch.server import serve

            serve(run, port, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        raise typer.Exit(DONE) from None


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Folder to write; its last word names the task.")],
) -> None:
    """Write a task of your own that runs at once: recipe, prompts, reward and test."""
    from tba.scaffold import write_task

    _print_table(write_task(name))
    print(f"\nnext:  tba train {Path(name) / Path(name).name}.yaml --run first_run")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has: versions, devices, cores, memory, disk, and what is missing for what."""
    from tba.doctor import examine

    found, missing = examine()
    _print_table(found, to_stderr=as_json)
    for line in missing:
        print(f"note: {line}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps({"found": found, "missing": missing}))


@app.command()
def recipes() -> None:
    """List the built-in recipes."""
    _print_table(built_in_recipes())


# ---- inside -----------------------------------------------------------------------------------------


def split_words(words: list[str]) -> tuple[str, list[str]]:
    """Recipe and overrides of the words after a command; a first word with `=` is an override."""
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return "arithmetic", words


def default_run_directory(recipe: str) -> Path:
    """`runs/<recipe>-<time>`, a name that is not taken."""
    stem = f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path


def checked(
    recipe: str, overrides: list[str], directory: Path | None = None, *, scores: bool = True, fetches: bool = True,
    logs: bool = False,
) -> Settings:
    """The settings, with everything refused that can be refused before a model loads.

    `scores`: rewards are needed; `fetches`: what is not on this machine may be fetched to look at it; `logs`: loggers
    are needed.

    Raises:
        SettingsError: with all that is wrong.
    """
    problems: list[str] = []
    try:
        is_taken = directory is not None and directory.exists()
    except OSError as error:
        is_taken = False
        problems.append(f"run directory {str(directory)[:80]!r}: {error.strerror}; choose another with --run.")
    if is_taken:
        problems.append(
            f"run directory {str(directory)!r} exists already; choose another with --run, or go on with: "
            f"tba resume {directory}"
        )
    settings = read_settings(recipe, overrides, problems)
    if missing := jobs.lacking(settings, scores=scores, fetches=fetches, logs=logs):
        raise SettingsError(missing)
    return settings


def _execute(make: Callable[[Say], Runs], steps: int, started: float, as_json: bool) -> None:
    from tba.progress import Progress

    with Progress(steps, started) as progress, terminated_as_interrupted():
        try:
            summary = make(progress.say).execute()
        except KeyboardInterrupt:  # before the run could stop by itself, or for the second time
            _to_stderr("interrupted; a run that has a checkpoint goes on with: tba resume RUN")
            raise
    if summary["status"] == "failed":
        _to_stderr(f"error: {visible(summary['message'])}")
    else:
        progress.show_summary(summary, on_stdout=not as_json)
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    raise typer.Exit(STATUS_CODES[summary["status"]])


def _print_table(rows: Mapping[str, str], *, to_stderr: bool = False) -> None:
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        print(f"{name:{width}}  {value}", file=sys.stderr if to_stderr else sys.stdout)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. `arguments` default to the process's."""
    code = _code_of(arguments)
    if arguments is None:
        end_if_one_is_left(code)
    return code


def _code_of(arguments: Sequence[str] | None) -> int:
    try:
        code = app(args=arguments, standalone_mode=False)
    except SettingsError as error:
        print("\n".join(f"error: {visible(problem)}" for problem in error.problems), file=sys.stderr)
        return WRONG_INPUT
    except (typer.Abort, KeyboardInterrupt):
        _to_stderr("interrupted")
        return INTERRUPTED
    except Exception as error:
        show = getattr(error, "show", None)
        if show is not None and hasattr(error, "exit_code"):  # the parser's own errors
            show()
            return WRONG_INPUT
        if DEBUG in os.environ:
            raise
        _to_stderr(f"error: {type(error).__name__}: {visible(str(error))} (set {DEBUG}=1 for the traceback)")
        return FAILED
    return code if isinstance(code, int) else DONE
