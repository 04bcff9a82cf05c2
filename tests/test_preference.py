"""The preference task: where prompts come from, the TL;DR format, chats, rewards, references."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classifiers import alone, letters_tokenizer, save_classifier, save_policy
from makers import balances
from scoring_server import ScoringServer, fault_of, true_score
from support import make_completion
from tba import jobs
from tba.buffer.export import ordered
from tba.cli import main
from tba.policy import load_policy
from tba.preference_settings import PreferenceSettings, RewardSettings
from tba.reading import read_settings
from tba.rewards.functions import Score
from tba.rewards.models import load_scorer
from tba.settings import ArchitectureSettings, SettingsError, TaskSettings
from tba.tasks.preference import Preference
from tba.tasks.tldr import shortened, tldr_prompt, tldr_reference
from tba.tokenizers import subword_tokenizer

REWARDS = (RewardSettings(model="owner/name"),)
ROWS = [{"prompt": f"p{n}", "summary": f"s{n}", "level": n} for n in range(6)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def task(source: dict[str, Any], *, rewards: Any = REWARDS, **preference: Any) -> Preference:
    dataset = {k: source.pop(k) for k in ("dataset", "split", "held_out_split") if k in source}
    made = TaskSettings(
        name="preference", rewards=rewards, preference=PreferenceSettings(**dataset, **preference),
        **{"held_out": 2, **source},
    )
    return Preference(made, max_new_tokens=3, score_limit_s=1.0)


def characters(text: Any) -> tuple[int, ...]:
    """A token per character, BOS before them; of messages, per character of their contents."""
    return (1, *map(ord, text if isinstance(text, str) else "".join(m["content"] for m in text)))


# ---- where prompts come from --------------------------------------------------------------------


def parquet(folder: Path) -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return {"path": str(folder / "rows.parquet")}


def dataset(folder: Path) -> dict[str, Any]:
    pytest.importorskip("datasets")
    jsonl(folder / "train.jsonl", ROWS)
    return {"dataset": str(folder)}


SOURCES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "jsonl": lambda folder: {"path": jsonl(folder / "rows.jsonl", ROWS)}, "parquet": parquet, "dataset": dataset,
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_prompts_from_everywhere(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    made = task(SOURCES[source](tmp_path / "data"), reference_column="summary")
    training, held_out = made.prompts(characters), made.held_out(characters)
    assert [p.text for p in training] == ["p0", "p1", "p2", "p3"]
    assert [p.text for p in held_out] == ["p4", "p5"]
    assert len({p.id for p in (*training, *held_out)}) == 6
    assert training[3].tokens == (1, ord("p"), ord("3"))
    assert training[3].columns == {"level": 3, "reference": "s3"}
    assert [made.reference(p) for p in held_out] == ["s4", "s5"]
    assert {made.gold(p) for p in training} == {None}


def test_held_out_rows_from_a_file_or_a_split_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = jsonl(tmp_path / "train.jsonl", ROWS), jsonl(tmp_path / "test.jsonl", ROWS[:3])
    made = task({"path": first, "held_out_path": second})
    assert (len(made.prompts(characters)), len(made.held_out(characters))) == (6, 3)
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    made = task({"dataset": str(tmp_path), "split": "train", "held_out_split": "test"})
    assert (len(made.prompts(characters)), len(made.held_out(characters))) == (6, 3)
    assert not {p.id for p in made.prompts(characters)} & {p.id for p in made.held_out(characters)}


def test_a_data_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(SettingsError, match=r"task.preference.dataset = .*none', split 'train', cannot be loaded"):
        task({"dataset": str(tmp_path / "none")})


def test_ids_are_a_column_or_the_place(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "r.jsonl", [{"prompt": c, "id": n} for n, c in enumerate("abcd")])
    assert [p.id for p in task({"path": path}).prompts(characters)] == ["0", "1"]
    assert [p.id for p in task({"path": path}, id_column=None).prompts(characters)] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(
    ("rows", "preference", "said"),
    [
        ([{"question": "a"}] * 4, {}, "set task.prompt_column to the right one"),
        (ROWS, {"reference_column": "human"}, "set task.preference.reference_column to the right one"),
        (ROWS, {"format": "tldr"}, "set task.preference.format to the right one"),
        (ROWS[:2], {}, "gives 0 prompts for training and 2 held out"),
    ],
)
def test_rows_that_lack_something_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], preference: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        task({"path": jsonl(tmp_path / "r.jsonl", rows)}, **preference)


def test_prompts_that_are_too_long_are_refused_or_dropped_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "r.jsonl", [{"prompt": "abcd"}, {"prompt": "abcde"}, *ROWS[:2]])
    with pytest.raises(SettingsError, match=r"r.jsonl:2: the prompt has 6 tokens; allowed are 1 to .* = 5"):
        task({"path": path, "max_prompt_tokens": 5}).prompts(characters)
    made = task({"path": path, "max_prompt_tokens": 5}, too_long="drop")
    assert [p.text for p in made.prompts(characters)] == ["abcd"]
    assert made.dropped == 1


# ---- chats --------------------------------------------------------------------------------------


def test_a_chat_is_templated_once_and_goes_to_the_reward_model_as_messages(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = jsonl(tmp_path / "r.jsonl", [{"prompt": turns, "messages": "no chat"}] * 3)
    model = save_classifier(tmp_path / "scorer", chat=True)
    made = task({"path": path}, rewards=(RewardSettings(model=str(model)),))
    (prompt,) = made.prompts(characters)
    assert prompt.tokens == (1, *map(ord, "abc"))
    assert prompt.columns == {"messages": turns}
    (scored,) = made.score(prompt, [make_completion(text="d")])
    tokenizer = letters_tokenizer(chat=True)
    ids = tokenizer("[user]a</s>[assistant]b</s>[user]c</s>[assistant]d</s>")["input_ids"]
    reading = load_scorer(RewardSettings(model=str(model)))
    assert scored.reward == pytest.approx(alone(reading.model, ids), abs=1e-4)


# ---- the TL;DR format ---------------------------------------------------------------------------


def by_words(text: str) -> int:
    """Tokens of a tokenizer that is neither by characters nor monotone: a word of 7 letters is one token."""
    return sum(1 if len(word) == 7 else (len(word) + 2) // 3 for word in text.split(" ")) + text.count("\n")


def slow_tldr(subreddit: str, title: str, post: str, most: int, count: Callable[[str], int]) -> str | None:
    """The rule from the other end: all that a post may become is listed, and the longest that fits is taken.

    Prefixes that end before a line break, and those of the first line; the whole post counts too.
    """
    first_line = post.split("\n")[0]
    allowed = {post, *(post[:n] for n, c in enumerate(post) if c == "\n")}
    allowed |= {first_line[:n] for n in range(len(first_line) + 1)}
    texts = [f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {p}\n\nTL;DR:" for p in sorted(allowed, key=len)]
    fitting = [text for text in texts if count(text) <= most]
    return fitting[-1] if fitting else None


words = st.text(alphabet="abcdefg \n\n", max_size=60)


@given(subreddit=st.text(alphabet="ab", max_size=4), title=words, post=words, most=st.integers(5, 60))
@settings(max_examples=400, deadline=None)
@pytest.mark.parametrize("count", [len, by_words])
def test_a_post_is_shortened_by_the_rule(
    count: Callable[[str], int], subreddit: str, title: str, post: str, most: int
) -> None:
    row = {"subreddit": subreddit, "title": title, "post": post}
    expected = slow_tldr(subreddit, title, post, most, count)
    if expected is None:
        with pytest.raises(ValueError, match=rf"subreddit and title alone take \d+ tokens, more than {most}"):
            tldr_prompt(row, count, most)
    else:
        assert tldr_prompt(row, count, most) == expected


@pytest.mark.parametrize(
    ("post", "most", "left"),
    [
        ("one\ntwo\n\nthree", 99, "one\ntwo\n\nthree"),
        ("one\ntwo\n\nthree", 55, "one\ntwo\n\nthree"),  # 41 characters around a post of 14
        ("one\ntwo\n\nthree", 54, "one\ntwo\n"),  # of two line breaks together one goes at a time
        ("one\ntwo\n\nthree", 48, "one\ntwo"),
        ("one\ntwo\n\nthree", 47, "one"),
        ("one\ntwo\n\nthree", 43, "on"),  # no line break is left
        ("one\ntwo\n\nthree", 41, ""),
        ("\nx", 42, ""),
        ("x\n", 42, "x"),
    ],
)
def test_hand_made_posts(post: str, most: int, left: str) -> None:
    row = {"subreddit": "ab", "title": "t", "post": post}
    assert tldr_prompt(row, len, most) == f"SUBREDDIT: r/ab\n\nTITLE: t\n\nPOST: {left}\n\nTL;DR:"


def test_the_cuts_of_a_post() -> None:
    assert list(shortened("ab\n\nc")) == ["ab\n\nc", "ab\n", "ab", "a", ""]
    assert list(shortened("")) == [""]


def test_tldr_rows_become_prompts_with_references(tmp_path: Path) -> None:
    row = {"subreddit": "tifu", "title": "so", "post": "a" * 20 + "\n" + "b" * 20, "summary": "it went wrong", "x": 1}
    made = task({"path": jsonl(tmp_path / "r.jsonl", [row] * 3), "max_prompt_tokens": 64}, format="tldr",
                reference_column="summary")
    (prompt,) = made.prompts(characters)
    assert prompt.text == f"SUBREDDIT: r/tifu\n\nTITLE: so\n\nPOST: {'a' * 19}\n\nTL;DR:"  # 44 around it, and BOS
    assert len(prompt.tokens) == 64
    assert prompt.columns == {"x": 1, "reference": " it went wrong"}
    assert tldr_reference("so") == " so"
    short = task({"path": str(tmp_path / "r.jsonl"), "max_prompt_tokens": 30}, format="tldr")
    with pytest.raises(SettingsError, match="subreddit and title alone take 45 tokens, more than 30"):
        short.prompts(characters)


# ---- rewards ------------------------------------------------------------------------------------


def test_prompts_load_no_scorer(tmp_path: Path) -> None:
    made = task({"path": jsonl(tmp_path / "r.jsonl", ROWS)}, rewards=(RewardSettings(model="no/such-model"),))
    assert len(made.prompts(characters)) == 4


def test_a_model_and_an_endpoint_together(tmp_path: Path) -> None:
    save_classifier(tmp_path / "scorer")
    with ScoringServer() as server:
        rewards = (
            RewardSettings(model=str(tmp_path / "scorer"), without_eos=-1.0),
            RewardSettings(name="far", endpoint=server.url, weight=-0.5, without_eos=-2.0),
        )
        made = task({"path": jsonl(tmp_path / "r.jsonl", ROWS)}, rewards=rewards)
        prompt = made.prompts(characters)[0]
        whole, cut = made.score(prompt, [make_completion(text="abz"), make_completion(text="x", finish="length")])
        made.close()
    assert whole.parts["far"] == true_score("abz")
    assert whole.reward == pytest.approx(whole.parts["scorer"] - 0.5 * true_score("abz"))
    assert cut == Score(reward=0.0, parts={"scorer": -1.0, "far": -2.0})  # -1 + 0.5 x 2


def test_a_run_completes_while_its_scorer_errs_hangs_and_dawdles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without retries a quarter of the completions have no score; each is counted, and no score is wrong."""
    path = jsonl(tmp_path / "r.jsonl", [{"prompt": c} for c in "abcdefgh"])
    recipe = tmp_path / "p.yaml"
    with ScoringServer(fault=lambda text, attempt: fault_of(3, text, attempt), slow_s=0.01) as server:
        recipe.write_text(json.dumps({
            "mode": "lockstep", "model": str(save_policy(tmp_path / "policy")),
            "task": {"name": "preference", "path": path, "held_out": 2, "rewards": [
                {"name": "far", "endpoint": server.url, "weight": 0.3, "retries": 0, "limit_s": 0.5}]},
            "search": {"num_samples": 6, "max_new_tokens": 5},
            "trainer": {"steps": 4, "groups_per_step": 4, "group_size": 3},
            "evaluation": {"prompts": 2, "samples": 2},
        }), "utf-8")
        assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["status"] == "done"
    assert balances(summary["ledger"])
    lost = summary["ledger"]["trajectories"]["rejected"]
    assert lost.keys() == {"unscored: refused", "unscored: timeout"}
    failed = sum(fault_of(3, text, n) in ("error", "hang") for text, tries in server.attempts.items()
                 for n in range(tries))
    counted = sum(lost.values()) + summary["start"]["unscored"] + summary["final"]["unscored"]
    assert counted <= failed <= counted + 4  # what was taken greedily, one for each of 2 prompts, is not counted
    for _, entry in ordered(jobs.buffer_of(tmp_path / "run"), 1000):
        trajectory = entry.trajectory
        assert trajectory.reward == pytest.approx(0.3 * true_score(trajectory.completion.text), rel=1e-6)
        assert trajectory.reward_parts == {"far": pytest.approx(true_score(trajectory.completion.text), rel=1e-6)}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task.path=none.jsonl"], "task.path = 'none.jsonl' is not a file"),
        ([], "task.path = None and task.preference.dataset = None; give exactly one"),
        (["task.preference.dataset=a/b", "task.path=x"], "give exactly one of the two"),
        (["task.rewards=[{model: a/b, wieght: 2}]"], "task.rewards.0.wieght is no setting (did you mean weight?)"),
        (["task.rewards=[{model: a/b}, {model: a/b, weight: x}]"], "task.rewards.1.weight = 'x'"),
        (["task.preference.dataset=a/b", "task.held_out_path=x"], "held-out rows are task.preference.held_out_split"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    recipe = tmp_path / "p.yaml"
    recipe.write_text("model: a/b\ntask: {name: preference, rewards: [{model: c/d}]}\n", "utf-8")
    with pytest.raises(SettingsError) as caught:
        read_settings(str(recipe), overrides)
    assert said in "\n".join(caught.value.problems)


def test_a_prompt_without_reference_has_none(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "r.jsonl", [{"prompt": "a", "s": None, "reference": "my own column"}] * 3)
    for column in ("s", None):
        made = task({"path": path}, reference_column=column)
        assert made.reference(made.prompts(characters)[0]) is None


# ---- warm start ---------------------------------------------------------------------------------


PHRASES = ["the film is warm and bright", "the film is dull and slow", "a warm and bright story", "a slow story"]


def imitated(tmp_path: Path, **more: Any) -> list[str]:
    """Words of a tiny warm start on humans' completions with a tokenizer of its own."""
    rows = [{"id": str(n), "prompt": text[:8], "human": text[8:]} for n, text in enumerate(PHRASES * 3)]
    recipe = tmp_path / "s.yaml"
    recipe.write_text(json.dumps({
        "mode": "lockstep", "model": "new-llama", "task": {
            "name": "preference", "path": jsonl(tmp_path / "s.jsonl", rows), "held_out": 4,
            "preference": {"reference_column": "human"}},
        "architecture": {"layers": 1, "width": 16, "heads": 2, "positions": 64, "vocabulary": 280, **more},
        "search": {"max_new_tokens": 6}, "sft": {"steps": 3, "batch_size": 4},
        "evaluation": {"prompts": 2, "samples": 1},
    }), "utf-8")
    return ["sft", str(recipe), "--run", str(tmp_path / "run"), "--json"]


def test_a_warm_start_from_scratch_learns_its_own_subwords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(imitated(tmp_path)) == 0
    final = json.loads(capsys.readouterr().out.splitlines()[-1])["final"]
    assert (final["unscored"], final["reward"], final["win_rate"]) == (2, None, None)  # there is no scorer
    policy = load_policy(str(tmp_path / "run" / "final"), architecture=ArchitectureSettings(), characters="", seed=0,
                         temperature=1.0)
    assert len(policy.tokenizer) <= 280
    assert policy.tokenizer.bos_token_id == policy.encode("a film")[0]
    assert len(policy.encode("the film is warm")) < 1 + len("the film is warm") / 2
    for text in (*PHRASES, "naïve \u2028 \U0001f600 x"):
        assert policy.decode(policy.encode(text)) == text
    # Cut between words, a text has the ids of the whole one.
    whole, start = policy.encode("the film is warm"), policy.encode("the film")
    rest = policy.tokenizer(" is warm", add_special_tokens=False)["input_ids"]
    assert whole == (*start, *rest)


def test_a_tokenizer_is_a_function_of_the_training_texts_alone(tmp_path: Path) -> None:
    made = [subword_tokenizer(PHRASES, 290).get_vocab() for _ in range(2)]
    assert made[0] == made[1]
    path = jsonl(tmp_path / "t.jsonl", [{"prompt": f"p{n}", "human": f" h{n}"} for n in range(5)])
    assert task({"path": path}, reference_column="human").texts() == ["p0 h0", "p1 h1", "p2 h2"]  # two are held out


@pytest.mark.parametrize(("overrides", "said"), [
    (["task.preference.reference_column=null"], "task.preference.reference_column is missing: a warm start imitates"),
    (["architecture.vocabulary=259"], "architecture.vocabulary = 259 is less than 256 bytes"),
    (["model=a/b"], "architecture.vocabulary = 280 is of model = 'new-llama'"),
    (["sft.wrong_share=0.5"], "sft.wrong_share = 0.5: task.name = 'preference'"),
])  # fmt: skip
def test_a_warm_start_that_cannot_be_is_refused(
    tmp_path: Path, overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = imitated(tmp_path)
    assert main([*words[:2], *overrides, *words[2:]]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_row_without_completion_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "r.jsonl", [{"prompt": "a", "s": None}] * 3)
    made = task({"path": path}, reference_column="s")
    with pytest.raises(SettingsError, match=r"has no completion to imitate in task.preference.reference_column = 's'"):
        made.demonstration(made.prompts(characters)[0], random.Random(0), 0.0)
