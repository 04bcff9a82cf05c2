"""Ranks that share a trainer: equal to one, whatever their groups; and one layout of what they save."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file
from torch import Tensor

import tba.policy
from ranks_of_a_test import CASES, Company, company, late, saved, tensors_of, train, train_some
from support import make_draw, make_prompt, make_settings, make_trajectory, random_draws
from tba import metrics as m
from tba.batch import collate, dealt
from tba.cluster.ranks import LATE, room_for
from tba.jobs import arithmetic_of
from tba.sharded import RankMissingError, Seat, Sharded, hold_store, reach_store, share_of
from tba.tensor_file import write_tensors

STEPS, QUICK_STEPS = 20, 8
QUICK = ("full, tied", "cut", "adapter, moving reference", "few groups")
"""Cases that every test run has; they touch every collective."""
SECONDS = {m.STEP_SECONDS, m.RESCORE_SECONDS, m.RECORD_SECONDS}


@pytest.fixture(autouse=True)
def _usual_worth() -> Iterator[None]:
    before = tba.policy.WORTH
    yield
    tba.policy.WORTH = before


@pytest.fixture(scope="module")
def three() -> Iterator[Company]:
    with company(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Company]:
    with company(2) as ranks:
        yield ranks


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Metrics of a step that are numbers, without times; NaN for those that there are not."""
    kept = {name: value for name, value in record.items() if name not in {*SECONDS, m.AGE_HISTOGRAM}}
    return {name: math.nan if value is None else value for name, value in kept.items()}


def furthest(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Largest difference of tensors, relative to the norm of each."""
    assert ours.keys() == theirs.keys()
    found = []
    for name in ours:
        gap, size = np.linalg.norm(ours[name] - theirs[name]), np.linalg.norm(theirs[name])
        found.append(float(gap / size) if size else math.inf if gap else 0.0)
    return max(found)


def check_equal(ranks: Company, names: tuple[str, ...], steps: int) -> None:
    alone = train_some(None, names, steps)
    first, *others = ranks.do(train_some, names, steps)
    for name in names:
        ours, theirs = first[name]["metrics"], alone[name]["metrics"]
        for mine, its in zip(ours, theirs, strict=True):
            assert numbers(mine) == pytest.approx(numbers(its), rel=1e-5, abs=2e-6, nan_ok=True), name
            for key in (m.LOSS, m.GRAD_NORM):
                assert mine[key] == pytest.approx(its[key], rel=1e-5), name
            assert mine[m.AGE_HISTOGRAM] == its[m.AGE_HISTOGRAM]
        moved = furthest(alone[name]["tensors"], alone[name]["start"])
        found = furthest(first[name]["tensors"], alone[name]["tensors"])
        print(f"{name}: moved {moved:.1e}, ranks differ by {found:.1e}")
        assert found <= 1e-5, name
        assert moved > 100 * found, name
        for other in others:
            said = [(record[m.LOSS], record[m.GRAD_NORM], record[m.VERSION]) for record in other[name]["metrics"]]
            assert said == [(record[m.LOSS], record[m.GRAD_NORM], record[m.VERSION]) for record in ours]


# ---- a step ---------------------------------------------------------------------------------------


def test_three_ranks_train_as_one_does(three: Company) -> None:
    check_equal(three, QUICK, QUICK_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("count", ["two", "three"])
def test_ranks_train_as_one_does_in_every_way(count: str, request: pytest.FixtureRequest) -> None:
    check_equal(request.getfixturevalue(count), tuple(CASES), STEPS)


def test_a_bad_step_is_skipped_by_all_and_no_groups_move_nothing(three: Company) -> None:
    case = {"trainer": {"weight_decay": 0.1}, "draws": ["good", "bad", "none", "good"]}
    alone = train(None, case, range(4))
    first, second, _ = three.do(train, case, range(4))
    assert [record[m.VERSION] for record in second["metrics"]] == [1, 1, 2, 3]
    assert [record[m.SKIPPED] for record in first["metrics"]] == [0, 1, 1, 1]
    assert not math.isfinite(first["metrics"][1][m.LOSS])
    assert (first["metrics"][2][m.LOSS], first["metrics"][2][m.GRAD_NORM]) == (0.0, 0.0)
    assert furthest(first["tensors"], alone["tensors"]) <= 1e-5


# ---- what is saved --------------------------------------------------------------------------------


def same_files(one: Path, other: Path) -> None:
    ours, theirs = load_file(one / "trainer.safetensors"), load_file(other / "trainer.safetensors")
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optimizer.exp_avg.") for name in ours)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((one / "trainer.json").read_text()) == json.loads((other / "trainer.json").read_text())


@pytest.mark.parametrize("name", [
    "full, tied", "adapter, moving reference", pytest.param("learned log Z", marks=pytest.mark.slow),
])
def test_any_number_of_ranks_goes_on_from_what_any_other_saved(
    name: str, two: Company, three: Company, tmp_path: Path
) -> None:
    case, folders = CASES[name], [tmp_path / str(n) for n in range(6)]
    for folder in folders:
        folder.mkdir()
    paths = [str(folder) for folder in folders]
    saved(None, case, range(5), None, paths[0])
    two.do(saved, case, [], paths[0], paths[1])  # 1 -> 2 -> 3 -> 1, and what is saved is what was loaded
    three.do(saved, case, [], paths[1], paths[2])
    saved(None, case, [], paths[2], paths[3])
    for folder in folders[1:4]:
        same_files(folders[0], folder)
    three.do(saved, case, range(5, 9), paths[2], paths[4])
    saved(None, case, range(5, 9), paths[3], paths[5])
    ours, theirs = (tensors_of(load_file(folder / "trainer.safetensors")) for folder in folders[4:])
    assert furthest(ours, theirs) <= 1e-5
    assert furthest(ours, tensors_of(load_file(folders[3] / "trainer.safetensors"))) > 1e-3


# ---- who gets what --------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_groups_are_dealt_whole_and_by_tokens(sizes: list[int], ranks: int, seed: int) -> None:
    draws = random_draws(sizes, seed=seed)
    shares = dealt(draws, ranks)
    assert sorted(number for share in shares for number in share) == list(range(len(draws)))
    tokens = [
        len(draw.prompt.tokens) * len({t.completion.tokens for t in draw.trajectories})
        + sum(map(len, {t.completion.tokens for t in draw.trajectories}))
        for draw in draws
    ]
    loads = [sum(tokens[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens)
    whole, batch = collate(draws, max_tokens=30), collate(draws, max_tokens=30, ranks=ranks)
    assert (batch.num_groups, batch.num_tokens) == (whole.num_groups, whole.num_tokens)
    for rank, share in enumerate(shares):
        own = share_of(batch, rank)
        assert own.num_groups == batch.num_groups
        assert sorted({n for micro in own.micro_batches for n in micro.group_N.tolist()}) == sorted(share)


def test_groups_are_dealt_by_hand() -> None:
    """Tokens 2 x (3 + 6) = 18, 2 x (3 + 2) = 10, 9 and 8, a completion that comes twice counted once."""
    def group(*lengths: int) -> Any:
        prompt = make_prompt("p", (1, 3, 4))
        made = [make_trajectory("p", [5 + n % 3, *[4] * (length - 1)]) for n, length in enumerate(lengths)]
        return make_draw(prompt, made)

    twice = make_draw(make_prompt("p", (1, 3, 4)), [make_trajectory("p", [5, 6, 7, 8, 9])] * 4)
    draws = [twice, group(2, 2), group(6, 6), group(6)]
    assert dealt(draws, 2) == [[2, 0], [1, 3]]  # 18 + 8; 10 + 9
    assert dealt(draws, 3) == [[2], [1], [3, 0]]


# ---- words ----------------------------------------------------------------------------------------


def test_ranks_hear_their_share_and_who_holds_the_store_may_be_silent_for_long() -> None:
    store = hold_store("127.0.0.1")
    seats = [Seat(rank=r, count=2, host="127.0.0.1", port=store.port, start_limit_s=60, limit_s=0.2) for r in (0, 1)]
    stores = [reach_store(seat) for seat in seats]
    first, second = (silent(seat, reached) for seat, reached in zip(seats, stores, strict=True))
    batch, heard = collate(random_draws((3, 2, 2)), max_tokens=20, ranks=2), []
    listening = threading.Thread(target=lambda: heard.extend(second.hear() for _ in range(2)), daemon=True)
    listening.start()
    time.sleep(0.5)  # longer than the limit, in which nothing is said
    first.tell("step", batch, 0.25)
    first.tell("save", "there")
    listening.join(60)
    (word, (told, kl)), last = heard
    assert (word, kl, last) == ("step", 0.25, ("save", ["there"]))
    assert [micro.rank for micro in told.micro_batches] == [1] * len(told.micro_batches)
    assert told.num_groups == batch.num_groups
    assert store.num_keys() <= 1  # what was heard is gone; the store counts itself


def test_who_hears_ends_with_the_store() -> None:
    store = hold_store("127.0.0.1")
    seat = Seat(rank=1, count=2, host="127.0.0.1", port=store.port, start_limit_s=60, limit_s=30)
    second = silent(seat, reach_store(seat))
    del store
    with pytest.raises(dist.DistError):
        second.hear()


def test_a_rank_that_does_not_come_is_named() -> None:
    store = hold_store("127.0.0.1")
    seat = Seat(rank=0, count=3, host="127.0.0.1", port=store.port, start_limit_s=0.3, limit_s=1)
    store.set("here/1", "")
    with pytest.raises(RankMissingError, match=r"trainer rank 2 of 3 did not start within 0\.3 s.*trainer\.processes"):
        Sharded(reach_store(seat), seat)


def silent(seat: Seat, store: Any) -> Sharded:
    """Ranks that have a store and no group: words need none."""
    made = object.__new__(Sharded)
    made.rank, made.count, made._seat, made._store, made._words = seat.rank, seat.count, seat, store, 0
    store.set_timeout(timedelta(seconds=60))
    return made


# ---- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "said"), [
    ({"mode": "lockstep", "trainer": {"processes": 2}}, "trainer.processes = 2: mode = lockstep is one process"),
    ({"trainer": {"processes": 3, "groups_per_step": 2}}, "more than the 2 groups of a batch"),
    ({"trainer": {"processes": 2}, "resources": {"trainer": {"gpus": 0.5}}}, "has ranks share a GPU"),
    ({"trainer": {"processes": 2}, "policy": {"device": "cuda:1"}}, "is one device, and trainer.processes = 2 ranks"),
])
def test_ranks_without_meaning_are_refused_by_name(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_settings(**words)


# ---- who is at fault ------------------------------------------------------------------------------


def test_who_waits_for_a_rank_gives_up_in_time_and_has_begun_more() -> None:
    with company(3, limit_s=2.0) as ranks:
        said = ranks.do(late, 1, 6.0)
    assert LATE in said[0][0] + said[2][0]  # the other of the two may hear that this one gave up
    assert said[1][1] < said[0][1] == said[2][1]


# ---- a file written piece by piece ----------------------------------------------------------------


def test_a_file_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8), "b.wide": torch.randn(2, 3).t(), "a": torch.tensor(7.5),
        "flags": torch.tensor([True, False]), "long": torch.tensor([[2**40]]), "half": torch.ones(3).bfloat16(),
        "none": torch.zeros(0, 4),
    }
    given: list[Tensor] = []
    write_tensors(tmp_path / "ours", tensors, lambda tensor: given.append(tensor) or tensor)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    ours, theirs = (load_torch(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]) for n in ours)
    assert [len(given), *given[0].shape] == [7, 1, 1]  # each once, those of eight bytes first


def test_check_tells_of_ranks() -> None:
    told = arithmetic_of(make_settings(trainer={"processes": 3, "groups_per_step": 8}))
    assert told["ranks"].startswith("3: about 2.67 groups of a batch each")
    assert "ranks" not in arithmetic_of(make_settings())


@pytest.mark.parametrize(("needs", "room"), [
    ({"CPU": 4.0, "GPU": 1.0}, 3),  # two on the first, whose cores are for three; one on the second
    ({"CPU": 0.0, "GPU": 0.0}, 15),  # whatever a node has, up to as many as are asked for
    ({"CPU": 13.0, "GPU": 0.0}, 0),
])
def test_room_for_ranks_is_counted_over_nodes(needs: dict[str, float], room: int) -> None:
    assert room_for(needs, [{"CPU": 12.0, "GPU": 2.0}, {"CPU": 7.0, "GPU": 4.0}, {"CPU": 2.0}], 5) == room
