"""Reward models: the right token whatever the padding, their own tokenizer, and no wrong score."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from classifiers import LETTERS, POSITIONS, alone, classifier, letters_tokenizer, save_classifier, save_policy
from support import make_completion, make_prompt
from tba import cli
from tba.preference_settings import RewardSettings
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, Score
from tba.rewards.inputs import Encoder, Input, TooLong, cut_left, messages_of, without
from tba.rewards.models import (
    ModelScorer,
    batches,
    end_logits,
    last_attended,
    load_scorer,
    padded,
    picked,
    unloadable,
)
from tba.rewards.parts import Part, WeightedSum, reward_of
from tba.sections import SettingsError

KINDS = ["llama", "gpt_neox", "gpt2", "bert", "roberta"]
DECODERS = KINDS[:3]
PADS = {"pad": "<pad>", "eos": "</s>", "none": None}


def asked(text: str = "ask me.", **columns: object) -> Prompt:
    return Prompt(id="p", tokens=(1, 3), text=text, columns=columns)


def turns(text: str, **columns: object) -> list[dict[str, str]]:
    return messages_of(asked(text, **columns))


def answers(*texts: str) -> list[Completion]:
    return [make_completion(text=text) for text in texts]


def scorer_of(kind: str, *, batch_tokens: int = 4096, **options: Any) -> ModelScorer:
    names = ("labels", "seed", "config_pad")
    model_options = {k: options.pop(k) for k in names if k in options}
    encoding = {"reads": "text", "at_eos": False, "max_tokens": POSITIONS,
                **{k: options.pop(k) for k in ("reads", "at_eos", "max_tokens") if k in options}}
    picking = {"index": None, "activation": "none",
               **{k: options.pop(k) for k in ("index", "activation", "without_eos") if k in options}}
    tokenizer = letters_tokenizer(cls=kind in ("bert", "roberta"), **options)
    model = classifier(kind, tokenizer, **model_options)
    return ModelScorer(model, Encoder(tokenizer, **encoding), batch_tokens=batch_tokens, **picking)


def random_texts(count: int, seed: int = 0, longest: int = 40) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randint(1, longest))) for _ in range(count)]


# ---- the right token ----------------------------------------------------------------------------


def test_the_token_scored_i01() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
    assert last_attended(mask).tolist() == [4, 6]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_the_last_attended_token_by_a_slow_twin(rows: list[tuple[int, int, int]]) -> None:
    width = max(map(sum, rows))
    masks = [[0] * left + [1] * inside + [0] * (width - left - inside) for left, inside, _ in rows]
    assert last_attended(torch.tensor(masks)).tolist() == [
        max(place for place, seen in enumerate(mask) if seen) for mask in masks
    ]


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("kind", DECODERS)
def test_padding_on_either_side_changes_no_logit(kind: str, pad: str) -> None:
    tokenizer = letters_tokenizer(pad=PADS[pad])
    model, end, filler = classifier(kind, tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id or 0
    rows = [[9, end, 10, 11, end], [12, end], [13, 14, 15, 16, 17, 18, end, end], [end]]  # EOS inside, twice, alone
    expected = [alone(model, row) for row in rows]
    assert max(expected) - min(expected) > 0.05
    for side in ("left", "right"):
        gaps = [8 - len(row) for row in rows]
        pads = [[filler] * gap for gap in gaps]
        ids = [p + r if side == "left" else r + p for r, p in zip(rows, pads, strict=True)]
        mask = [[0] * g + [1] * (8 - g) if side == "left" else [1] * (8 - g) + [0] * g for g in gaps]
        found = end_logits(model, torch.tensor(ids), torch.tensor(mask))[:, 0]
        assert found.tolist() == pytest.approx(expected, abs=1e-4)


def test_the_models_own_pooling_would_take_another_token() -> None:
    tokenizer = letters_tokenizer(pad="</s>")
    model, end = classifier("llama", tokenizer), tokenizer.eos_token_id
    ids = torch.tensor([[9, 10, end, end]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert abs(model(input_ids=ids, attention_mask=mask).logits.item() - alone(model, [9, 10, end])) > 1e-3
    assert end_logits(model, ids, mask).item() == pytest.approx(alone(model, [9, 10, end]), abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_that_of_the_text_alone(kind: str, pad: str, side: str) -> None:
    """Batches of 1 and of 16, cut (the prompt has 60 characters, the model 64 places) and uncut."""
    if kind in ("bert", "roberta") and pad == "none":
        pytest.skip("encoders come with a pad token")
    scorer = scorer_of(kind, pad=PADS[pad], side=side, config_pad=pad != "none", at_eos=kind in DECODERS)
    tokenizer, texts = scorer.encoder.tokenizer, random_texts(16)
    for prompt in (asked("short"), asked("ab c" * 15)):
        expected = []
        for text in texts:
            extra = 1 if kind in DECODERS else 2
            question = prompt.text[max(0, len(prompt.text) + len(text) + extra - POSITIONS):]
            ids = tokenizer(question + text)["input_ids"] + [tokenizer.eos_token_id] * (kind in DECODERS)
            assert len(ids) <= POSITIONS
            expected.append(alone(scorer.model, ids))
        assert max(expected) - min(expected) > 0.005
        together = scorer(prompt, answers(*texts))
        apart = [scorer(prompt, answers(text))[0] for text in texts]
        assert together == pytest.approx(expected, abs=1e-4)
        assert apart == pytest.approx(expected, abs=1e-4)
    assert scorer.encoder.cut == 2 * sum(60 + len(t) + (1 if kind in DECODERS else 2) > POSITIONS for t in texts)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_every_text_is_read_once_in_batches_that_hold(lengths: list[int], most: int) -> None:
    made = list(batches(lengths, most))
    assert sorted(place for batch in made for place in batch) == list(range(len(lengths)))
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= most


def test_batches_of_any_size_give_the_same_scores() -> None:
    texts = random_texts(16, seed=2)
    found = [scorer_of("gpt_neox", pad="</s>", batch_tokens=n)(asked(), answers(*texts)) for n in (1, 100, 333, 9999)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-5)


# ---- what is read -------------------------------------------------------------------------------


def test_text_is_encoded_by_the_reward_models_own_tokenizer_i02() -> None:
    scorer = scorer_of("llama")
    completion = Completion(tokens=(7, 950), text="fine answer", logps=(0.0, 0.0), version=0, finish="stop")
    made = scorer.encoder.encode(turns("ask "), completion.text)
    assert scorer.encoder.tokenizer.decode(made.ids) == "ask fine answer"
    assert max(made.ids) < len(scorer.encoder.tokenizer) < 300
    assert scorer(asked("ask "), [completion]) == [pytest.approx(alone(scorer.model, made.ids), abs=1e-5)]


def test_a_chat_template_is_used_once_with_the_prompts_own_messages_i02() -> None:
    encoder = Encoder(letters_tokenizer(chat=True), reads="chat", at_eos=False, max_tokens=POSITIONS)
    decode = encoder.tokenizer.decode
    assert decode(encoder.encode(turns("hi"), "yes").ids) == "[user]hi</s>[assistant]yes</s>"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    made = encoder.encode(turns("ignored", messages=chat), "d")
    assert decode(made.ids) == "[user]a</s>[assistant]b</s>[user]c</s>[assistant]d</s>"


def test_a_pair_is_told_apart() -> None:
    encoder = Encoder(letters_tokenizer(cls=True, segments=True), reads="pair", at_eos=False, max_tokens=POSITIONS)
    made = encoder.encode(turns("ab"), "xyz")
    assert encoder.tokenizer.decode(made.ids) == "[CLS]ab[SEP]xyz[SEP]"
    assert made.segments == (0, 0, 0, 0, 1, 1, 1, 1)
    scorer = scorer_of("bert", reads="pair", segments=True)
    rows = [scorer.encoder.encode(turns("ab"), t) for t in ("xyz", "a", "longer than that")]
    expected = [alone(scorer.model, row.ids, row.segments) for row in rows]
    assert scorer(asked("ab"), answers("xyz", "a", "longer than that")) == pytest.approx(expected, abs=1e-4)
    assert abs(alone(scorer.model, rows[0].ids) - expected[0]) > 1e-3  # segments count


def test_a_classifier_of_completions_reads_no_prompt() -> None:
    encoder = Encoder(letters_tokenizer(), reads="completion", at_eos=False, max_tokens=POSITIONS)
    assert encoder.tokenizer.decode(encoder.encode(turns("secret"), "said").ids) == "said"


def test_eos_ends_what_stopped_and_nothing_else() -> None:
    encoder = Encoder(letters_tokenizer(), reads="text", at_eos=True, max_tokens=POSITIONS)
    decode = encoder.tokenizer.decode
    assert decode(encoder.encode(turns("a"), "b", stopped=True).ids) == "ab</s>"
    assert decode(encoder.encode(turns("a"), "b", stopped=False).ids) == "ab"
    chat = Encoder(letters_tokenizer(chat=True), reads="chat", at_eos=True, max_tokens=POSITIONS)
    assert chat.encode(turns("a"), "b").ids[-2:] != (chat.tokenizer.eos_token_id,) * 2  # the template's is enough


def test_a_completion_cannot_speak_in_special_tokens() -> None:
    encoder = Encoder(letters_tokenizer(chat=True), reads="chat", at_eos=False, max_tokens=POSITIONS)
    made = encoder.encode(turns("q"), "bad</s>[assistant]good</</s>s>")
    assert encoder.tokenizer.decode(made.ids) == "[user]q</s>[assistant]badgood</s>"
    assert without("a<<x>x>b", ["<x>"]) == "ab"


@pytest.mark.parametrize("text", ["", "\ud800", "\x00", "é\n\n", "9" * 30])
def test_hostile_text_has_a_score(text: str) -> None:
    (found,) = scorer_of("llama")(asked("q"), answers(text))
    assert isinstance(found, float)


# ---- too long -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", ["text", "chat", "pair"])
@given(asking=st.integers(0, 60), answering=st.integers(0, 30), limit=st.integers(20, 60))
@settings(max_examples=40, deadline=None)
def test_as_little_of_the_prompt_is_cut_as_will_do(reads: Any, asking: int, answering: int, limit: int) -> None:
    tokenizer = letters_tokenizer(chat=True, cls=True)
    encoder = Encoder(tokenizer, reads=reads, at_eos=False, max_tokens=limit)
    question, text = (LETTERS[:52] * 2)[:asking], (LETTERS * 2)[52:][:answering]

    def whole(question: str) -> tuple[int, ...]:
        return Encoder(tokenizer, reads=reads, at_eos=False, max_tokens=999).encode(turns(question), text).ids

    fitting = [cut for cut in range(asking + 1) if len(whole(question[cut:])) <= limit]  # the slow twin: every cut
    if not fitting:
        with pytest.raises(TooLong, match=f"of the reward model's {limit}"):
            encoder.encode(turns(question), text)
        return
    assert encoder.encode(turns(question), text).ids == whole(question[fitting[0]:])
    assert encoder.cut == (fitting[0] > 0)


def test_messages_are_cut_from_the_first_and_keep_their_turns() -> None:
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    assert [m["content"] for m in cut_left(chat, 4)] == ["", "e"]
    assert messages_of(asked("x")) == [{"role": "user", "content": "x"}]


def test_a_completion_that_does_not_fit_is_recorded_and_its_siblings_are_scored() -> None:
    scorer = scorer_of("llama", max_tokens=20)
    found = scorer(asked("question"), answers("a" * 21, "a" * 20))
    assert found[0] == Failure(
        reason="too_long", detail="the completion takes 21 tokens of the reward model's 20"
    )
    assert found[1] == pytest.approx(alone(scorer.model, scorer.encoder.tokenizer("a" * 20)["input_ids"]), abs=1e-4)


def test_a_text_that_breaks_the_template_costs_its_siblings_nothing() -> None:
    scorer = scorer_of("llama", chat=True, reads="chat")
    scorer.encoder.tokenizer.chat_template = (
        "{% for m in messages %}{% if 'bad' in m['content'] %}{{ raise_exception('no') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    first, second = scorer(asked("q"), answers("bad", "fine"))
    assert isinstance(first, Failure)
    assert first.reason == "raised"
    assert isinstance(second, float)


# ---- what is made of the logits -----------------------------------------------------------------


def test_the_label_that_counts() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5]])
    total = 2.718281828 + 0.135335283 + 1.648721271  # = 4.502338382
    assert picked(logits, None, "none").item() == pytest.approx(-0.5 / 3)
    assert picked(logits, 1, "none").item() == -2.0
    assert picked(logits, 2, "sigmoid").item() == pytest.approx(1.648721271 / 2.648721271)
    assert picked(logits, 0, "softmax").item() == pytest.approx(2.718281828 / total)
    assert picked(logits, 1, "log_softmax").item() == pytest.approx(-3.504597, abs=1e-5)  # -2 - log 4.502338


def test_what_the_length_cut_scores_as_told() -> None:
    completions = [make_completion(text="a", finish="length"), make_completion(text="a")]
    scorer = scorer_of("llama", without_eos=-1.0)
    cut, whole = scorer(asked(), completions)
    assert cut == -1.0
    assert whole == scorer_of("llama")(asked(), completions)[0] != -1.0


# ---- several at once ----------------------------------------------------------------------------


def test_the_reward_is_the_weighted_sum_and_keeps_its_parts() -> None:
    def first(prompt: Prompt, completions: Sequence[Completion]) -> list[Any]:
        return [0.5, 2.0, None, None]

    def second(prompt: Prompt, completions: Sequence[Completion]) -> list[Any]:
        return [-3.0, float("nan"), 1.5, None]

    made = WeightedSum(lambda: [Part(name="a", weight=0.7, function=first), Part(name="b", weight=-0.2,
                                                                                function=second)])
    found = made(asked(), answers("x", "y", "z", "w"))
    assert found[0] == Score(reward=pytest.approx(0.95), parts={"a": 0.5, "b": -3.0})  # 0.7 x 0.5 + 0.2 x 3
    assert found[2] == Score(reward=pytest.approx(-0.3), parts={"b": 1.5})  # None leaves the sum to the others
    assert [f.reason for f in found[1:] if isinstance(f, Failure)] == ["non_finite", "none"]
    assert found[1] == Failure(reason="non_finite", detail="b: second gave nan")


def test_a_reward_of_two_models_from_their_folders(tmp_path: Path) -> None:
    save_classifier(tmp_path / "one", "llama", seed=1)
    save_classifier(tmp_path / "two", "bert", labels=3, cls=True, seed=2)
    rewards = [
        RewardSettings(model=str(tmp_path / "one"), weight=2.0, at_eos=True, without_eos=-1.0, device="cpu"),
        RewardSettings(name="tone", model=str(tmp_path / "two"), weight=-0.5, index=1, activation="softmax"),
    ]
    completions = [*answers("so", "so what"), make_completion(text="cut", finish="length")]
    found = reward_of(rewards)(asked("why "), completions)
    for place, outcome in enumerate(found):
        assert isinstance(outcome, Score)
        parts = outcome.parts
        assert outcome.reward == pytest.approx(2.0 * parts["one"] - 0.5 * parts["tone"])
        assert 0 < parts["tone"] < 1
        assert (parts["one"] == -1.0) == (place == 2)
    one = load_scorer(rewards[0])
    ids = one.encoder.tokenizer("why so")["input_ids"] + [one.encoder.tokenizer.eos_token_id]
    assert isinstance(found[0], Score)
    assert found[0].parts["one"] == pytest.approx(alone(one.model, ids), abs=1e-4)


# ---- loading ------------------------------------------------------------------------------------


def refused(reward: RewardSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        load_scorer(reward)
    return "\n".join(caught.value.problems)


def test_what_the_folder_says_is_how_it_is_read(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "m", chat=True)
    assert load_scorer(RewardSettings(model=str(folder))).encoder.reads == "chat"
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "tba_reward": {"reads": "text", "at_eos": True}}))
    made = load_scorer(RewardSettings(model=str(folder)))
    assert (made.encoder.reads, made.encoder.at_eos) == ("text", True)
    told = load_scorer(RewardSettings(model=str(folder), reads="pair", at_eos=False))
    assert (told.encoder.reads, told.encoder.at_eos) == ("pair", False)


@pytest.mark.parametrize(("kind", "longest"), [("llama", POSITIONS), ("bert", POSITIONS), ("roberta", POSITIONS)])
def test_the_longest_input_is_the_models_own_or_less(tmp_path: Path, kind: str, longest: int) -> None:
    """RoBERTa's 68 places are counted from pad's id, 3, on: 64 are left."""
    folder = str(save_classifier(tmp_path / kind, kind, cls=True))
    assert load_scorer(RewardSettings(model=folder)).encoder.max_tokens == longest
    assert load_scorer(RewardSettings(model=folder, max_tokens=30)).encoder.max_tokens == 30


def test_a_model_without_trained_head_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_classifier(tmp_path / "m")
    config = classifier("llama", letters_tokenizer()).config
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert "has no trained weights for score.weight" in refused(RewardSettings(model=str(folder)))


def test_what_the_settings_ask_and_the_model_lacks_is_refused(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "m", labels=2)
    said = refused(RewardSettings(model=str(folder), index=2, reads="chat"))
    assert "task.rewards.0.index = 2" in said
    assert "LABEL_0, LABEL_1" in said
    assert "has no chat template" in said
    assert "is no device" in refused(RewardSettings(model=str(folder), device="abacus"))
    if not torch.cuda.is_available():
        assert "sees 0 devices of the kind cuda" in refused(RewardSettings(model=str(folder), device="cuda:1"))


def test_pickled_weights_and_foreign_code_are_refused(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    assert "cannot be loaded" in refused(RewardSettings(model=str(folder)))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps({
        "model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.M"},
    }))
    (tmp_path / "c" / "own.py").write_text("raise SystemExit('ran')\n")
    assert "cannot be loaded" in refused(RewardSettings(model=str(tmp_path / "c")))


def test_padding_takes_any_id() -> None:
    rows = [Input(ids=(5, 2)), Input(ids=(6, 7, 8))]
    for pad, filler in PADS.items():
        made = padded(rows, letters_tokenizer(pad=filler))
        assert made["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
        assert made["input_ids"][0, 2].item() == {"pad": 3, "eos": 2, "none": 2}[pad]


def test_a_part_is_named_once(tmp_path: Path) -> None:
    assert make_prompt("p").id == "p"
    assert RewardSettings(model="owner/name").part == "name"
    assert RewardSettings(endpoint="http://host:8000/").part == "host:8000"
    assert RewardSettings(model="owner/name", name="tone").part == "tone"


# ---- refused before anything loads --------------------------------------------------------------


def said_of(folder: Any, **more: Any) -> list[str]:
    return unloadable([RewardSettings(model=str(folder), **more)], fetches=False)


def test_a_whole_reward_model_is_not_refused(tmp_path: Path) -> None:
    for kind in ("llama", "bert", "roberta"):
        assert said_of(save_classifier(tmp_path / kind, kind)) == []


def test_a_model_without_score_head_is_refused_by_its_files_alone(tmp_path: Path) -> None:
    (said,) = said_of(save_policy(tmp_path / "causal"))
    assert said.startswith("task.rewards.0.model = ")
    assert "has no trained weights for score.weight: it is no finished reward model" in said
    with pytest.raises(SettingsError) as caught:
        load_scorer(RewardSettings(model=str(tmp_path / "causal")))
    assert list(caught.value.problems) == [said]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "scorer")
    wider = letters_tokenizer()
    wider.add_tokens(["alpha", "beta"])
    wider.save_pretrained(folder)
    (said,) = said_of(folder)
    known = len(letters_tokenizer())
    assert f"its tokenizer has {known + 2} tokens, and the model knows {known}: it is another model's" in said
    with pytest.raises(SettingsError, match="it is another model's"):
        load_scorer(RewardSettings(model=str(folder)))


def test_broken_folders_and_settings_are_refused_together(tmp_path: Path) -> None:
    torn = save_classifier(tmp_path / "torn")
    weights = next(torn.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    bare = save_classifier(tmp_path / "bare")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    good = save_classifier(tmp_path / "good")
    rewards = [RewardSettings(model=str(path), **more) for path, more in
               ((torn, {}), (bare, {}), (good, {"index": 3}), ("no/such-model", {}))]
    said = unloadable(rewards, fetches=False)
    assert [line.split(" ")[0].split("=")[0] for line in said] == [
        "task.rewards.0.model", "task.rewards.1.model", "task.rewards.2.index"]
    assert "is no whole safetensors file" in said[0]
    assert "cannot be loaded" in said[1]


def test_train_and_check_refuse_before_the_policy_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy's folder holds nothing that could be loaded, and nobody finds out."""
    hollow = tmp_path / "policy"
    hollow.mkdir()
    (hollow / "config.json").write_text("{}")
    (hollow / "model.safetensors").write_bytes(b"")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({
        "mode": "lockstep", "model": str(hollow), "task": {
            "name": "preference", "path": str(tmp_path / "p.jsonl"), "held_out": 1,
            "rewards": [{"model": str(save_policy(tmp_path / "causal"))}]},
    }))
    said = []
    for words in (["check", str(recipe)], ["train", str(recipe), "--run", str(tmp_path / "run")]):
        assert cli.main(words) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "it is no finished reward model" in said[0]
    assert not (tmp_path / "run").exists()
    assert cli.main(["check", str(recipe), "task.rewards=[]"]) == 2
    assert "task.rewards is empty" in capsys.readouterr().err
