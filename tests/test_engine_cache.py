"""The engine's cache holds what transformers' own holds, whatever is read and whichever rows go on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from tba.engines.cache import ROOM, RoomyCache, RoomyLayer
from tba.engines.transformers import _branch

HEADS, WIDTH = 2, 3


def some(rows: int, positions: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, HEADS, positions, WIDTH, generator=generator)
    return keys, values


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.lists(
    st.tuples(st.integers(1, ROOM + 5), st.lists(st.integers(0, 99), min_size=1, max_size=9)), min_size=1, max_size=6,
))
def test_it_holds_what_a_cache_made_anew_at_every_step_holds(rows: int, steps: list[tuple[int, list[int]]]) -> None:
    ours, theirs = RoomyCache(), DynamicCache()
    for number, (positions, chosen) in enumerate(steps):
        keys, values = some(rows, positions, number)
        for layer in (0, 1):
            got = ours.update(keys + layer, values - layer, layer)
            expected = theirs.update(keys + layer, values - layer, layer)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])
        indices = torch.tensor([index % rows for index in chosen])
        ours.batch_select_indices(indices)
        theirs.batch_select_indices(indices)
        rows = len(chosen)
        for one, other in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)
    assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_step_takes_no_new_memory_while_there_is_room_and_rows_that_stay_are_not_moved() -> None:
    layer = RoomyLayer()
    layer.update(*some(4, 7, 0))
    before = layer.keys.data_ptr()
    for step in range(ROOM):
        layer.update(*some(4, 1, step))
        layer.batch_select_indices(torch.arange(4))
    assert layer.keys.shape[-2] == 7 + ROOM
    assert layer.keys.data_ptr() == before
    layer.batch_select_indices(torch.tensor([0, 3, 2]))
    assert layer.keys.data_ptr() == before
    layer.update(*some(3, 1, 99))
    assert layer.keys.data_ptr() != before


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=12))
def test_a_prefix_keeps_its_place_and_equal_ones_are_one(rows: list[tuple[int, int]]) -> None:
    prefix_A, id_A = (torch.tensor(column) for column in zip(*rows, strict=True))
    id_F, parent_F, now_A = _branch(prefix_A, id_A, vocabulary=4)
    assert [(int(parent_F[f]), int(id_F[f])) for f in now_A] == rows  # each row goes on from its own
    assert len(id_F) == len(set(rows))
    first = {parent for parent in parent_F.tolist() if parent < len(parent_F)}
    assert all(int(parent_F[place]) == place for place in first)


@pytest.mark.parametrize(("prefix", "ids", "parents"), [
    ([0, 1, 2, 3], [7, 7, 7, 7], [0, 1, 2, 3]),
    ([0, 2, 3], [7, 7, 7], [0, 3, 2]),  # row 1 has ended: the last one takes its place
    ([0, 0, 1], [5, 6, 5], [0, 1, 0]),
    ([2, 2, 2], [5, 6, 7], [2, 2, 2]),
])
def test_places_by_hand(prefix: list[int], ids: list[int], parents: list[int]) -> None:
    _, parent_F, _ = _branch(torch.tensor(prefix), torch.tensor(ids), vocabulary=10)
    assert parent_F.tolist() == parents
