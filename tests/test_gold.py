"""The gold scorer and the embedding of the movie experiment, on ratings that are known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the extra movies is not installed")

import gold

WORTH = {"superb": 3.0, "warm": 1.0, "plain": 0.0, "dull": -1.0, "dreadful": -3.0}


def rated(count: int, seed: int) -> tuple[list[str], list[float]]:
    rng = random.Random(seed)
    texts = [" ".join(["a", rng.choice(list(WORTH)), "and", rng.choice(list(WORTH)), "film"]) for _ in range(count)]
    return texts, [sum(WORTH.get(word, 0.0) for word in text.split()) / 2 for text in texts]


def test_the_gold_scorer_learns_what_words_are_worth(tmp_path: Path) -> None:
    texts, ratings = rated(300, 1)
    rows = [{"text": text, "rating": rating} for text, rating in zip(texts, ratings, strict=True)]
    (tmp_path / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = gold.gold_of(tmp_path)
    good, middling, bad = judge.scores(["a superb and warm film", "a plain and plain film", "a dull and dreadful film"])
    assert good > middling > bad
    assert judge.scores(texts[:5]) == gold.gold_of(tmp_path).scores(texts[:5])  # fitted anew, the same
    held_out = [{"prompt": text[:6], "human": text[6:], "rating": rating}
                for text, rating in zip(*rated(60, 2), strict=True)]
    assert gold.agreement(judge, held_out) > 0.95


def test_mean_distance_is_that_of_all_pairs() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [0.0, 0.0]])
    # cosines: 0, 1/sqrt 2, 0 (of zeros); 1/sqrt 2, 0; 0
    assert gold.mean_distance(rows) == pytest.approx(1 - 2 / math.sqrt(2) / 6)
    assert gold.mean_distance(np.array([[1.0, 2.0], [2.0, 4.0]])) == pytest.approx(0.0)


def test_an_embedding_tells_repetition_from_variety() -> None:
    texts, _ = rated(200, 3)
    spread = gold.Embedding(texts, dimensions=4)
    assert spread.distance([texts[0], texts[0]]) == pytest.approx(0.0, abs=1e-9)
    assert spread.distance(["a superb and superb film", "a dull and dull film"]) > 0.1
    assert math.isnan(spread.distance(texts[:1]))
