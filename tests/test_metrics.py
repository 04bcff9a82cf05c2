"""Metrics: declared once, written as strict JSON."""

from __future__ import annotations

import json
import math
import re

import pytest

from tba import metrics as m


def strict(text: str) -> object:
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_numbers_that_json_cannot_hold_become_null():  # case c05
    record = {m.STEP: 3, m.LOSS: math.nan, m.GRAD_NORM: math.inf, m.KL: -math.inf, m.REWARD: -1.5,
              m.AGE_HISTOGRAM: {"0": 2, "7": math.nan}, m.DRAWN_BY: {"recent": [1.5, (math.inf,)]}}
    line = m.to_json(record)
    assert "\n" not in line
    assert strict(line) == {
        m.STEP: 3, m.LOSS: None, m.GRAD_NORM: None, m.KL: None, m.REWARD: -1.5,
        m.AGE_HISTOGRAM: {"0": 2, "7": None}, m.DRAWN_BY: {"recent": [1.5, [None]]},
    }


def test_finite_leaves_everything_else_as_it_is():
    value = {"a": [True, None, "NaN", 0, -0.5], "b": {"c": 1e308}}
    assert m.finite(value) == value
    assert m.finite({3: math.nan}) == {"3": None}


def test_a_float_comes_back_to_the_bit():
    value = 0.1 + 0.2
    assert strict(m.to_json({m.LOSS: value})) == {m.LOSS: value}


def test_an_undeclared_name_is_refused_by_name():
    with pytest.raises(KeyError, match=r"train/los.*not declared"):
        m.to_json({m.STEP: 1, "train/los": 0.5})


def test_a_name_is_declared_once():
    with pytest.raises(ValueError, match="'train/loss' is declared twice"):
        m._declare(m.LOSS, "1", "again")


def test_the_table_lists_every_metric_with_unit_and_meaning():
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", m.table(), re.M)
    assert rows == [(x.name, x.unit, x.meaning) for x in m.METRICS.values()]
    assert len(rows) > 40
    assert all(len(meaning) > 5 and unit for _, unit, meaning in rows)


def test_mean_is_exact_and_nan_of_nothing():
    assert m.mean([1e16, 1.0, -1e16, 4.0]) == 1.25
    assert math.isnan(m.mean([]))


def test_an_audit_shows_its_success_first_and_other_tasks_their_full_marks():
    assert m.foremost({m.PASS_1: 0.5})[:2] == ("pass@1", "pass@1_greedy")
    assert m.foremost({m.PASS_1: 0.0, m.ATTACK_SUCCESS: 0.9})[:2] == ("attack_success", "attack_diversity")
