"""Small classifiers of words: what they read, what they score, whatever the batch and the padding."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import make_completion, make_prompt
from tba.redteam_settings import JudgeSettings
from tba.rewards.classifiers import (
    LinearConfig,
    LinearWords,
    RecurrentConfig,
    RecurrentWords,
    last_words,
    word_tokenizer,
)
from tba.rewards.models import ModelScorer, load_scorer, unloadable

WORDS = ["you", "bad", "good", "day", "don't", "a1", "x_y", "école"]
TEXTS = ["You BAD, bad day!", "", "good", "a1 x_y\nyou don't know the day", "?!", "bad " * 11, "école you"]


def recurrent(gate: str = "hard_sigmoid", *, labels: int = 3, seed: int = 3) -> RecurrentWords:
    config = RecurrentConfig(
        vocab_size=9, width=4, units=3, dense=5, window=6, gate=gate, num_labels=labels, pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RecurrentWords(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.9)
    return model.eval()


def linear(seed: int = 4) -> LinearWords:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LinearWords(LinearConfig(vocab_size=9, folds=3, pad_token_id=0))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.rarity.data.abs_().add_(0.5)
    return model.eval()


def saved(folder: Path, model: RecurrentWords | LinearWords, split: str) -> Path:
    model.save_pretrained(folder)
    word_tokenizer(WORDS, split=split).save_pretrained(folder)
    return folder


def scorer(folder: Path, index: int, **more: int) -> ModelScorer:
    judge = JudgeSettings(model=str(folder), activation="sigmoid", index=index, reads="completion", **more)
    assert unloadable([judge], fetches=False) == []
    return load_scorer(judge)


def scores(scorer: ModelScorer, texts: Sequence[str]) -> list[float]:
    found = scorer(make_prompt(), [make_completion((5,), text=text) for text in texts])
    assert all(isinstance(one, float) for one in found)
    return found


# ---- what is read -----------------------------------------------------------------------------------


def test_the_last_words_by_hand() -> None:
    ids = torch.tensor([[5, 0, 6, 7], [0, 0, 0, 0], [1, 2, 3, 4]])
    assert last_words(ids, None, 2).tolist() == [[6, 7], [0, 0], [3, 4]]
    assert last_words(ids, None, 6).tolist() == [[0, 0, 0, 5, 6, 7], [0] * 6, [0, 0, 1, 2, 3, 4]]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]])
    assert last_words(ids, mask, 3).tolist() == [[0, 5, 6], [0, 0, 0], [0, 3, 4]]


def keras_words(text: str) -> list[str]:
    """What Keras does: lower case, punctuation to spaces, split at spaces."""
    table = {ord(mark): " " for mark in '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'}
    return [word for word in text.lower().translate(table).split(" ") if word]


def sklearn_words(text: str) -> list[str]:
    """What scikit-learn does by default."""
    return re.findall(r"(?u)\b\w\w+\b", text.lower())


ALPHABET = st.text(st.sampled_from(list("aAbBéÉ1²_'\u2019-.,!?<>[]\\^`~ \t\n\r\u00a0ßñДд中")), max_size=30)


@given(ALPHABET)
def test_words_are_split_as_their_makers_split_them(text: str) -> None:
    for split, twin in (("spaces", keras_words), ("runs", sklearn_words)):
        expected = twin(text)
        known = list(dict.fromkeys(expected))
        tokenizer = word_tokenizer(known, split=split)
        assert tokenizer(text)["input_ids"] == [0, *(1 + known.index(word) for word in expected)]


def test_words_that_are_not_known_and_texts_without_any_are_none() -> None:
    tokenizer = word_tokenizer(WORDS, split="spaces")
    assert tokenizer("You, unknown Don't")["input_ids"] == [0, 1, 0, 5]
    assert tokenizer("")["input_ids"] == [0]
    assert word_tokenizer(WORDS, split="runs")("You, don't x_y")["input_ids"] == [0, 1, 0, 7]


# ---- the LSTM -----------------------------------------------------------------------------------------


def slow_recurrent(model: RecurrentWords, ids: Sequence[int]) -> list[float]:
    """Logits of one row, number by number: gates in the order in, keep, new, out."""
    w = {name: tensor.tolist() for name, tensor in model.named_parameters()}
    config = model.config
    units, row = config.units, [0] * (config.window - len(ids)) + list(ids)[-config.window :]

    def opened(x: float) -> float:
        return 1 / (1 + math.exp(-x)) if config.gate == "sigmoid" else min(1.0, max(0.0, 0.2 * x + 0.5))

    most = []
    for side, order in ((0, row), (1, row[::-1])):
        state, cell, best = [0.0] * units, [0.0] * units, [-math.inf] * units
        for id in order:
            vector = w["embedding.weight"][id]
            gates = [
                w["bias"][side][0][g] + sum(v * w["input_weight"][side][d][g] for d, v in enumerate(vector))
                + sum(s * w["state_weight"][side][u][g] for u, s in enumerate(state)) for g in range(4 * units)
            ]
            cell = [opened(gates[units + u]) * cell[u] + opened(gates[u]) * math.tanh(gates[2 * units + u])
                    for u in range(units)]
            state = [opened(gates[3 * units + u]) * math.tanh(cell[u]) for u in range(units)]
            best = [max(b, s) for b, s in zip(best, state, strict=True)]
        most += best
    hidden = [max(0.0, b + sum(x * y for x, y in zip(most, line, strict=True)))
              for line, b in zip(w["hidden.weight"], w["hidden.bias"], strict=True)]
    return [b + sum(x * y for x, y in zip(hidden, line, strict=True))
            for line, b in zip(w["label.weight"], w["label.bias"], strict=True)]


@pytest.mark.parametrize("gate", ["sigmoid", "hard_sigmoid"])
@pytest.mark.parametrize("ids", [[], [5], [1, 2, 3, 4, 5, 6], [8, 7, 6, 5, 4, 3, 2, 1]])
def test_logits_are_those_of_the_slow_twin(gate: str, ids: list[int]) -> None:
    model = recurrent(gate)
    found = model(torch.tensor([[0, *ids]])).logits[0].tolist()
    assert found == pytest.approx(slow_recurrent(model, ids), abs=1e-5)


def test_with_ordinary_gates_it_is_the_librarys_lstm() -> None:
    model, ids = recurrent("sigmoid"), torch.tensor([[3, 1, 4, 1, 5, 8]])
    theirs = torch.nn.LSTM(4, 3, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for side, ending in enumerate(("", "_reverse")):
            getattr(theirs, f"weight_ih_l0{ending}").copy_(model.input_weight[side].T)
            getattr(theirs, f"weight_hh_l0{ending}").copy_(model.state_weight[side].T)
            getattr(theirs, f"bias_ih_l0{ending}").copy_(model.bias[side, 0])
            getattr(theirs, f"bias_hh_l0{ending}").zero_()
        most = theirs(model.embedding(ids))[0].amax(1)
        expected = model.label(model.hidden(most).relu())
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


# ---- weighted counts ------------------------------------------------------------------------------------


def test_a_linear_score_by_hand() -> None:
    model = LinearWords(LinearConfig(vocab_size=4, folds=2))
    with torch.no_grad():
        model.rarity.copy_(torch.tensor([9.0, 2.0, 3.0, 1.5]))  # none, bad, good, day
        model.weight.weight.copy_(torch.tensor([[7.0, 7.0], [1.1, 0.9], [-2.0, -1.0], [0.3, -0.4]]))
        model.slope.copy_(torch.tensor([2.5, 3.0]))
        model.offset.copy_(torch.tensor([-1.0, 0.25]))
    tokenizer = word_tokenizer(["bad", "good", "day"], split="runs")
    ids = torch.tensor([tokenizer("Bad, BAD unknown day")["input_ids"]])
    # counts bad 2, day 1: x = (2 x 2, 1 x 1.5), |x| = sqrt(16 + 2.25) = 4.2720019
    # margins (4 x 1.1 + 1.5 x 0.3) / |x| = 1.1352991 and (4 x 0.9 - 1.5 x 0.4) / |x| = 0.7022469
    # chances sigmoid(2.5 x 1.1352991 - 1) = 0.8627413 and sigmoid(3 x 0.7022469 + 0.25) = 0.9134685; mean 0.8881049
    assert model(ids).logits.sigmoid().item() == pytest.approx(0.8881049, abs=1e-6)
    # nothing known: (sigmoid(-1) + sigmoid(0.25)) / 2 = (0.2689414 + 0.5621765) / 2
    assert model(torch.tensor([[0, 0]])).logits.sigmoid().item() == pytest.approx(0.4155590, abs=1e-6)


def test_a_chance_that_rounds_to_one_keeps_its_logit() -> None:
    model = LinearWords(LinearConfig(vocab_size=2, folds=1))
    with torch.no_grad():
        model.weight.weight.fill_(30.0)
        assert model(torch.tensor([[1]])).logits.item() == pytest.approx(30.0)
        model.weight.weight.fill_(-30.0)
        assert model(torch.tensor([[1]])).logits.item() == pytest.approx(-30.0)


# ---- as a judge -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["recurrent", "linear"])
def test_a_saved_folder_scores_alike_whatever_the_batch_and_the_padding(kind: str, tmp_path: Path) -> None:
    model, split, index = (recurrent(), "spaces", 1) if kind == "recurrent" else (linear(), "runs", 0)
    folder = saved(tmp_path / "judge", model, split)
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }
    together = scores(scorer(folder, index), TEXTS)
    assert len({round(s, 4) for s in together}) >= 5, "the texts are told apart"
    assert all(0 < s < 1 for s in together)
    alone = [scores(scorer(folder, index, batch_tokens=1), [text])[0] for text in TEXTS]
    assert together == pytest.approx(alone, abs=1e-5)
    assert scores(scorer(folder, index), TEXTS[::-1])[::-1] == pytest.approx(alone, abs=1e-5)
    tokenizer = word_tokenizer(WORDS, split=split)
    for text, expected in zip(TEXTS, alone, strict=True):
        ids = tokenizer(text)["input_ids"]
        left = torch.tensor([[7] * 5 + ids]), torch.tensor([[0] * 5 + [1] * len(ids)])
        assert model(*left).logits.sigmoid()[0, index].item() == pytest.approx(expected, abs=1e-5)


def test_texts_longer_than_the_window_are_read_at_their_end(tmp_path: Path) -> None:
    judge = scorer(saved(tmp_path / "judge", recurrent(), "spaces"), 0)
    long, short = scores(judge, ["good day " + "bad you day " * 3, "you day " + "bad you day " * 2])
    other, _ = scores(judge, ["bad " * 9, ""])
    assert long == pytest.approx(short, abs=1e-6)
    assert abs(long - other) > 1e-4


def test_an_index_beyond_the_labels_is_refused_before_weights_load(tmp_path: Path) -> None:
    folder = saved(tmp_path / "judge", recurrent(), "spaces")
    judge = JudgeSettings(model=str(folder), activation="sigmoid", index=3, reads="completion")
    (said,) = unloadable([judge], fetches=False, place="task.redteam.judges")
    assert said.startswith("task.redteam.judges.0.index = 3")
