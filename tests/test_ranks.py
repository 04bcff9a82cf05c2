"""Ranks that share a trainer: equal to one, whatever their groups; and one layout of what they save."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import tba.policy
from ranks_of_a_test import CASES, company, saved, settings_of, train, train_all
from tba import metrics as m

STEPS = 20
SECONDS = {m.STEP_SECONDS, m.RESCORE_SECONDS, m.RECORD_SECONDS}


@pytest.fixture(autouse=True)
def _usual_worth():
    before = tba.policy.WORTH
    yield
    tba.policy.WORTH = before


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return train_all(None, STEPS)


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Metrics of a step that are numbers, without times; NaN for those that there are not."""
    kept = {name: value for name, value in record.items() if name not in {*SECONDS, m.AGE_HISTOGRAM}}
    return {name: math.nan if value is None else value for name, value in kept.items()}


def furthest(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Largest difference of tensors, relative to the largest number of each."""
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max()) for name in ours)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_train_as_one_does(count: int, alone: dict[str, dict[str, Any]]) -> None:
    with company(count) as ranks:
        first, *others = ranks.do(train_all, STEPS)
    for name in CASES:
        ours, theirs = first[name]["metrics"], alone[name]["metrics"]
        for mine, its in zip(ours, theirs, strict=True):
            assert numbers(mine) == pytest.approx(numbers(its), rel=1e-5, abs=1e-7, nan_ok=True), name
            assert mine[m.AGE_HISTOGRAM] == its[m.AGE_HISTOGRAM]
        assert furthest(first[name]["tensors"], alone[name]["tensors"]) <= 1e-5, name
        print(count, name, furthest(first[name]["tensors"], alone[name]["tensors"]))
        for other in others:
            said = [(record[m.LOSS], record[m.GRAD_NORM], record[m.VERSION]) for record in other[name]["metrics"]]
            assert said == [(record[m.LOSS], record[m.GRAD_NORM], record[m.VERSION]) for record in ours]
