"""The maths task: what is read, what is refused and where, how it is asked, and what scores."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pyarrow import parquet

from support import make_completion, make_prompt, make_settings
from tba.assembly import as_completion
from tba.cli import main
from tba.jobs import data_of
from tba.maths_settings import ColumnSettings
from tba.policy import Policy, load_policy
from tba.reading import check_settings, read_settings
from tba.records import Prompt
from tba.rewards.words import found_word, same_word
from tba.settings import ArchitectureSettings, SettingsError, TaskSettings
from tba.sft import sft
from tba.tasks.families import NUMBERS, REFUSED, TEXTS, family_problems, split_pools, taking_turns
from tba.tasks.maths import Maths
from tba.tasks.maths_prompts import Asker
from tba.tasks.maths_rows import Problem, gold_of, key_of, last_boxed, row_problem, without_calculator
from tba.tokenizers import character_tokenizer

CLIPS = {"question": "48 clips and half as many?", "answer": "48/2=<<48/2=24>>24\n48+24=$<<48+24=72>>72\n#### 72"}
COWS = {"question": "Two herds of 30 cows?", "answer": "2*30 = <<2*30=60>>60\n#### 60"}
PENS = {"question": "Pens at $2, 5 of them?", "answer": "2*5=<<2*5=10>>10\n#### 10"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def make(**settings: Any) -> Maths:
    return Maths(TaskSettings.model_validate({"name": "maths", **settings}), max_new_tokens=8, score_limit_s=1.0)


def encode(asked: Any) -> tuple[int, ...]:
    """As many ids as the prompt has characters, and one."""
    text = asked if isinstance(asked, str) else "".join(m["content"] for m in asked)
    return (1, *(ord(c) for c in text))


def problem(question: str = "q?", gold: str = "7", solution: str = "so 7", **more: Any) -> Problem:
    return Problem(place="here:1", question=question, gold=gold, solution=solution, **more)


def reason(**settings: Any) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        make(**settings).prompts(encode)
    return caught.value.problems


def contradictions(**task: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        check_settings({"task": {"name": "maths", **task}})
    return list(caught.value.problems)


# ---- files --------------------------------------------------------------------------------------


def test_a_file_of_gsm8k_and_its_last_rows_held_out(tmp_path: Path) -> None:
    task = make(path=write(tmp_path / "a.jsonl", [CLIPS, COWS, PENS]), held_out=1)
    training, held_out = task.prompts(encode), task.held_out(encode)
    assert [(p.id, p.text, p.columns["gold"]) for p in training] == [
        (f"{tmp_path}/a.jsonl:1", "48 clips and half as many?\n", "72"),
        (f"{tmp_path}/a.jsonl:2", "Two herds of 30 cows?\n", "60"),
    ]
    assert [p.columns["gold"] for p in held_out] == ["10"]
    assert task.demonstration(training[0], random.Random(0), 0.0) == "48/2=24\n48+24=$72\n#### 72"
    assert task.notes == []


def test_a_byte_order_mark_blank_lines_and_carriage_returns_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = "\n".join(["", json.dumps(CLIPS), "   ", json.dumps(COWS) + "\r", "", ""])
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    task = make(path=str(path), held_out=1)
    assert [p.id for p in (*task.prompts(encode), *task.held_out(encode))] == [f"{path}:2", f"{path}:4"]


def test_every_bad_line_of_both_files_is_named_at_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('\n{"question": \n[1]\n{"problem": "p", "gold": "1"}\n{"question": "q", "answer": null}\n')
    two.write_text('{"question": " ", "answer": "1"}\n{"question": "\\ud800", "answer": "1"}\n')
    said = reason(path=str(one), held_out_path=str(two))
    assert [line.partition(" ")[0] for line in said] == [f"{one}:2", f"{one}:3", f"{one}:4", f"{one}:5",
                                                         f"{two}:1", f"{two}:2"]  # fmt: skip
    assert "(line 2) is not JSON" in said[0]
    assert "holds a list" in said[1]
    assert said[2].endswith("has no column 'answer', only 'problem', 'gold'; set task.columns.answer to the one with "
                            "the answer.")  # fmt: skip
    assert "has a 'answer' that is no text: 'None'" in said[3]
    assert "has a 'question' that is no text: ' '" in said[4]
    assert "half of a surrogate pair" in said[5]


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 27)
    assert len(reason(path=str(path))) == 21
    assert reason(path=str(path))[20] == "... and 7 more."


def test_columns_under_other_names(tmp_path: Path) -> None:
    rows = [{"ask": f"{n}?", "gold": n, "how": f"it is {n}", "grade": n % 2} for n in range(1, 4)]
    columns = {"question": "ask", "answer": "gold", "solution": "how", "level": "grade"}
    task = make(path=write(tmp_path / "a.jsonl", rows), held_out=1, columns=columns)
    (first, second), (third,) = task.prompts(encode), task.held_out(encode)
    assert (first.text, dict(first.columns)) == ("1?\n", {"gold": "1", "kind": "number", "level": "1"})
    assert (second.columns["level"], third.columns["level"]) == ("0", "1")
    assert task.demonstration(second, random.Random(0), 0.0) == "it is 2"
    for role in ("level", "solution"):
        bad = {**columns, role: "nowhere"}
        assert f"set task.columns.{role}" in reason(path=str(tmp_path / "a.jsonl"), held_out=1, columns=bad)[0]


def test_the_usual_names_of_math_are_found(tmp_path: Path) -> None:
    rows = [{"problem": f"p{n}", "solution": rf"so \boxed{{{n}}}.", "level": f"Level {n}"} for n in (3, 4)]
    task = make(path=write(tmp_path / "a.jsonl", rows), held_out=1, style="math")
    (first,) = task.prompts(encode)
    assert dict(first.columns) == {"gold": "3", "kind": "number", "level": "Level 3"}
    assert task.gold(first) == r"\boxed{3}"
    assert task.demonstration(first, random.Random(0), 0.0) == r"so \boxed{3}."


def test_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"question": ["a?", "b?", "c?"], "answer": ["1", "2", "3"]}), path)
    task = make(path=str(path), held_out=2)
    assert [(p.id, p.columns["gold"]) for p in task.held_out(encode)] == [(f"{path}:2", "2"), (f"{path}:3", "3")]
    parquet.write_table(pyarrow.table({"question": ["a?", "b?"], "answer": ["1", None]}), path)
    assert reason(path=str(path)) == (f"{path}:2 has a 'answer' that is no text: 'None'.",)
    path.write_bytes(b"PAR1 no more")
    assert "cannot be read as a Parquet file" in reason(path=str(path))[0]


def test_a_data_set_of_the_hub_by_its_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(where: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((where, config, split))
        return [CLIPS, COWS] if split == "train" else [PENS]

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = make(dataset="owner/gsm:main", held_out_dataset="owner/gsm::test")
    assert [p.id for p in task.prompts(encode)] == ["owner/gsm:main:1", "owner/gsm:main:2"]
    assert [p.id for p in task.held_out(encode)] == ["owner/gsm::test:1"]
    assert asked == [("owner/gsm", "main", "train"), ("owner/gsm", None, "test")]

    def fail(*given: Any, **more: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    (said,) = reason(dataset="owner/gsm", held_out=1)
    assert "'owner/gsm' cannot be loaded (ConnectionError: no network)" in said


# ---- golds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "answer", "gold"),
    [
        ("gsm8k", "4+4=8\n#### 8", "8"),
        ("gsm8k", "#### 3\n#### 1,250 ", "1,250"),
        ("gsm8k", "17", "17"),
        ("gsm8k", "work ####", ""),
        ("math", r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("math", r"\boxed{1} then \fbox{x_{1}}", "x_{1}"),
        ("math", r"\boxed{\{1,2\}}", r"\{1,2\}"),
        ("math", r"\boxed{\frac{1}{2}", ""),
        ("math", " [1,4] ", "[1,4]"),
    ],
)
def test_the_gold_answer_of_a_solution(style: str, answer: str, gold: str) -> None:
    assert gold_of(answer, style) == gold


BALANCED = st.recursive(
    st.sampled_from(["x", "12", r"\frac", r"\}", r"\{", " "]),
    lambda parts: parts.map("{{{}}}".format) | st.tuples(parts, parts).map("".join),
)


@hypothesis_settings(deadline=None)
@given(BALANCED)
def test_a_box_ends_where_its_braces_balance(inside: str) -> None:
    assert last_boxed(rf"a \boxed{{5}} b \boxed{{{inside}}} c}}") == inside


def test_the_calculators_marks_go_and_nothing_else() -> None:
    text = "2*3=<<2*3=6>>6, <<6/4=1.5>>1.5 < 2, 8 >> 1, 1 << 3\n>>"
    assert without_calculator(text) == "2*3=6, 1.5 < 2, 8 >> 1, 1 << 3\n>>"


def test_golds_that_the_checker_does_not_find_right_are_named_or_dropped(tmp_path: Path) -> None:
    rows = [CLIPS, {"question": "a?", "answer": "many"}, COWS, {"question": "b?", "answer": "w\n####  "}]
    path = write(tmp_path / "a.jsonl", rows)
    held = write(tmp_path / "b.jsonl", [PENS])
    said = reason(path=path, held_out_path=held)
    assert said[0] == (f"{path}:2: the gold answer 'many' is not found right by task.style = 'gsm8k' when a completion "
                       f"says '#### many'.")  # fmt: skip
    assert said[1].startswith(f"{path}:4: the gold answer ''")
    assert said[2].startswith("2 training problems have such answers")
    task = make(path=path, held_out_path=held, bad_gold="drop")
    assert [p.columns["gold"] for p in task.prompts(encode)] == ["72", "60"]
    assert task.notes == ["2 training problems left out: their gold answer is not found right"]


# ---- sides --------------------------------------------------------------------------------------


def test_no_question_is_on_both_sides_or_twice(tmp_path: Path) -> None:
    spaced = {**COWS, "question": "  Two herds  of 30\ncows? "}
    training = write(tmp_path / "a.jsonl", [CLIPS, COWS, {**CLIPS, "answer": "71"}, PENS, spaced])
    held_out = write(tmp_path / "b.jsonl", [PENS, PENS])
    task = make(path=training, held_out_path=held_out)
    assert [p.columns["gold"] for p in task.prompts(encode)] == ["72", "60"]
    assert [p.columns["gold"] for p in task.held_out(encode)] == ["10"]
    assert task.notes == [
        "1 held-out problems left out: their question came before",
        "3 training problems left out: their question came before or is held out",
    ]


def test_a_question_twice_in_one_file_is_not_split_between_the_sides(tmp_path: Path) -> None:
    task = make(path=write(tmp_path / "a.jsonl", [PENS, CLIPS, COWS, PENS, COWS]), held_out=1)
    assert [p.columns["gold"] for p in task.prompts(encode)] == ["10", "72"]
    assert [p.columns["gold"] for p in task.held_out(encode)] == ["60"]


def test_a_side_without_problems_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [CLIPS, COWS])
    assert "leave 0 training and 2 held-out problems of 2" in reason(path=path, held_out=2)[0]


# ---- prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "asked", "answer"),
    [
        ({"format": "paper"}, "[MATH TASK] Problem:\n q? \n\nSolution:\n", "so 7"),
        ({"format": "vineppo"}, "[MATH_TASK] Problem:\n q? \n\nSolution:", "\nso 7\n"),
        ({}, " q? \n", "so 7"),
        ({"template": "Q{{ level }}: {{ question }}\nA:"}, "Q3:  q? \nA:", "so 7"),
        ({"format": "chat"}, [{"role": "user", "content": " q? "}], "so 7"),
        ({"format": "chat", "template": r"{{ question }} Use \boxed{}."},
         [{"role": "user", "content": r" q?  Use \boxed{}."}], "so 7"),
    ],
)  # fmt: skip
def test_each_format(settings: dict[str, Any], asked: Any, answer: str) -> None:
    asker = Asker(TaskSettings(name="maths", **settings))
    assert asker.ask(problem(" q? ", level="3")) == asked
    assert asker.answer("so 7") == answer


def test_solved_examples_come_first_in_each_format() -> None:
    shots = [problem("a?", solution="A 1"), problem("b?", solution="B 2\n")]
    text = Asker(TaskSettings(template="Q: {{ question }} A: ")).ask(problem("c?"), shots)
    assert text == "Q: a? A: A 1\n\nQ: b? A: B 2\n\nQ: c? A: "
    vine = Asker(TaskSettings(format="vineppo")).ask(problem("c?"), shots[:1])
    assert vine == "[MATH_TASK] Problem:\na?\n\nSolution:\nA 1\n\n[MATH_TASK] Problem:\nc?\n\nSolution:"
    turns = Asker(TaskSettings(format="chat")).ask(problem("c?"), shots)
    assert [(t["role"], t["content"]) for t in turns] == [
        ("user", "a?"), ("assistant", "A 1"), ("user", "b?"), ("assistant", "B 2\n"), ("user", "c?"),
    ]  # fmt: skip


def test_examples_are_neither_trained_on_nor_held_out(tmp_path: Path) -> None:
    rows = [{"question": f"{n}{n}?", "answer": str(n)} for n in range(1, 9)]
    task = make(path=write(tmp_path / "a.jsonl", rows), held_out=2, shots=3)
    training, held_out = task.prompts(encode), task.held_out(encode)
    assert (len(training), len(held_out)) == (3, 2)
    (before,) = {p.text.rpartition("\n\n")[0] for p in (*training, *held_out)}
    shown = {line.removesuffix("?") for line in before.splitlines() if line.endswith("?")}
    asked = {p.text.rpartition("\n\n")[2].removesuffix("?\n") for p in (*training, *held_out)}
    assert len(shown) == 3
    assert not shown & asked
    assert shown | asked == {f"{n}{n}" for n in range(1, 9)}


@pytest.mark.parametrize("template", ["{{ question", "{{ answer }} {{ question }}", "no question", "{{ question.x.y }}",
                                      "{{ ''.__class__.__mro__ }}{{ question }}"])  # fmt: skip
def test_a_template_that_cannot_be_rendered_is_refused(template: str) -> None:
    with pytest.raises(SettingsError, match=r"task\.template = "):
        Asker(TaskSettings(template=template))


def test_prompts_too_long_are_refused_with_their_line_or_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"question": "q" * n, "answer": "1"} for n in (4, 30, 5, 31, 6)]
    path = write(tmp_path / "a.jsonl", rows)
    held = write(tmp_path / "b.jsonl", [{"question": "r" * 29, "answer": "1"}, {"question": "r", "answer": "1"}])
    given = {"path": path, "held_out_path": held, "max_prompt_tokens": 7}  # 5 characters, their line break and BOS
    assert reason(**given) == (
        f"{path}:2: the prompt has 32 tokens, more than task.max_prompt_tokens = 7; raise it, or set "
        f"task.too_long=drop.",
        f"{path}:4: the prompt has 33 tokens, more than task.max_prompt_tokens = 7; raise it, or set "
        f"task.too_long=drop.",
        f"{path}:5: the prompt has 8 tokens, more than task.max_prompt_tokens = 7; raise it, or set "
        f"task.too_long=drop.",
    )
    task = make(**given, too_long="drop")
    assert [p.text for p in task.prompts(encode)] == ["qqqq\n", "qqqqq\n"]
    assert [p.text for p in task.held_out(encode)] == ["r\n"]
    assert task.notes == [
        "3 training problems left out: over task.max_prompt_tokens = 7",
        "1 held-out problems left out: over task.max_prompt_tokens = 7",
    ]
    assert "no training problem has at most" in reason(**{**given, "max_prompt_tokens": 2}, too_long="drop")[-1]


@pytest.fixture(scope="module")
def policy() -> Policy:
    shape = ArchitectureSettings(layers=1, width=8, heads=2, positions=64)
    return load_policy("new-llama", architecture=shape, characters="0123456789+? \nAUqx:", seed=0, temperature=1.0)


def test_the_chat_template_is_the_models_and_its_absence_is_told(tmp_path: Path, policy: Policy) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}])
    task = make(path=path, held_out=1, format="chat")
    with pytest.raises(SettingsError, match=r"task\.format = 'chat': the model cannot take .*:1 as a prompt"):
        task.prompts(policy.encode)
    tokenizer = character_tokenizer("0123456789+? \nAUqx:")
    tokenizer.chat_template = (
        "<bos>{% for m in messages %}U:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    chatty = Policy(model=policy.model, tokenizer=tokenizer, temperature=1.0)
    (prompt,) = task.prompts(chatty.encode)
    assert prompt.tokens[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in prompt.tokens[1:]
    assert chatty.decode(prompt.tokens) == "U:2+2?\nA:"


# ---- scores -------------------------------------------------------------------------------------


def score(kind: str, gold: str, text: str, style: str = "gsm8k", finish: Any = "stop") -> float:
    task = make(style=style)
    (found,) = task.score(make_prompt(gold=gold, kind=kind), [make_completion(text=text, finish=finish)])
    return found


def test_the_style_decides_what_scores_and_a_cut_completion_is_judged_too() -> None:
    assert score("number", "72", "#### 72") == 1.0
    assert score("number", "72", "#### 72", finish="length") == 1.0
    assert score("number", "72", "#### 71") == 0.0
    assert score("number", "72", r"\boxed{72}", style="math") == 1.0
    assert score("number", "72", r"\boxed{71}", style="math") == 0.0
    assert score("text", "Tuesday", "It is a day. The answer is tuesday.") == 1.0
    assert score("text", "Tuesday", "Wednesday") == 0.0


@pytest.mark.parametrize(
    ("completion", "word"),
    [
        ("Yes", "Yes"),
        ("I think\nso: \"No\".\n\n", "so: \"No"),
        ("one\n  SIR   DO NOT COUNT  \n", "SIR DO NOT COUNT"),
        ("The answer is **ziuqer**.", "ziuqer"),
        ("Answer: True\nbecause it is", "True"),
        ("#### 1\n#### 2 3", "2 3"),
        (r"so \boxed{abc}, done", "abc"),
        (r"so \boxed{abc", "abc"),
        ("<answer>\n 3a0\n</answer> bye", "3a0"),
        ("the answer is", ""),
        ("", ""),
        ("\n \n", ""),
        (".", "."),
    ],
)
def test_where_a_word_is_found(completion: str, word: str) -> None:
    assert found_word(completion) == word


@hypothesis_settings(deadline=None)
@given(st.text())
def test_no_text_breaks_the_rule_for_words_and_nothing_is_not_an_answer(text: str) -> None:
    assert same_word(text, "") is False
    assert not same_word("", text)
    same_word(text, "Tuesday")


def test_a_long_completion_is_judged_by_its_end() -> None:
    assert same_word("answer: no\n" + "x" * 1_000_000 + "\nanswer: yes", "Yes")
    assert not same_word("answer: yes" + " {" * 100_000, "Yes")


def test_answers_for_votes() -> None:
    def answer(text: str, kind: str = "number", style: str = "gsm8k") -> str | None:
        return make(style=style).answer_of(make_prompt(gold="1", kind=kind), make_completion(text=text))

    assert answer("3+4=7\n#### 1,250.00") == "1250"
    assert answer("it costs 3.50 or 4.5") == "4.5"
    assert answer("none") is None
    assert answer("#### none\n", style="gsm8k") is None
    assert answer("5 #### none", style="gsm8k_paper") == "5"
    assert answer(r"\boxed{\frac{1} {2}}", style="math") == r"\frac{1}{2}"
    assert answer("1/2", style="math") is None
    assert answer("The answer is  Tuesday. ", kind="text") == "tuesday"
    task = make()
    prompt = make_prompt(gold="1", kind="number")
    assert task.same_answer(prompt, "7", "7.0")
    assert not task.same_answer(prompt, "7", "8")


# ---- families -----------------------------------------------------------------------------------

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
SMALL = {**SUMS, "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("reasoning_gym", reason="needs the extra maths")


def test_every_family_is_decided_upon_once(library: Any) -> None:
    from reasoning_gym.factory import DATASETS

    assert NUMBERS | TEXTS | REFUSED.keys() == DATASETS.keys()
    assert not (NUMBERS & TEXTS | NUMBERS & REFUSED.keys() | TEXTS & REFUSED.keys())
    evaluating = {
        "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24",
        "simple_integration", "intermediate_integration", "polynomial_multiplication",
    }  # fmt: skip
    assert evaluating & NUMBERS == set()
    assert evaluating & TEXTS == {"string_insertion", "spiral_matrix"}  # one line of text, compared as such


def test_names_are_refused_with_the_reason_and_what_works() -> None:
    said = family_problems({"countdown": {}, "graph_color": {}, "chainsum": {}})
    assert said[0].startswith("task.families: countdown is refused: its own scorer evaluates the text")
    assert "families that work: ab, acre," in said[0]
    assert "graph_color is refused: it gives no answer" in said[1]
    assert "'chainsum' is no family; did you mean chain_sum?" in said[2]


def test_families_take_turns_and_no_question_is_on_both_sides(library: Any) -> None:
    # 200 sums of two digits under ten and 100 products are there; half of either may be held out at most
    task = make(families=SMALL, held_out=120, problems=90, seed=3)
    training, held_out = task.prompts(encode), task.held_out(encode)
    assert [p.columns["level"] for p in (*training[:4], *held_out[:4])] == 2 * ["chain_sum", "products"] * 2
    assert [sum(p.columns["level"] == "products" for p in side) for side in (training, held_out)] == [45, 50]
    assert (len(training), len(held_out)) == (90, 120)
    assert len({key_of(problem(p.text)) for p in (*training, *held_out)}) == 210
    for prompt in (*training, *held_out):
        a, sign, b = prompt.text.split(": ")[1].split()[:3]
        value = {"+": int(a) + int(b.strip(".")), "-": int(a) - int(b.strip(".")), "*": int(a) * int(b.strip("."))}
        assert str(value[sign]) == prompt.columns["gold"]
        assert task.score(prompt, [make_completion(text=task.gold(prompt))]) == [1.0]
    again = make(families=SMALL, held_out=120, problems=90, seed=3)
    assert again.prompts(encode) == training
    assert make(families=SMALL, held_out=120, problems=90, seed=4).prompts(encode) != training


def test_more_held_out_problems_than_half_of_what_there_are_is_refused(library: Any) -> None:
    (said,) = reason(families=SMALL, held_out=151)
    assert "task.held_out = 151 is more than half" in said
    assert "(chain_sum 200, products 100)" in said
    assert len(make(families=SMALL, held_out=150).held_out(encode)) == 150


def test_settings_that_the_library_refuses(library: Any) -> None:
    for options in ({"min_terms": 0}, {"no_such": 1}):
        (said,) = reason(families={"chain_sum": options}, held_out=1)
        assert said.startswith(f"task.families.chain_sum = {options}: reasoning-gym refuses it")


def test_the_librarys_scorers_are_never_called(library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from reasoning_gym.factory import DATASETS

    def score_answer(*given: Any) -> float:
        raise AssertionError("a scorer of the library was called")

    for made, _ in DATASETS.values():
        monkeypatch.setattr(made, "score_answer", score_answer)
    payload = tmp_path / "made"
    text = f"open({str(payload)!r}, 'w')"
    families = ["string_insertion", "spiral_matrix", "gsm_symbolic", "calendar_arithmetic"]
    task = make(families=families, held_out=8, problems=20, max_prompt_tokens=9000)
    for prompt in task.held_out(encode):
        assert task.score(prompt, [make_completion(text=t) for t in (task.gold(prompt), text)]) == [1.0, 0.0]
    assert not payload.exists()


def test_variants_have_the_template_and_fresh_numbers(library: Any) -> None:
    task = make(families=["gsm_symbolic"], held_out=12, problems=30, seed=5, max_prompt_tokens=9000)
    held_out, training = task.held_out(encode), task.prompts(encode)
    found = task.variants(held_out, 3, encode)
    seen = {p.text for p in training}
    template = {p.place: p.template for p in (*task._data().training, *task._data().held_out)}
    for prompt, variants in zip(held_out, found, strict=True):
        assert [v.id for v in variants] == [f"{prompt.id} variant {n}" for n in (1, 2, 3)]
        texts = {v.text for v in variants}
        assert len(texts) == 3
        assert not texts & {prompt.text, *seen}
        assert all(v.columns["level"] == "gsm_symbolic" for v in variants)
        shared = set(prompt.text.split()) & set.intersection(*(set(t.split()) for t in texts))
        assert len(shared) >= 8  # the words of the story
    assert len(set(template.values())) > 20
    assert task.variants(held_out, 3, encode) == found


def test_a_template_without_enough_fresh_numbers_gives_none(library: Any) -> None:
    task = make(families=SUMS, held_out=20, problems=180)
    held_out = task.held_out(encode)
    counts = {len(v) for v in task.variants(held_out, 15, encode)}  # 20 untrained sums, of two signs
    assert counts == {0}
    assert {len(v) for v in task.variants(held_out, 2, encode)} == {2}


def test_problems_of_files_have_no_variants(library: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [CLIPS, COWS])
    assert not make(path=path, held_out=1).varies
    assert make(families=["gcd"]).varies


@hypothesis_settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 30), st.integers(1, 20))
def test_pools_are_split_into_what_was_asked_for(sizes: list[int], held_out: int, training: int) -> None:
    pools = {str(n): [problem(f"{n} {k}") for k in range(size)] for n, size in enumerate(sizes)}
    if held_out > sum(size // 2 for size in sizes):
        with pytest.raises(SettingsError, match="more than half"):
            split_pools(pools, training=training, held_out=held_out)
        return
    taken, held = split_pools(pools, training=training, held_out=held_out)
    assert len(held) == held_out
    assert len(taken) == min(training, sum(sizes) - held_out)
    assert not {p.question for p in taken} & {p.question for p in held}
    shares = [sum(p.question.startswith(f"{n} ") for p in held) for n in range(len(sizes))]
    assert all(share <= size // 2 for share, size in zip(shares, sizes, strict=True))
    open_ones = [share for share, size in zip(shares, sizes, strict=True) if share < size // 2]
    assert not open_ones or max(shares) - min(open_ones) <= 1


def test_turns_are_taken_for_as_long_as_there_is_one() -> None:
    a, b, c = ([problem(f"{name}{n}") for n in range(size)] for name, size in (("a", 1), ("b", 3), ("c", 2)))
    assert [p.question for p in taking_turns([a, b, c])] == ["a0", "b0", "c0", "b1", "c1", "b2"]


# ---- settings -----------------------------------------------------------------------------------


def test_one_source_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [CLIPS])
    assert contradictions() == ["no source of problems: the maths task takes one of task.path, task.dataset and "
                                "task.families."]  # fmt: skip
    said = contradictions(path=path, families=["gcd"], held_out_path=path, style="math")
    assert said[0].startswith("task.path and task.families: the maths task takes one")
    assert "generates its held-out problems itself" in said[1]
    (said,) = contradictions(path=path, held_out_path=path, held_out_dataset="a/b")
    assert "are both given" in said


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"path": "nowhere.jsonl"}, "task.path = 'nowhere.jsonl' is not a file that ends in .jsonl or .parquet"),
        ({"dataset": "a:b:c:d"}, "task.dataset = 'a:b:c:d' is not of the form owner/name:config:split"),
        ({"dataset": "a", "held_out_dataset": "b/c"}, "task.dataset = 'a' is not of the form"),
        ({"families": ["gcd"], "format": "paper", "template": "{{ question }}"}, "task.template is not used by"),
        ({"families": 3}, "task.families = 3"),
        ({"families": ["gcd"], "style": "latex"}, "task.style = 'latex'"),
    ],
)
def test_what_does_not_go_together_is_refused(task: dict[str, Any], said: str) -> None:
    assert contradictions(**task)[0].startswith(said)


def test_wrong_solutions_are_refused() -> None:
    with pytest.raises(SettingsError, match="has right solutions only"):
        check_settings({"task": {"name": "maths", "families": ["gcd"]}, "sft": {"wrong_share": 0.5}})


def test_a_list_of_families_takes_their_defaults() -> None:
    settings = check_settings({"task": {"name": "maths", "families": ["gcd", "lcm"]}})
    assert settings.task.families == {"gcd": {}, "lcm": {}}
    assert check_settings(settings.resolved()).task == settings.task


def test_what_a_row_lacks_is_said_by_role() -> None:
    columns = ColumnSettings()
    assert row_problem({"prompt": "p", "solution": "s"}, columns) == ""
    assert "set task.columns.question" in row_problem({"text": "p", "answer": "1"}, columns)
    assert row_problem({"question": "q", "answer": True}, columns) == "has a 'answer' that is no text: 'True'."
    assert row_problem({"question": "q", "answer": 1.5}, columns) == ""


def test_a_searcher_needs_no_data() -> None:
    task = make(path="nowhere.jsonl")
    prompt = Prompt(id="p", tokens=(1,), text="p", columns={"gold": "7", "kind": "number"})
    assert task.score(prompt, [make_completion(text="#### 7")]) == [1.0]


# ---- the warm start and the check -----------------------------------------------------------------


def test_the_warm_start_imitates_solutions_after_a_masked_prompt(tmp_path: Path) -> None:
    rows = [{"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, {"question": "3+3?", "answer": "#### 6"}]
    task = make(path=write(tmp_path / "a.jsonl", rows), held_out=1, format="vineppo")
    shape = ArchitectureSettings(layers=1, width=8, heads=2, positions=128)
    characters = "[MATH_TASK] Problem:Solution0123456789+?# =\n"
    policy = load_policy("new-llama", architecture=shape, characters=characters, seed=0, temperature=0.7)
    prompts = task.prompts(policy.encode)
    (only,) = prompts
    ids = as_completion(policy, "\n2+2=4\n#### 4\n").tokens
    expected = -policy.sequence_logps([(only.tokens, ids)])[0] / (14 + 1)  # 14 characters and the stop token
    settings = make_settings(sft={"steps": 2, "batch_size": 3, "learning_rate": 0.02})
    first, _ = sft(policy.trainable_copy(), task, prompts, settings)
    assert first["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_batch_in_pieces_has_the_gradient_of_the_whole(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+{n}?", "answer": "#### " + "7" * n} for n in range(1, 8)]
    task = make(path=write(tmp_path / "a.jsonl", rows), held_out=1)
    shape = ArchitectureSettings(layers=1, width=8, heads=2, positions=64)
    policy = load_policy("new-llama", architecture=shape, characters="0123456789+?# \n", seed=0, temperature=0.7)
    prompts = task.prompts(policy.encode)
    losses = {}
    for tokens in (16_384, 40):
        settings = make_settings(
            sft={"steps": 4, "batch_size": 5, "learning_rate": 0.02}, trainer={"micro_batch_tokens": tokens}
        )
        losses[tokens] = [line["loss"] for line in sft(policy.trainable_copy(), task, prompts, settings)]
    assert losses[40] == pytest.approx(losses[16_384], abs=1e-4)
    assert losses[40][-1] < losses[40][0]


def recipe(folder: Path, **task: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": "new-llama", "task": {"name": "maths", **task}}), "utf-8")
    return str(path)


def test_the_check_reads_local_data_and_fetches_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", [CLIPS, COWS, PENS, PENS])
    assert main(["check", recipe(tmp_path, path=path, held_out=1)]) == 0
    said = capsys.readouterr().out
    assert "2 training and 1 held-out problems, their gold answers right" in said
    assert "1 training problems left out: their question came before or is held out" in said
    (tmp_path / "a.jsonl").write_text('{"question": 3, "answer": "1"}\n{\n')
    assert main(["check", recipe(tmp_path, path=path, held_out=1)]) == 2
    said = capsys.readouterr().err
    assert f"{path}:1 (line 1) has a 'question' that is no text" in said
    assert f"{path}:2 (line 2) is not JSON" in said
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert main(["check", recipe(tmp_path, dataset="owner/gsm:main", held_out_dataset="owner/gsm:main:test")]) == 0
    assert "owner/gsm:main and owner/gsm:main:test: fetched when training starts" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gsm8k-rho1b", "gsm8k-rho1b-fixed", "math-qwen2.5-7b"])
def test_recipes_of_models_that_must_be_fetched_are_checked_without_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(sys.modules)
    assert main(["check", name]) == 0
    said = capsys.readouterr().out
    assert "fetched when training starts" in said
    assert "memory" in said
    assert not {"transformers", "datasets"} & (set(sys.modules) - before)


def test_the_papers_recipe_is_the_papers() -> None:
    s, fixed = read_settings("gsm8k-rho1b"), read_settings("gsm8k-rho1b-fixed")
    assert (s.trainer.group_size, s.search.num_samples, s.groups_per_step, s.trainer.steps) == (20, 24, 7, 700)
    assert (s.trainer.sync_every, s.recent_age, s.buffer.initial, s.buffer.mix["recent"]) == (2, 3, 500, 0.95)
    assert (s.policy.temperature, s.sampling_temperature, s.objective.scale) == (0.7, 0.7, "paper")
    assert (s.trainer.clip_norm, s.task.style, s.task.format) == (None, "gsm8k_paper", "paper")
    assert (fixed.trainer.clip_norm, fixed.task.style, fixed.task.format) == (1.0, "gsm8k", "vineppo")
    assert fixed.objective.scale == "advantage"


@pytest.mark.slow
def test_the_recipe_of_the_small_real_model_is_checked_quickly(library: Any) -> None:
    settings = read_settings("maths-smollm2")
    started = time.monotonic()
    said = data_of(settings)["data"]
    assert time.monotonic() - started < 20
    assert said.startswith("400 training and 300 held-out problems")
