"""The command line: what each command prints, what it refuses, and its exit code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from makers import a_group, a_trajectory, settings_with
from tba import checkpoint
from tba.cli import default_run_directory, main, split_words, visible
from tba.depot import make_buffer
from tba.progress import Progress
from tba.records import Group, Prompt

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ["trainer.steps=16", "evaluation.every=0", "evaluation.samples=4", "seed=3"]
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egnp\r\x00\ud800"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny finished lockstep run."""
    path = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "enumerable", *TINY, "--run", str(path)]) == 0
    return path


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A recipe whose evaluation takes no time."""
    path = tmp_path / "small.yaml"
    path.write_text("mode: lockstep\nevaluation: {prompts: 8, samples: 2}\nsearch: {max_new_tokens: 12}\n")
    return str(path)


def in_process(*words: str) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr and CPU seconds of a process of its own."""
    done = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    out, err = done.stdout.read(), done.stderr.read()
    _, status, used = os.wait4(done.pid, 0)
    done.returncode = os.waitstatus_to_exitcode(status)
    done.stdout.close()
    done.stderr.close()
    return done.returncode, out, err, used.ru_utime + used.ru_stime


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


# ---- quick and light -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "limit"), [(("-c", "import tba"), 0.5), (("-m", "tba", "train", "enumerable", "trainer.steps=-1"), 3.0)]
)
def test_import_and_refusal_are_quick(words, limit):
    found = [in_process(*words) for _ in range(5)]
    assert {code for code, *_ in found} == {0 if limit < 1 else 2}
    assert statistics.median(seconds for *_, seconds in found) < limit


LIGHT = """
import sys
{}
heavy = sorted({{"torch", "ray", "transformers", "pyarrow"}} & set(sys.modules))
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "code",
    ["import tba", "from tba.cli import main; main(['--help'])", "from tba.cli import main; main(['train', '--help'])",
     "from tba.cli import main; assert main(['train', 'enumerable', 'seed=x']) == 2",
     "from tba.cli import main; assert main(['check', 'enumerable']) == 0",
     "from tba.cli import main; assert main(['recipes']) == 0"],
)
def test_what_needs_no_model_loads_no_torch_and_no_ray(code):
    done, _, said, _ = in_process("-c", LIGHT.format(code))
    assert done == 0, said


# ---- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "recipe", "overrides"),
    [([], "arithmetic", []), (["enumerable"], "enumerable", []), (["seed=3"], "arithmetic", ["seed=3"]),
     (["seed=3", "enumerable"], "arithmetic", ["seed=3", "enumerable"]), (["a.yaml", "x=1"], "a.yaml", ["x=1"])],
)
def test_a_first_word_with_an_equals_sign_is_an_override(words, recipe, overrides):
    assert split_words(words) == (recipe, overrides)


def test_train_with_a_wrong_override_and_no_recipe(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, said, _ = in_process("-m", "tba", "train", "foo=bar")
    assert (code, out) == (2, "")
    assert "foo is no setting" in said
    assert list(tmp_path.iterdir()) == []


def test_the_default_run_directory_is_named_after_recipe_and_time_and_is_free(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        names.append(default_run_directory("some/where/mine.yaml"))
        names[-1].mkdir(parents=True)
    assert len(set(names)) == 3
    assert all(p.parent == Path("runs") and p.name.startswith("mine-2") for p in names)


@pytest.mark.parametrize(
    "words",
    [["trian"], ["train", "enumerable", "--jsno"], ["buffer", "stat"], ["resume"], ["eval"], ["buffer", "show"],
     ["buffer", "show", "--most"], ["train", "enumerable", "--run"], ["resume", "a", "b"], ["check", "no-such-recipe"],
     ["train", "enumerable", "x"],
     ["resume", "nowhere"], ["report", "nowhere"], ["buffer", "stats", "nowhere"], ["eval", "./nowhere"],
     ["try", "./nowhere", "hi"], ["eval", "arithmetic", "--task", "no-such"], ["sft", "no-such"]],
    ids=" ".join,
)
def test_wrong_words_exit_with_2_and_a_message(words, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said.strip()
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


COMMANDS = ("", "train", "resume", "eval", "sft", "check", "report", "buffer", "buffer stats", "buffer show",
            "buffer export", "buffer replay", "redteam", "redteam export", "try", "recipes")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


# ---- commands --------------------------------------------------------------------------------------


def test_json_is_one_object_alone_on_stdout_with_the_promised_keys(tmp_path: Path):
    run = tmp_path / "run"
    code, out, said, _ = in_process("-m", "tba", "train", "enumerable", *TINY, "--run", str(run), "--json")
    assert code == 0, said
    assert out.count("\n") == 1
    summary = json.loads(out)
    assert set(summary) >= {"status", "run", "steps", "version", "wall_s", "seed", "start", "final", "ledger"}
    assert (summary["status"], summary["run"], summary["seed"]) == ("done", str(run), 3)
    assert (summary["steps"], summary["version"]) == (16, 16)
    assert 0 < summary["wall_s"] < 60
    for held_out in (summary["start"], summary["final"]):
        assert set(held_out) >= {"pass@1", "pass@1_greedy", "reward", "kl", "tv"}
    assert summary["start"]["kl"] == pytest.approx(0, abs=1e-5)
    assert summary["final"]["kl"] > 0.05
    assert set(summary["ledger"]) == {"trajectories", "tokens", "prompts"}
    assert summary["ledger"] == json.loads((run / "ledger.json").read_text())
    assert "step 16/16" in said


def test_without_json_the_result_is_for_people(finished: Path, capsys):
    assert main(["resume", str(finished)]) == 0
    out, said = capsys.readouterr()
    assert "done after 16 steps" in out
    assert str(finished / "report.html") in out.replace("\n", "")
    assert "resuming from step 16" in said


def test_an_existing_run_directory_is_refused_and_left_alone(finished: Path, capsys):
    before = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in finished.rglob("*") if p.is_file()}
    assert main(["train", "enumerable", *TINY, "trainer.group_size=1", "--run", str(finished)]) == 2
    said = capsys.readouterr().err
    assert f"run directory {str(finished)!r} exists already" in said
    assert f"tba resume {finished}" in said
    assert "trainer.group_size = 1" in said  # all errors at once
    assert before == {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in finished.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "override", ["task.symbols=27", "search.max_new_tokens=30", "architecture.positions=20"]
)
def test_a_task_or_table_that_cannot_be_made_is_the_users_mistake_and_leaves_nothing(tmp_path: Path, override, capsys):
    run = tmp_path / "run"
    assert main(["train", "enumerable", *TINY, override, "--run", str(run)]) == 2
    assert override.replace("=", " = ") in capsys.readouterr().err
    assert not run.exists()


def test_a_run_without_held_out_prompts_works_or_is_refused(tmp_path: Path, capsys):
    words = ["mode=lockstep", "trainer.steps=2", "evaluation.every=0", "task.max_value=5", "task.held_out=0"]
    code = main(["train", "arithmetic", *words, "--run", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert code == 0 or (code == 2 and "task.held_out = 0" in said), said


@pytest.mark.parametrize("override", ["task.symbols=27", "search.max_new_tokens=30"])
def test_check_refuses_what_train_would_refuse(override, capsys):
    assert main(["check", "enumerable", override]) == 2
    assert override.replace("=", " = ") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "line"),
    [("enumerable", "8 groups x 16 trajectories = 128 trajectories a step"),
     ("arithmetic", "64 groups x 8 trajectories = 512 trajectories a step"), ("arithmetic-sft", "parameters")],
)
def test_check_prints_the_arithmetic_of_every_recipe(recipe, line, capsys):
    assert main(["check", recipe]) == 0
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(("words", "line"), [
    # 6 steps x 4 groups = 24 groups for 3 rounds of 2 steps; 8 groups a round at reuse 2 are 4 prompts: 12 in all.
    (["mode=lockstep"], "at most 2 groups consumed per prompt: then the trainer waits; at least 2: searchers wait "
                        "when 0 rounds ahead"),
    # With a lead of 3, the last publication that searchers see (round 2) lets rounds 0 to 5 go: 24 prompts.
    (["mode=async", "async.lead=3"], "at least 1: searchers wait when 3 rounds ahead"),
    # 112 trajectories to begin with are 7 prompts of 16 for round 0: 7 + 2 x 4 = 15 at least, 24 / 15 = 1.6.
    (["mode=async", "buffer.initial=112"], "at most 1.6 groups consumed per prompt: then the trainer waits; no least, "
                                           "since searchers never wait (async.lead is null)"),
])
def test_check_says_how_often_what_is_searched_will_be_used(words: list[str], line: str, capsys):
    rate = ["trainer.steps=6", "trainer.sync_every=2", "trainer.groups_per_step=4", "buffer.reuse=2"]
    assert main(["check", "enumerable", *rate, *words]) == 0
    assert line in capsys.readouterr().out


def test_recipes_lists_every_built_in_recipe(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = Path(__file__).resolve().parents[1] / "src" / "tba" / "recipes"
    names = [line.split()[0] for line in lines]
    assert sorted(names) == sorted(path.stem for path in folder.glob("*.yaml"))
    assert {"arithmetic", "enumerable", "tldr-pythia410m", "maths-smollm2"} <= set(names)
    assert all(len(line.split()) > 4 for line in lines)


def test_eval_of_a_run_gives_the_runs_own_final_numbers(finished: Path, capsys):
    assert main(["eval", str(finished), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    final = json.loads((finished / "summary.json").read_text())["final"]
    for name in ("pass@1", "pass@1_greedy", "reward", "tv", "kl"):
        assert found[name] == pytest.approx(final[name]), name


def test_eval_of_a_model_on_a_recipes_task(small: str, capsys):
    assert main(["eval", "arithmetic", "--task", small, "--json"]) == 0
    out, said = capsys.readouterr()
    found = json.loads(out)
    assert (found["model"], found["prompts"], found["samples"]) == ("arithmetic", 8, 2)
    assert "pass@1" in said
    assert main(["eval", "arithmetic", "--task", small]) == 0
    assert f"pass@1 {' ' * 7} {found['pass@1']}".split() in [x.split() for x in capsys.readouterr().out.splitlines()]


def test_report_writes_the_page_and_says_where(finished: Path, capsys):
    (finished / "report.html").unlink()
    assert main(["report", str(finished)]) == 0
    assert capsys.readouterr().out.strip() == str(finished / "report.html")
    assert (finished / "report.html").stat().st_size > 1000


def test_try_of_a_run_answers_the_prompt(finished: Path, capsys):
    assert main(["try", str(finished), "ab"]) == 0
    (answer,) = capsys.readouterr().out.splitlines()
    assert set(answer) <= set("abc")


def test_try_of_a_model_answers_each_line_of_standard_input(small: str, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", iter(["3+4=\n", "\n", "5*2=\n"]))
    assert main(["try", "arithmetic", "--task", small]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_sft_writes_a_model_and_its_numbers(tmp_path: Path, capsys):
    run = tmp_path / "sft"
    small = ["sft.steps=2", "sft.batch_size=8", "evaluation.prompts=8", "evaluation.samples=2"]
    words = [*small, "--run", str(run), "--json"]
    assert main(["sft", "arithmetic-sft", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["run"], found["final"]["prompts"]) == ("done", str(run), 8)
    assert {p.name for p in (run / "final").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert main(["sft", "arithmetic-sft", *words]) == 2
    assert "exists already" in capsys.readouterr().err


# ---- the buffer, and hostile text ------------------------------------------------------------------


def test_buffer_stats_show_and_export_agree(finished: Path, tmp_path: Path, capsys):
    assert main(["buffer", "stats", str(finished)]) == 0
    stats = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    ledger = json.loads((finished / "ledger.json").read_text())
    assert int(stats["trajectories"]) == ledger["trajectories"]["in_buffer"]
    assert json.loads({k.strip(): v for k, v in stats.items()}["tokens delivered"]) == ledger["tokens"]["delivered"]
    file = tmp_path / "out.jsonl"
    assert main(["buffer", "export", str(finished), str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == ledger["trajectories"]["in_buffer"]
    assert sum(len(row["tokens"]) for row in rows) == ledger["tokens"]["in_buffer"]
    assert sum(row["uses"] for row in rows) <= 16 * 128
    capsys.readouterr()
    assert main(["buffer", "show", str(finished), "--most", "3", "--prompt", "ab"]) == 0
    shown = capsys.readouterr().out.splitlines()
    newest = [row for row in rows if row["prompt_id"] == "ab"][-1]
    assert len(shown) == 3
    assert shown[0].split()[:3] == ["ab", "reward", f"{newest['reward']:g}"]
    assert main(["buffer", "show", str(finished), "--most", "1", "--top", "reward"]) == 0
    assert f"reward {max(row['reward'] for row in rows):g} " in capsys.readouterr().out
    table = tmp_path / "out.parquet"
    assert main(["buffer", "export", str(finished), str(table)]) == 0
    assert table.read_bytes()[:4] == b"PAR1"
    assert main(["buffer", "export", str(finished), str(table)]) == 2
    assert main(["buffer", "export", str(finished), str(tmp_path / "out.csv")]) == 2
    assert main(["buffer", "export", str(finished), str(file)]) == 2  # never over an existing file
    assert len(file.read_text().splitlines()) == len(rows)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose buffer holds text that would steer a terminal."""
    settings = settings_with()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.resolved()))
    buffer, name = make_buffer(settings), HOSTILE.removesuffix("\ud800")
    prompt = Prompt(id=name, tokens=(1, 3), text=HOSTILE)
    buffer.add(Group(prompt=prompt, trajectories=(a_trajectory(name, text=HOSTILE),)))
    buffer.reject(a_group("p", [((5, 2), 0.1)]), HOSTILE)
    checkpoint.save(tmp_path, 16, buffer.save, {}, keep=1)
    return tmp_path


def test_untrusted_text_does_not_steer_the_terminal(hostile: Path, capsys):
    for command in ("show", "stats"):
        assert main(["buffer", command, str(hostile)]) == 0
        out = capsys.readouterr().out
        assert is_harmless(out)
        assert "owned" in out
    assert main(["buffer", "export", str(hostile), str(hostile / "x.jsonl")]) == 0
    assert is_harmless((hostile / "x.jsonl").read_text())
    assert json.loads((hostile / "x.jsonl").read_text())["completion"].startswith("\x1b[2J")


def test_messages_about_hostile_names_are_harmless(tmp_path: Path, capsys):
    place = tmp_path / "run\x1b[2J"
    place.mkdir()
    assert main(["train", "enumerable", "--run", str(place)]) == 2
    assert main(["resume", str(place)]) == 2
    assert is_harmless(capsys.readouterr().err)


def test_notes_of_a_run_do_not_steer_the_terminal():
    out = io.StringIO()
    Progress(3, 0.0, Console(file=out)).say("note", {"text": f"searcher-1 died: {HOSTILE}"})
    assert is_harmless(out.getvalue())
    assert "owned" in out.getvalue()


@pytest.mark.parametrize("text", ["plain text, 1+1=2", "naïve 汉字", ""])
def test_visible_leaves_what_can_be_read(text):
    assert visible(text) == text


def test_visible_shows_everything_else_as_an_escape():
    assert visible("a\x1b[31m\nb\x00\u202e\x7f\x9b\ud800\u2028") == (
        "a\\x1b[31m\\nb\\x00\\u202e\\x7f\\x9b\\ud800\\u2028"
    )


# ---- variants --------------------------------------------------------------------------------------


def test_variants_are_evaluated_beside_the_problems(small: str, capsys):
    assert main(["eval", "arithmetic", "--task", small, "--variants", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for prefix in ("variants", "memorised"):
        assert found[f"{prefix}/prompts"] == 8
        assert found[f"{prefix}/instances"] == 3
        assert 0 <= found[f"{prefix}/all_right"] <= found[f"{prefix}/fresh"] <= 1
        assert found[f"{prefix}/gap"] == pytest.approx(found[f"{prefix}/original"] - found[f"{prefix}/fresh"])
    assert found["eval/seed"] == 0
    assert found["pass@1_interval"][0] <= found["pass@1"] <= found["pass@1_interval"][1]


def test_variants_of_a_task_without_templates_are_refused(capsys):
    assert main(["eval", "new-table", "--task", "enumerable", "--variants", "3"]) == 2
    assert "--variants 3: the problems of task.name = 'enumerable' have no templates" in capsys.readouterr().err
