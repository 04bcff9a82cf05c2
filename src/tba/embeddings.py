"""Texts as unit vectors, how far apart they are, and which of them are of one kind."""

# Shape legend: N texts, D dimensions, T positions, G 3-grams.

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]

DIMENSIONS = 512
"""Of hashed 3-grams."""
BATCH = 64
"""Texts that an encoder reads at once."""
HASHED = 1024
"""Texts whose 3-grams are counted at once."""


class Embedder:
    """Mean-pooled states of an encoder; without one, hashed character 3-grams, which tell wording and not meaning."""

    def __init__(self, where: str | None) -> None:
        """`where` is a folder or a Hugging Face id of an encoder; it is loaded at the first use."""
        self._where = where
        self._parts: Any = None

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """[N D] vectors of length 1; of a text without letters, of length 0."""
        if self._where is not None:
            return self._encoded(texts, self._where)
        parts = [_hashed(texts[at : at + HASHED]) for at in range(0, len(texts), HASHED)]
        return np.concatenate(parts) if parts else np.zeros((0, DIMENSIONS), np.float32)

    def _encoded(self, texts: Sequence[str], where: str) -> Vectors:
        import torch

        if self._parts is None:
            from transformers import AutoModel, AutoTokenizer

            self._parts = (
                AutoTokenizer.from_pretrained(where), AutoModel.from_pretrained(where, use_safetensors=True).eval(),
            )
        tokenizer, model = self._parts
        found: list[Any] = []
        with torch.inference_mode():
            for at in range(0, len(texts), BATCH):
                read = tokenizer(list(texts[at : at + BATCH]), padding=True, truncation=True, return_tensors="pt")
                state_NTD = model(**read).last_hidden_state
                mask_NT1 = read["attention_mask"][..., None]
                found.append((state_NTD * mask_NT1).sum(1) / mask_NT1.sum(1))
        return _unit(torch.cat(found).numpy()) if found else np.zeros((0, 1), np.float32)


def _hashed(texts: Sequence[str]) -> Vectors:
    """[N D] counts of 3-grams of the UTF-8 bytes, by CRC-32, as unit vectors; each 3-gram is hashed once."""
    padded = [np.frombuffer(f" {text.lower()} ".encode("utf-8", "replace"), np.uint8) for text in texts]
    text_G = np.repeat(np.arange(len(padded)), [max(0, len(bytes_T) - 2) for bytes_T in padded])
    gram_G = np.concatenate([_grams(bytes_T.astype(np.int32)) for bytes_T in padded])
    unlike, which_G = np.unique(gram_G, return_inverse=True)
    place = np.array([zlib.crc32(int(gram).to_bytes(3, "big")) % DIMENSIONS for gram in unlike], np.int64)
    counts = np.bincount(text_G * DIMENSIONS + place[which_G], minlength=len(padded) * DIMENSIONS)
    return _unit(counts.reshape(len(padded), DIMENSIONS).astype(np.float32))


def _grams(bytes_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return (bytes_T[:-2] << 16) + (bytes_T[1:-1] << 8) + bytes_T[2:]


def _unit(vectors: Vectors) -> Vectors:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(length > 0, length, 1.0)).astype(np.float32)


def diversity(vectors: Vectors) -> float:
    """1 minus the mean cosine of all pairs of different rows; 0 of fewer than two.

    The mean is (|sum v|^2 - sum |v|^2) / (N (N - 1)).
    """
    count = len(vectors)
    if count < 2:
        return 0.0
    total = vectors.sum(0, dtype=np.float64)
    own = float((vectors.astype(np.float64) ** 2).sum())
    return 1.0 - (float(total @ total) - own) / (count * (count - 1))


def clusters(vectors: Vectors, similarity: float) -> list[int]:
    """[N] number of each row's cluster, from 0: that of the most alike earlier leader, of cosine `similarity` or more,
    else a new one that it leads. One pass, so that the order counts: leaders are no closer than `similarity`."""
    leaders = np.zeros((len(vectors), vectors.shape[1]), np.float32)
    count, found = 0, list[int]()
    for vector in vectors:
        cosines = leaders[:count] @ vector
        best = int(cosines.argmax()) if count else -1
        if count == 0 or cosines[best] < similarity:
            leaders[count], best = vector, count
            count += 1
        found.append(best)
    return found
