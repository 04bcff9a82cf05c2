"""The sampling temperature and top-p of an engine batch: fixed, or drawn anew for each."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

from tba.engines.protocol import Sampling
from tba.records import Lease
from tba.sections import RangeSettings


class Exploration:
    """How each engine batch is sampled; a function of (seed, first lease), so that resume and async repeat it.

    A temperature and a top-p are drawn apart from each other (arXiv 2503.18929, released code). How a
    completion was sampled never enters the residual, which holds at any completion.
    """

    def __init__(
        self, sampling: Sampling, *, temperature: RangeSettings | None = None, top_p: RangeSettings | None = None,
        seed: int = 0,
    ) -> None:
        """`sampling` holds for every batch, but for what is given as a range."""
        self.sampling = sampling
        self._temperature, self._top_p, self._seed = temperature, top_p, seed

    def of(self, first: Lease) -> Sampling:
        """How the engine batch that begins with the lease `first` is sampled."""
        return replace(
            self.sampling,
            temperature=self._drawn("temperature", self._temperature, self.sampling.temperature, first),
            top_p=self._drawn("top_p", self._top_p, self.sampling.top_p, first),
        )

    def _drawn(self, name: str, range_: RangeSettings | None, otherwise: float, first: Lease) -> float:
        if range_ is None:
            return otherwise
        text = f"{name}\x00{self._seed}\x00{first.number}\x00{first.attempt}"
        rng = random.Random(hashlib.sha256(text.encode()).digest())
        if rng.random() >= range_.share:
            return otherwise
        return range_.low + (range_.high - range_.low) * rng.random()
