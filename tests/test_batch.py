"""Groups to tensors: masks from lengths, the shift by one, micro-batches by token budget."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import STOP, make_completion, make_draw, make_prompt, make_trajectory, random_draws
from tba import batch as batch_room
from tba.batch import Batch, MicroBatch, Rows, collate, make_rows
from tba.buffer.entries import Draw

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def row_ids(rows: Rows, row: int) -> tuple[list[int], list[int]]:
    """Prompt and completion of a row, read back from the tensors by its masks: the prompt ends where they begin."""
    places = rows.completion_NT[row].nonzero()[:, 0].tolist()
    assert places == list(range(places[0], places[-1] + 1))
    attended = int(rows.attention_NT[row].sum())
    assert attended == min(places[-1] + 2, rows.input_NT.shape[1])  # the last id of the widest row is not read
    assert bool(rows.attention_NT[row, :attended].all())
    assert torch.equal(rows.input_NT[row, 1:], rows.target_NT[row, :-1])
    return rows.input_NT[row, : places[0] + 1].tolist(), rows.target_NT[row, places].tolist()


def distinct_rows(micro: MicroBatch) -> list[tuple[list[int], list[int]]]:
    return [row_ids(rows, row) for rows in micro.rows for row in range(len(rows.input_NT))]


def padded_tokens(micro: MicroBatch) -> int:
    return sum(rows.input_NT.shape[0] * (rows.input_NT.shape[1] + 1) for rows in micro.rows)


# ---- masks and shift ----------------------------------------------------------------------------


def test_shift_and_mask_c08() -> None:
    rows = make_rows([([5, 6], [7, 8])])
    assert rows.input_NT.tolist() == [[5, 6, 7]]
    assert rows.target_NT.tolist() == [[6, 7, 8]]
    assert rows.completion_NT.tolist() == [[False, True, True]]  # 7 is predicted at position 1, 8 at position 2


@pytest.mark.parametrize("pad", [0, 2, 15])
def test_masks_come_from_lengths_b04(pad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_room, "PAD", pad)  # pad may be the stop id, or any id of the completion
    rows = make_rows([([1, 9], [15, 27, 2]), ([1], [2, pad, pad, 4, pad, pad]), ([1, pad, pad], [pad])])
    assert rows.completion_NT.long().tolist() == [
        [0, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [0, 0, 1, 0, 0, 0],
    ]
    assert rows.attention_NT.long().tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6, [1, 1, 1, 1, 0, 0]]
    assert rows.target_NT[rows.completion_NT].tolist() == [15, 27, 2, 2, pad, pad, 4, pad, pad, pad]
    assert rows.target_NT[0].tolist() == [9, 15, 27, 2, pad, pad]


def test_ids_beyond_a_rows_length_are_not_attended_to() -> None:
    rows = make_rows([([1], [4]), ([1, 3, 3], [5, 6, 2])])
    assert rows.attention_NT.sum(1).tolist() == [2, 5]  # the last id of the widest row predicts nothing


def test_a_completion_without_ids_is_refused_b08() -> None:
    with pytest.raises(ValueError, match="at least its stop token"):
        make_completion([])


ids = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@QUICK
@given(pairs=st.lists(st.tuples(ids, ids), min_size=1, max_size=6))
def test_every_id_is_read_back(pairs: list[tuple[list[int], list[int]]]) -> None:
    rows = make_rows(pairs)
    assert [row_ids(rows, row) for row in range(len(pairs))] == pairs


# ---- groups -------------------------------------------------------------------------------------


def test_two_draws_of_one_prompt_are_two_groups() -> None:
    prompt = make_prompt("p")
    made = [make_trajectory("p", (id, STOP), reward=reward) for id, reward in ((5, 0.1), (6, 0.2), (7, 0.3), (5, 0.4))]
    first, second = make_draw(prompt, made[:2]), make_draw(prompt, made[2:])
    batch = collate([first, second], max_tokens=1000)
    (micro,) = batch.micro_batches
    assert micro.group_N.tolist() == [0, 0, 1, 1]
    assert micro.reward_N.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert micro.num_groups == batch.num_groups == 2
    assert micro.row_N.tolist() == [0, 1, 2, 0]  # the pair both draws hold goes through the model once
    assert len(distinct_rows(micro)) == 3


def test_columns_of_a_known_batch() -> None:
    draw = make_draw(
        make_prompt("p", (1, 4)),
        [
            make_trajectory("p", (5, 6, STOP), reward=0.25, ref_logp=-3.5, version=4, logps=(-0.5, -0.25, -1.0)),
            make_trajectory("p", (STOP,), reward=-2.0, ref_logp=-0.75, version=7, logps=(-0.125,)),
        ],
    )
    batch = collate([draw], max_tokens=100)
    (micro,) = batch.micro_batches
    assert micro.reward_N.tolist() == [0.25, -2.0]
    assert micro.ref_logp_N.tolist() == [-3.5, -0.75]
    assert micro.searcher_logp_N.tolist() == [-1.75, -0.125]
    assert micro.version_N.tolist() == [4, 7]
    assert micro.length_N.tolist() == [3, 1]
    assert batch.num_tokens == 2 + 3 + 2 + 1


def test_denominator_counts_groups_of_two_or_more_over_the_whole_batch() -> None:
    batch = collate(random_draws([3, 1, 2, 1, 4]), max_tokens=20)
    assert len(batch.micro_batches) > 1
    assert batch.num_groups == sum(micro.num_groups for micro in batch.micro_batches) == 3


def test_no_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="0 groups"):
        collate([], max_tokens=10)


# ---- token budget -------------------------------------------------------------------------------


def check_holds(batch: Batch, draws: Sequence[Draw], max_tokens: int) -> None:
    """Every trajectory is in the batch once, whole groups stay together, and the budget is kept."""
    seen: dict[int, list[tuple[tuple[list[int], list[int]], float]]] = {}
    for micro in batch.micro_batches:
        rows = distinct_rows(micro)
        assert len(rows) == len({str(row) for row in rows})
        for number, row, reward in zip(micro.group_N.tolist(), micro.row_N.tolist(), micro.reward_N, strict=True):
            seen.setdefault(number, []).append((rows[row], float(reward)))
        groups = set(micro.group_N.tolist())
        if len(groups) > 1:
            assert len(micro.rows) == 1
            assert padded_tokens(micro) <= max_tokens
        for piece in micro.rows:
            assert len(piece.input_NT) == 1 or piece.input_NT.shape[0] * (piece.input_NT.shape[1] + 1) <= max_tokens
        assert micro.num_groups == sum(len(draws[g].trajectories) >= 2 for g in groups)
    for one, other in itertools.combinations(batch.micro_batches, 2):
        assert not set(one.group_N.tolist()) & set(other.group_N.tolist())
    assert sorted(seen) == list(range(len(draws)))
    for number, found in seen.items():
        draw = draws[number]
        expected = [(list(draw.prompt.tokens), list(t.completion.tokens)) for t in draw.trajectories]
        assert [ids for ids, _ in found] == expected
        assert [r for _, r in found] == pytest.approx([t.reward for t in draw.trajectories])


@QUICK
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7), seed=st.integers(0, 99), budget=st.integers(1, 160))
def test_budget_is_kept_and_nothing_is_lost(sizes: list[int], seed: int, budget: int) -> None:
    draws = random_draws(sizes, seed=seed)
    check_holds(collate(draws, max_tokens=budget), draws, budget)


def test_a_group_larger_than_the_budget_is_cut_into_pieces_of_one_batch() -> None:
    draws = random_draws([5, 2], seed=1)
    batch = collate(draws, max_tokens=1)
    assert sorted(len(micro.rows) for micro in batch.micro_batches) == [2, 5]
    assert all(len(rows.input_NT) == 1 for micro in batch.micro_batches for rows in micro.rows)


def test_a_group_that_fits_exactly_is_not_cut() -> None:
    draw = make_draw(make_prompt("p", (1, 4)), [make_trajectory("p", (n, STOP)) for n in (5, 6, 7)])
    (exact,) = collate([draw], max_tokens=12).micro_batches  # three rows of four ids
    assert len(exact.rows) == 1
    (tight,) = collate([draw], max_tokens=11).micro_batches
    assert [len(rows.input_NT) for rows in tight.rows] == [2, 1]


def test_groups_share_a_micro_batch_while_they_fit() -> None:
    draws = [
        make_draw(make_prompt(str(n), (1, n)), [make_trajectory(str(n), (5, STOP)), make_trajectory(str(n), (STOP,))])
        for n in (3, 4, 6)
    ]
    whole = collate(draws, max_tokens=24)  # three groups of two rows of four ids
    assert [micro.num_groups for micro in whole.micro_batches] == [3]
    split = collate(draws, max_tokens=23)
    assert [micro.num_groups for micro in split.micro_batches] == [2, 1]


def test_long_rows_do_not_pad_short_ones() -> None:
    short = [make_draw(make_prompt(str(n), (1,)), [make_trajectory(str(n), (STOP,))] * 2) for n in (3, 4)]
    long = make_draw(make_prompt("long", (1,) * 9), [make_trajectory("long", (STOP,))] * 2)
    batch = collate([short[0], long, short[1]], max_tokens=11)
    assert [micro.group_N.unique().tolist() for micro in batch.micro_batches] == [[1], [0, 2]]


def test_masks_do_not_depend_on_the_other_rows() -> None:
    draws = random_draws([3, 4, 2], seed=4)
    for micro in collate(draws, max_tokens=10_000).micro_batches:
        lengths = torch.cat([rows.completion_NT.sum(1) for rows in micro.rows])[micro.row_N]
        assert lengths.tolist() == micro.length_N.tolist()
