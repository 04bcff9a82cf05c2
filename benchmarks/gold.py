"""The gold scorer of the movie experiment and its embedding: n-grams and linear algebra, no neural network.

Both are fitted anew from the data files, in a second, so that no file has to be loaded that may run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge
from sklearn.pipeline import FeatureUnion, Pipeline

from tba.embeddings import diversity

ALPHA = 1.0
"""Ridge penalty."""
DIMENSIONS = 64
"""Of the embedding."""


def ngrams() -> FeatureUnion:
    """TF-IDF of words and pairs of words, and of 2 to 5 characters within words."""
    return FeatureUnion([
        ("words", TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)),
        ("characters", TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True, min_df=3)),
    ])


class Gold:
    """Mean human rating of a snippet, from -4 to 4, as ridge regression on n-grams tells it."""

    def __init__(self, texts: Sequence[str], ratings: Sequence[float]) -> None:
        """`texts` are those of the part `gold` alone."""
        self._model = Pipeline([("ngrams", ngrams()), ("ridge", Ridge(alpha=ALPHA))])
        self._model.fit(list(texts), list(ratings))

    def scores(self, texts: Sequence[str]) -> list[float]:
        """One score per text."""
        return [float(score) for score in self._model.predict(list(texts))]


class Embedding:
    """TF-IDF of words, reduced by a truncated singular value decomposition (latent semantic analysis)."""

    def __init__(self, texts: Sequence[str], dimensions: int = DIMENSIONS) -> None:
        """Fitted on human texts."""
        self._model: Any = Pipeline([
            ("tfidf", TfidfVectorizer(sublinear_tf=True, min_df=2)),
            ("svd", TruncatedSVD(n_components=dimensions, random_state=0)),
        ])
        self._model.fit(list(texts))

    def distance(self, texts: Sequence[str]) -> float:
        """Mean cosine distance between two of the texts; NaN of fewer than two.

        Texts without a known word lie at right angles to all others.
        """
        if len(texts) < 2:
            return math.nan
        return mean_distance(self._model.transform(list(texts)))


def mean_distance(rows: np.ndarray) -> float:
    """Mean over pairs of rows of 1 - cosine; at least two rows. Rows of zeros have cosine 0 with all."""
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = np.divide(rows, length, out=np.zeros_like(rows), where=length > 1e-12)
    return diversity(unit)


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def gold_of(folder: Path) -> Gold:
    """The gold scorer of a folder that `movies.py` made."""
    rows = read(folder / "gold.jsonl")
    return Gold([row["text"] for row in rows], [row["rating"] for row in rows])


def agreement(gold: Gold, rows: Sequence[dict[str, Any]]) -> float:
    """Correlation of the scores of held-out human texts with their ratings."""
    scores = gold.scores([row["prompt"] + row["human"] for row in rows])
    return float(np.corrcoef(scores, [row["rating"] for row in rows])[0, 1])
