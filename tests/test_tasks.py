"""One contract for every built-in task; what each task promises besides; the checks all are put to."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from classifiers import save_classifier
from support import STOP, make_completion, make_prompt, make_settings
from tba.assembly import as_completion
from tba.catalog import TASKS
from tba.policy import Policy, load_policy
from tba.preference_settings import PreferenceSettings, RewardSettings
from tba.records import Completion, Prompt
from tba.redteam_settings import JudgeSettings, RedteamSettings, VictimSettings
from tba.rewards.carried import packed
from tba.rewards.functions import Failure, Score
from tba.settings import ArchitectureSettings, SettingsError, TaskSettings
from tba.sft import demonstrations_of, learning_rate_at, sft
from tba.tasks.arithmetic import Arithmetic, solve
from tba.tasks.enumerable import Enumerable, log_target
from tba.tasks.preference import Preference
from tba.tasks.protocol import Task, check_gold, check_ids_unique, fingerprint, make_task, outcomes
from tba.tasks.redteam import Redteam
from tba.tasks.script import Brought
from tba.tokenizers import character_tokenizer

TINY = ArchitectureSettings(layers=1, width=8, heads=2, positions=32)
REWARDS = """
def score(prompt, completions):
    return [float(c.text == prompt.columns["answer"]) for c in completions]
"""


def arithmetic(folder: Path) -> TaskSettings:
    return TaskSettings(name="arithmetic", max_value=4, held_out=70, seed=3)


def enumerable(folder: Path) -> TaskSettings:
    return TaskSettings(name="enumerable", prompts=5, symbols=3, reward_scale=0.7, seed=3)


def custom(folder: Path) -> TaskSettings:
    lines = [{"prompt": "ab" * n, "answer": "ba"} for n in range(1, 6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (folder / "contract_rewards.py").write_text(REWARDS, "utf-8")
    return TaskSettings(
        name="custom", path=str(folder / "rows.jsonl"), reward=f"{folder / 'contract_rewards.py'}:score", held_out=2
    )


def preference(folder: Path) -> TaskSettings:
    rows = [{"prompt": text, "summary": "a"} for text in ("a", "b", "ab", "ba", "aab", "abb")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    model = str(save_classifier(folder / "scorer"))
    return TaskSettings(
        name="preference", path=str(folder / "rows.jsonl"), rewards=(RewardSettings(model=model, weight=0.3),),
        preference=PreferenceSettings(reference_column="summary"), held_out=2,
    )


def script(folder: Path) -> TaskSettings:
    return TaskSettings(name="script", rewards=(RewardSettings(function="right"),), held_out=2)


def handed_over() -> Brought:
    rows = tuple((f"rows[{n}]", {"prompt": "ab" * n, "answer": "ba"}) for n in range(1, 6))
    carried, problems = packed({
        "right": lambda completions, answer: [float(text == gold) for text, gold in zip(completions, answer)]  # noqa: B905
    })
    assert problems == []
    return Brought(training=rows[:3], held_out=rows[3:], carried=carried)


def close_to(found: Sequence[Any]) -> list[Any]:
    """The rewards; a classifier's are the same to 1e-4, whatever is read beside them."""
    return [pytest.approx(score.reward, abs=1e-4) for score in found]


def maths(folder: Path) -> TaskSettings:
    lines = [{"question": f"{n}+{n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(1, 9)]
    (folder / "maths.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return TaskSettings(name="maths", path=str(folder / "maths.jsonl"), held_out=3)


def redteam(folder: Path) -> TaskSettings:
    chosen = RedteamSettings(
        prompt="ab", characters="ab", victim=VictimSettings(triggers=("ab",)), judges=(JudgeSettings(words=("BAD",)),)
    )
    return TaskSettings(name="redteam", redteam=chosen, held_out=3)


MAKERS: dict[str, Callable[[Path], TaskSettings]] = {
    "arithmetic": arithmetic, "enumerable": enumerable, "custom": custom, "maths": maths, "preference": preference,
    "script": script, "redteam": redteam,
}  # fmt: skip


def make(settings: TaskSettings) -> Task:
    brought = handed_over() if settings.name == "script" else None
    return make_task(settings, max_new_tokens=3, score_limit_s=20.0, brought=brought)


@pytest.fixture(params=MAKERS)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> TaskSettings:
    return MAKERS[request.param](tmp_path)


@pytest.fixture
def task(settings: TaskSettings) -> Iterator[Task]:
    made = make(settings)
    yield made
    if settings.name in ("custom", "script"):
        made.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    """A policy for each alphabet, made once."""
    return {}


@pytest.fixture
def policy(task: Task, policies: dict[str, Policy]) -> Policy:
    characters = task.characters or "ab0123456789+?# \n"
    if characters not in policies:
        policies[characters] = load_policy(
            "new-llama", architecture=TINY, characters=characters, seed=0, temperature=1.0
        )
    return policies[characters]


# ---- the contract -------------------------------------------------------------------------------


def test_every_task_of_the_catalogue_is_tested() -> None:
    assert MAKERS.keys() == TASKS.keys()


def test_ids_are_unique_and_prompts_start_with_one_bos(task: Task, policy: Policy) -> None:
    assert isinstance(task, Task)
    for prompts in (task.prompts(policy.encode), task.held_out(policy.encode)):
        check_ids_unique(prompts)
        assert len(prompts) >= (1 if isinstance(task, Redteam) else 2)
        assert all(p.tokens[0] == policy.tokenizer.bos_token_id for p in prompts)
        assert all(policy.tokenizer.bos_token_id not in p.tokens[1:] for p in prompts)
        assert all(policy.decode(p.tokens) == p.text for p in prompts)


def test_held_out_prompts_are_not_trained_on(task: Task, policy: Policy) -> None:
    training, held_out = task.prompts(policy.encode), task.held_out(policy.encode)
    if isinstance(task, Enumerable):  # the question there is the distribution, and no answer is known
        assert [p.id for p in training] == [p.id for p in held_out]
        assert {task.gold(p) for p in training} == {None}
    else:
        assert not {p.id for p in training} & {p.id for p in held_out}
    if isinstance(task, Redteam):  # each attack of an evaluation is one more draw for the same prompt
        assert {p.tokens for p in training} == {p.tokens for p in held_out}
    elif not isinstance(task, Enumerable):
        assert not {p.tokens for p in training} & {p.tokens for p in held_out}


def test_the_gold_answer_scores_full_marks(task: Task, policy: Policy) -> None:
    for prompt in (*task.prompts(policy.encode)[:50], *task.held_out(policy.encode)[:50]):
        gold = task.gold(prompt)
        if gold is not None:
            assert outcomes(task, prompt, [as_completion(policy, gold)]) == [Score(reward=1.0)]
    check_gold(task, task.prompts(policy.encode), lambda text: as_completion(policy, text))


def test_the_reward_depends_on_prompt_and_completion_alone(task: Task, policy: Policy) -> None:
    rng = random.Random(4)
    one, other = (*task.prompts(policy.encode)[:2], *task.held_out(policy.encode))[:2]
    ids = range(len(policy.tokenizer))
    completions = [
        make_completion(tokens, text=policy.decode(tokens)) for tokens in ([*rng.choices(ids, k=2), STOP] for _ in ids)
    ]
    completions += [as_completion(policy, text) for text in map(task.gold, (one, other)) if text is not None]
    first = outcomes(task, one, completions)
    assert len(first) == len(completions)
    assert all(isinstance(o, Score) for o in first)
    outcomes(task, other, completions)
    assert outcomes(task, one, completions) == first
    reverse, singly = outcomes(task, one, completions[::-1]), [outcomes(task, one, [c])[0] for c in completions]
    if isinstance(task, Preference):
        assert [s.reward for s in reverse] == close_to(first[::-1])  # type: ignore[union-attr]
        assert [s.reward for s in singly] == close_to(first)  # type: ignore[union-attr]
    else:
        assert reverse == first[::-1]
        assert singly == first


def test_the_task_is_a_function_of_its_settings(settings: TaskSettings, task: Task, policy: Policy) -> None:
    again = make(settings)
    for name in ("prompts", "held_out"):
        found = getattr(task, name)(policy.encode)
        assert found == getattr(task, name)(policy.encode) == getattr(again, name)(policy.encode)
        assert fingerprint(found) == fingerprint(getattr(again, name)(policy.encode))


HOSTILE = ["", "\n", "\n\n", "1e999", "9" * 5000, "\x00", "\ud800", "<script>", "__import__('os')"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_breaks_the_scorer(task: Task, policy: Policy, text: str) -> None:
    prompt = task.prompts(policy.encode)[0]
    (found,) = outcomes(task, prompt, [make_completion(text=text)])
    is_too_long = isinstance(task, Preference) and len(text) == 5000  # for its model; and that is recorded
    assert found.reason == "too_long" if isinstance(found, Failure) else not is_too_long


# ---- arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "solved"),
    [("3+15-7=", ("18-7", 11)), ("3-15+7=", ("-12+7", -5)), ("0-0-20=", ("0-20", -20)), ("20+20+20=", ("40+20", 60))],
)
def test_working_and_result_of_a_problem(text: str, solved: tuple[str, int]) -> None:
    assert solve(text) == solved


@pytest.mark.parametrize("text", ["3+15=", "3+15-7", "3*1-7=", "3+-1-7=", " 3+1-7="])
def test_what_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a problem"):
        solve(text)


@pytest.mark.parametrize(
    ("text", "finish", "reward"),
    [
        ("18-7\n11", "stop", 1.0),
        ("\n11", "stop", 1.0),  # the working is not judged
        ("18-7\n11", "length", 0.0),
        ("18-7\n011", "stop", 0.0),
        ("18-7\n+11", "stop", 0.0),
        ("18-7\n11\n", "stop", 0.0),
        ("18-7\n11\n11", "stop", 0.0),
        ("11", "stop", 0.0),
        ("18-7\n1", "stop", 0.0),
        ("11\n18-7", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_only_the_exact_result_scores(text: str, finish: Any, reward: float) -> None:
    task = make(TaskSettings(name="arithmetic", max_value=20))
    prompt = make_prompt("3+15-7=", working="18-7", result=11)
    assert outcomes(task, prompt, [make_completion(text=text, finish=finish)]) == [Score(reward=reward)]


def test_every_problem_is_on_one_side_of_the_split() -> None:
    def ids(seed: int) -> tuple[list[str], list[str]]:
        task = make(TaskSettings(name="arithmetic", max_value=3, held_out=56, seed=seed))
        sides = (task.prompts(lambda text: (1,)), task.held_out(lambda text: (1,)))
        return [p.id for p in sides[0]], [p.id for p in sides[1]]

    training, held_out = ids(1)
    assert (len(training), len(held_out)) == (4**3 * 4 - 56, 56)
    assert len({*training, *held_out}) == 4**3 * 4
    assert set(held_out) != set(ids(2)[1])
    with pytest.raises(SettingsError, match="held_out = 256 leaves nothing of the 256 problems"):
        make(TaskSettings(name="arithmetic", max_value=3, held_out=256))


def test_a_careless_teacher_errs_as_often_as_told() -> None:
    task = Arithmetic(TaskSettings(), max_new_tokens=12, score_limit_s=1.0)
    prompt = make_prompt("3+15-7=", working="18-7", result=11)
    rng = random.Random(5)
    texts = [task.demonstration(prompt, rng, 0.3) for _ in range(2000)]
    assert {text.split("\n")[0] for text in texts} == {"18-7"}
    wrong = sum(text != task.gold(prompt) for text in texts)
    assert abs(wrong / 2000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 2000)
    assert {task.demonstration(prompt, rng, 0.0) for _ in range(50)} == {"18-7\n11"}


class Teacher(Arithmetic):
    """Demonstrates one text."""

    def demonstration(self, prompt: Prompt, rng: random.Random, wrong_share: float) -> str:
        return "3-1\n2"


def test_the_warm_start_imitates_completions_with_their_stop_token_and_no_prompt() -> None:
    task = Teacher(TaskSettings(), max_new_tokens=12, score_limit_s=1.0)
    policy = load_policy("new-llama", architecture=TINY, characters=task.characters, seed=0, temperature=0.7)
    prompt = Prompt(id="p", tokens=policy.encode("1+2-1="), text="1+2-1=")
    ids = as_completion(policy, "3-1\n2").tokens
    expected = [-policy.sequence_logps([(prompt.tokens, ids)])[0] / 6]  # five characters and the stop token
    settings = make_settings(sft={"steps": 40, "batch_size": 3, "learning_rate": 0.02})
    found = list(sft(policy, task, [prompt], settings))
    assert [line["step"] for line in found] == list(range(1, 41))
    assert found[0]["loss"] == pytest.approx(expected[0], abs=1e-5)
    assert found[-1]["loss"] < expected[0] / 2
    assert found[-1]["loss"] == pytest.approx(-policy.sequence_logps([(prompt.tokens, ids)])[0] / 6, rel=0.1)


def test_the_warm_starts_learning_rate() -> None:
    # 5 % of 100 steps rise; then a half cosine to zero: a fifth of 95 steps is 19
    rates = {1: 0.2, 5: 1.0, 24: 0.5 * (1 + math.cos(math.pi * 0.2)), 100: 0.0}
    assert {step: learning_rate_at(step, 100, 1.0) for step in rates} == pytest.approx(rates, abs=1e-12)


def test_a_task_without_demonstrations_is_refused() -> None:
    task = make(TaskSettings(name="enumerable"))
    with pytest.raises(SettingsError, match="task Enumerable has no demonstrations"):
        demonstrations_of(task)


# ---- enumerable ---------------------------------------------------------------------------------


def test_every_completion_is_listed_once() -> None:
    task = Enumerable(TaskSettings(name="enumerable", symbols=2), max_new_tokens=3, score_limit_s=1.0)
    listed = task.completions(5, STOP)
    # ended: 1 + 4 + 16 before the stop token; cut: 4 x 4 x 4
    assert len(listed) == len(set(listed)) == 21 + 64
    assert all(STOP not in ids[:-1] for ids in listed)
    assert {len(ids) for ids in listed if ids[-1] != STOP} == {3}


def test_rewards_are_normal_draws_of_the_scale_asked_for() -> None:
    task = Enumerable(TaskSettings(name="enumerable", reward_scale=0.7, seed=3), max_new_tokens=3, score_limit_s=1.0)
    rewards = [task.reward("ab", ids) for ids in task.completions(12, STOP)]
    size = len(rewards)
    mean = math.fsum(rewards) / size
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / size)
    assert size == 1 + 11 + 121 + 1331
    assert abs(mean) < 4 * 0.7 / math.sqrt(size)
    assert abs(deviation - 0.7) < 4 * 0.7 / math.sqrt(2 * size)
    assert task.reward("ab", (3, 2)) != task.reward("ba", (3, 2)) != task.reward("ba", (2, 3))
    other = Enumerable(TaskSettings(name="enumerable", reward_scale=0.7, seed=4), max_new_tokens=3, score_limit_s=1.0)
    assert other.reward("ab", (3, 2)) != task.reward("ab", (3, 2))


@pytest.mark.parametrize(("kind", "count"), [("one_mode", 1), ("sparse", 1), ("many_modes", 5)])
def test_modes_alone_are_rewarded_and_all_alike(kind: str, count: int) -> None:
    settings = TaskSettings(name="enumerable", kind=kind, modes=5, prompts=2, symbols=3, reward_scale=0.7, seed=3)
    task = Enumerable(settings, max_new_tokens=3, score_limit_s=1.0)
    for word in ("a", "b"):
        rewarded = {ids for ids in task.completions(6, STOP) if task.reward(word, ids)}
        assert rewarded == task.modes(word)
        assert {task.reward(word, ids) for ids in rewarded} == {0.7}
        assert len(rewarded) == count
        assert all(len(ids) == 3 and set(ids) <= {3, 4, 5} for ids in rewarded)
    assert task.modes("a") != task.modes("b")


def test_modes_are_letters_to_a_model_made_from_scratch_and_depend_on_the_seed() -> None:
    tokenizer = character_tokenizer("abc")
    drawn = set()
    for seed in range(6):
        settings = TaskSettings(name="enumerable", kind="one_mode", seed=seed)
        (ids,) = Enumerable(settings, max_new_tokens=4, score_limit_s=1.0).modes("aa")
        assert len(tokenizer.decode(ids)) == 4
        drawn.add(ids)
    assert len(drawn) > 1


def test_as_many_modes_as_there_are_words_are_all_words() -> None:
    settings = TaskSettings(name="enumerable", kind="many_modes", modes=4, prompts=1, symbols=2)
    task = Enumerable(settings, max_new_tokens=2, score_limit_s=1.0)
    assert task.modes("a") == {(3, 3), (3, 4), (4, 3), (4, 4)}


def test_the_random_kind_has_no_modes() -> None:
    assert make(TaskSettings(name="enumerable")).modes("aa") == frozenset()


@pytest.mark.parametrize(("prompts", "symbols", "length"), [(1, 1, 1), (3, 3, 1), (4, 3, 2), (9, 3, 2), (10, 3, 3)])
def test_words_have_one_length(prompts: int, symbols: int, length: int) -> None:
    made = make(TaskSettings(name="enumerable", prompts=prompts, symbols=symbols)).prompts(lambda text: (1,))
    assert [len(p.text) for p in made] == [length] * prompts


def test_the_target_by_hand() -> None:
    # beta 0.5: weights 1/2 e^2, 1/4 e^-1, 1/4; log Z = log(7.389056/2 + 0.367879/4 + 1/4) = log 4.036498
    target, log_z = log_target([math.log(0.5), math.log(0.25), math.log(0.25)], [1.0, -0.5, 0.0], 0.5)
    assert log_z == pytest.approx(1.395377, abs=1e-6)
    assert [math.exp(t) for t in target] == pytest.approx([0.915281, 0.022785, 0.061935], abs=1e-6)


def test_the_target_of_large_rewards_is_finite() -> None:
    target, log_z = log_target([math.log(0.5)] * 2, [900.0, 899.0], 0.5)
    assert log_z == pytest.approx(1800 - math.log(2) + math.log1p(math.exp(-2)))
    assert math.fsum(map(math.exp, target)) == pytest.approx(1.0)


# ---- what every task is checked for -------------------------------------------------------------


class Strict:
    """Finds nothing right but "yes"; fails on prompt "f"."""

    characters = ""

    def __init__(self, gold: str | None) -> None:
        self._gold = gold

    def prompts(self, encode: Any) -> Sequence[Prompt]:
        return []

    def held_out(self, encode: Any) -> Sequence[Prompt]:
        return []

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        return [Failure(reason="timeout") if prompt.id == "f" else float(c.text == "yes") for c in completions]

    def gold(self, prompt: Prompt) -> str | None:
        return self._gold


def test_a_gold_answer_that_is_not_right_is_refused_with_its_prompt() -> None:
    prompts = [make_prompt(id) for id in "fabcdeg"]
    check_gold(Strict("yes"), prompts[1:], lambda text: make_completion(text=text))
    check_gold(Strict(None), prompts, lambda text: make_completion(text=text))
    with pytest.raises(SettingsError) as caught:
        check_gold(Strict("no"), prompts, lambda text: make_completion(text=text))
    assert caught.value.problems[0] == "prompt 'f': its gold answer 'no' scores timeout, not 1."
    assert caught.value.problems[1] == "prompt 'a': its gold answer 'no' scores 0.0, not 1."
    assert caught.value.problems[5:] == ("... and 2 more.",)


def test_two_prompts_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="two prompts have the id 'b'"):
        check_ids_unique([make_prompt("a"), make_prompt("b"), make_prompt("b", (1, 9))])


def test_the_fingerprint_sees_ids_tokens_and_order() -> None:
    a, b = make_prompt("a", (1, 3)), make_prompt("b", (1, 4))
    rows = [[a, b], [b, a], [a], [make_prompt("a", (1, 5)), b], [make_prompt("c", (1, 3)), b]]
    assert len({fingerprint(r) for r in rows}) == 5
    assert fingerprint([a, b]) == fingerprint([make_prompt("a", (1, 3), note=1), b])


# ---- variants -----------------------------------------------------------------------------------


def test_variants_of_arithmetic_have_the_signs_and_were_never_trained_on() -> None:
    task = make(TaskSettings(name="arithmetic", max_value=4, held_out=70, seed=3))
    training, held_out = task.prompts(lambda text: (1,)), task.held_out(lambda text: (1,))
    asked = [*held_out[:9], *training[:9]]
    found = task.variants(asked, 5, lambda text: (1, 2))
    for prompt, variants in zip(asked, found, strict=True):
        signs = [c for c in prompt.id if c in "+-"]
        assert all([c for c in v.id if c in "+-"] == signs for v in variants)
        assert len({v.id for v in variants} | {prompt.id}) == 6
        assert not {v.id for v in variants} & {p.id for p in training}
        assert all(str(v.columns["result"]) == str(solve(v.id)[1]) and v.tokens == (1, 2) for v in variants)
    assert found == task.variants(asked, 5, lambda text: (1, 2))
    assert {len(v) for v in task.variants(asked, 60, lambda text: (1,))} == {0}  # 70 of four kinds


def test_the_answer_of_arithmetic_is_its_last_line() -> None:
    task = make(TaskSettings(name="arithmetic"))
    prompt = make_prompt("3+15-7=", working="18-7", result=11)
    answers = [task.answer_of(prompt, make_completion(text=text)) for text in ("18-7\n11", "11", "1\n2\n3")]
    assert answers == ["11", None, None]
    assert task.same_answer(prompt, "11", "11")
    assert not task.same_answer(prompt, "11", "011")
