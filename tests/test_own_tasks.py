"""Tasks of a user's own: what functions are called with, what is refused, and what `tba new` writes."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import make_completion, make_prompt
from tba.cli import main
from tba.preference_settings import RewardSettings
from tba.records import Prompt
from tba.rewards.functions import Failure, Score, score_safely
from tba.rewards.parts import Part, WeightedSum
from tba.rewards.shapes import Called, arguments_of, shape_problem
from tba.sections import LoggingSettings
from tba.settings import SettingsError, TaskSettings
from tba.tasks.custom import Custom
from tba.tasks.own import OwnRewards

ROOT = Path(__file__).resolve().parents[1]
PROMPT = make_prompt("3+4=", answer="7", prompt="hidden")
TWO = [make_completion((5, 2), text="7"), make_completion((6, 7, 2), text="8")]
CHAT = [{"role": "user", "content": "3+4="}]


def a_chat() -> Prompt:
    return make_prompt("p", messages=CHAT, answer="7")


# ---- what a function is called with --------------------------------------------------------------


def test_a_function_of_many_gets_lists_of_one_entry_per_completion() -> None:
    assert arguments_of(PROMPT, TWO) == {
        "prompts": ["3+4=", "3+4="], "completions": ["7", "8"], "completion_ids": [[5, 2], [6, 7, 2]],
        "answer": ["7", "7"],
    }


def test_of_a_chat_prompts_are_messages_and_completions_a_message_each() -> None:
    given = arguments_of(a_chat(), TWO)
    assert given["prompts"] == [CHAT, CHAT]
    assert given["completions"] == [[{"role": "assistant", "content": text}] for text in ("7", "8")]


async def later(completions: list[str], answer: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda completions, **columns: [len(columns), 0], [3, 0]),  # prompts, completion_ids, answer
        (lambda completions, answer: [t == a for t, a in zip(completions, answer, strict=True)], [1, 0]),
        (lambda prompts, completions, completion_ids, **kw: [len(ids) for ids in completion_ids], [2, 3]),
        (lambda **columns: [sorted(columns).index("completions"), 0], [2, 0]),
        (lambda prompt, completions: [prompt.columns["answer"] == c.text for c in completions], [1, 0]),
        (lambda p, cs: [len(cs), 0], [2, 0]),
        (later, [1, 0]),
    ],
)
def test_functions_of_every_shape_are_called(function: Callable[..., Any], expected: list[float]) -> None:
    assert shape_problem(function, PROMPT.columns) == ""
    called = Called(function)
    for _ in range(2):  # an asynchronous one twice in the same loop
        found = score_safely(called, PROMPT, TWO)
        assert [o.reward for o in found if isinstance(o, Score)] == expected
    called.close()


def test_an_asynchronous_function_keeps_its_loop() -> None:
    loops = []

    async def remembers(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    called = Called(remembers)
    assert called(PROMPT, TWO) == called(PROMPT, TWO)
    assert loops[0] is loops[1]
    called.close()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda a: [], ["takes (a)", "def <lambda>(completions, **columns)"]),
        (lambda: [], ["takes ()"]),
        (lambda completions, gold: [], ["needs 'gold'", "answer", "Rename"]),
        (lambda completions, trainer_state: [], ["needs 'trainer_state'", "alone"]),
        (lambda prompt, completions, more: [], ["takes (prompt, completions, more)"]),
        (lambda completions, prompts, prompt: [], ["takes"]),
    ],
)
def test_other_shapes_are_refused_with_what_they_could_be(function: Callable[..., Any], words: list[str]) -> None:
    problem = shape_problem(function, PROMPT.columns)
    assert all(word in problem for word in words), problem


# ---- several -----------------------------------------------------------------------------------


def test_a_part_that_gives_none_leaves_the_sum_to_the_others() -> None:
    parts = [
        Part(name="a", weight=0.5, function=lambda prompt, completions: [0.3, None, None, 1.0]),
        Part(name="b", weight=-2.0, function=lambda prompt, completions: [0.2, 0.7, None, float("nan")]),
    ]
    found = WeightedSum(lambda: parts)(PROMPT, [*TWO, *TWO])
    assert found[0] == Score(reward=pytest.approx(0.5 * 0.3 - 2.0 * 0.2), parts={"a": 0.3, "b": 0.2})
    assert found[1] == Score(reward=pytest.approx(-2.0 * 0.7), parts={"b": 0.7})
    assert [o.reason for o in found[2:] if isinstance(o, Failure)] == ["none", "non_finite"]


# ---- what is refused ---------------------------------------------------------------------------

REWARDS = """
import os

def right(completions, answer, **columns):
    return [float(text == gold) for text, gold in zip(completions, answer)]

def brief(completions):
    return [1.0 / (1 + len(text)) for text in completions]

def short(completions):
    return [1.0]

def words(completions):
    return ["good" for text in completions]

def one_number(completions):
    return 1.0

def needs(completions, level):
    return [0.0 for text in completions]

def strict(completions):
    return [float(int(text)) for text in completions]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, "utf-8")
    (tmp_path / "broken.py").write_text("def f(:\n", "utf-8")
    return tmp_path


def made(folder: Path, **more: Any) -> Custom:
    settings = TaskSettings(name="custom", path=str(folder / "rows.jsonl"), held_out=2, **more)
    return Custom(settings, max_new_tokens=4, score_limit_s=20.0)


def test_every_mistake_of_several_functions_is_in_one_message(folder: Path) -> None:
    file = folder / "rewards.py"
    names = ("right", "short", "words", "one_number", "needs")
    rewards = [RewardSettings(function=f"{file}:{name}") for name in names]
    rewards += [RewardSettings(function=f"{folder / name}.py:f", name=name) for name in ("gone", "broken")]
    rewards += [RewardSettings(function=f"{file}:rigth")]
    with pytest.raises(SettingsError) as caught:
        made(folder, rewards=tuple(rewards)).examine()
    said = str(caught.value)
    assert len(caught.value.problems) == 7, said
    for word in ("short returned 1 rewards for 2 completions", "words gave str 'good'", "one_number returned float",
                 "needs needs 'level'", "there is no file", "SyntaxError", "did you mean right?"):  # fmt: skip
        assert word in said, said


def test_a_function_that_raises_is_noted_and_the_sum_is_scored(folder: Path) -> None:
    file = folder / "rewards.py"
    task = made(folder, rewards=(RewardSettings(function=f"{file}:strict", weight=0.25),
                                 RewardSettings(function=f"{file}:brief", weight=3.0)))  # fmt: skip
    said = task.examine()
    assert "4 prompts for training, 2 held out; columns prompt, answer" in said
    (note,) = task.notes
    assert "rewards.0.function" in note
    assert "ValueError" in note
    scores = task.score(PROMPT, TWO)
    task.close()
    assert [s.reward for s in scores] == [pytest.approx(0.25 * 7 + 3 / 2), pytest.approx(0.25 * 8 + 3 / 2)]
    assert scores[0].parts == {"strict": 7.0, "brief": 0.5}


def test_a_mistake_ends_with_exit_code_2_and_leaves_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["task.name=custom", f"task.path={folder / 'rows.jsonl'}", "task.held_out=2", "mode=lockstep",
             f"task.reward={folder / 'rewards.py'}:needs"]  # fmt: skip
    assert main(["train", "arithmetic", *words, "--run", str(folder / "run")]) == 2
    assert "needs needs 'level'" in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_one_function_or_several_scorers_but_not_both(folder: Path) -> None:
    from tba.task_settings import custom_problems

    file = str(folder / "rows.jsonl")
    both = TaskSettings(name="custom", path=file, reward="m:f", rewards=(RewardSettings(function="m:f"),))
    assert any("give one of the two" in problem for problem in custom_problems(both))
    unnamed = TaskSettings(name="custom", path=file, rewards=(RewardSettings(function="f"),))
    assert any("task.rewards.0.function = 'f' names no function" in problem for problem in custom_problems(unnamed))


def test_one_scorer_shares_what_a_module_defines_by_name(folder: Path) -> None:
    rewards = OwnRewards(f"{folder / 'rewards.py'}:right", (), limit_s=20.0)
    assert rewards.look(PROMPT) == []
    assert rewards.notes == []
    assert [o.reward for o in rewards.score(PROMPT, TWO) if isinstance(o, Score)] == [1.0, 0.0]
    rewards.close()


# ---- tba new -----------------------------------------------------------------------------------


def test_what_is_written_trains_and_its_test_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my-task"]) == 0
    few = ["trainer.steps=2", "trainer.groups_per_step=2", "evaluation.prompts=4", "evaluation.every=0"]
    assert main(["train", "my-task/my-task.yaml", *few, "--run", "run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert summary["status"] == "done"
    assert 0 <= summary["final"]["reward"] <= 1
    monkeypatch.syspath_prepend(tmp_path / "my-task")
    tests = [value for name, value in runpy.run_path("my-task/test_my_task.py").items() if name.startswith("test")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_a_name_that_is_taken_or_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "here").mkdir()
    assert main(["new", str(tmp_path / "here")]) == 2
    assert main(["new", str(tmp_path / "a b")]) == 2
    said = capsys.readouterr().err
    assert "left as it is" in said
    assert "name 'a b'" in said


# ---- the page ----------------------------------------------------------------------------------


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / "docs" / "own_tasks.md").read_text("utf-8"), re.M | re.S)


def test_the_code_of_the_page_runs(folder: Path) -> None:
    source = "\n".join(blocks("python"))
    (folder / "my_rewards.py").write_text(source, "utf-8")
    names: dict[str, Any] = {}
    exec(compile(source, "own_tasks.md", "exec"), names)
    assert names["right"](completions=[" 7", "8"], answer=["7", "7"]) == [1.0, 0.0]
    assert Called(names["polite"])(a_chat(), [make_completion(text="please"), *TWO]) == [1.0, 0.0, 0.0]
    called = Called(names["looked_up"])
    assert called(PROMPT, TWO) == [1.0, 0.0]
    called.close()
    (folder / "my_prompts.jsonl").write_text("\n".join(blocks("json")), "utf-8")
    trees = [yaml.safe_load(block) for block in blocks("yaml")]
    assert [list(tree) for tree in trees] == [["task"], ["task"], ["logging"]]
    assert LoggingSettings.model_validate(trees[2]["logging"]).report_to == ("tensorboard", "wandb")
    for tree in (tree["task"] for tree in trees[:2]):
        tree["path"] = str(folder / tree["path"])
        for reward in tree.get("rewards", ()):
            reward["function"] = str(folder / reward["function"])
        settings = TaskSettings.model_validate({**tree, "held_out": 1})
        assert len(Custom(settings, max_new_tokens=4, score_limit_s=20.0).prompts(lambda text: (1,))) == 1
