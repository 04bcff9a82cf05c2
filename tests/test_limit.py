"""The benchmark of the machine's limit: its count of products, and that each part measures something."""

from __future__ import annotations

import pytest

from limit import logps_of, memory, products, rate_of, sampling, training

SHAPE = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
         "intermediate_size": 40, "vocab_size": 70}


def test_products_are_counted_as_by_hand() -> None:
    # linear parts of a layer: queries and output 2 x 16 x 16, keys and values 2 x 16 x 8, the rest 3 x 16 x 40: 2688
    # attention over 5 places: 2 x 5 x 16 = 160; two layers, 11 places: 2 x 11 x 2848 = 62,656
    # head: 7 x 16 x 70 = 7,840
    assert products(SHAPE, places=11, attended=5, heads=7, passes=3) == 3 * (62_656 + 7_840)


def test_a_rate_is_of_products_per_second() -> None:
    assert rate_of("float32", rows=64, width=32, out=32) > 1e7


@pytest.mark.parametrize(("rank", "autocast"), [(0, "none"), (4, "bfloat16")])
def test_a_step_is_measured_beside_its_limit(rank: int, autocast: str) -> None:
    slow, fast = (
        training(SHAPE, tokens=80, length=4, rank=rank, autocast=autocast, rate=rate) for rate in (1e6, 1e9)
    )
    assert slow["tokens"] == fast["tokens"] == 80  # one group of 4, of 16 ids of prompt and 4 of completion
    assert slow["limit_s"] == pytest.approx(1000 * fast["limit_s"])
    # the prompt once and 3 of each completion's ids are read, 4 of each are given logits
    counted = products(SHAPE, places=4 * 3 + 16, attended=10, heads=16, passes=2 if rank else 3)
    assert fast["limit_s"] == pytest.approx(counted / 1e9)
    assert fast["share"] == pytest.approx(fast["limit_s"] / fast["step_s"])
    assert 0 < fast["model_share"] <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_is_measured_beside_its_limit(dtype: str) -> None:
    found = sampling(SHAPE, prompts=2, length=5, dtype=dtype, rate=1e9)
    assert 16 <= found["tokens"] <= 80
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["search_s"])


def test_memory_in_pieces_is_below_that_of_all_logits() -> None:
    found = memory(places=1500, vocabulary=20_000, width=8)  # 120 MB of logits; a piece is 64 MiB
    assert found["pieces_mib"] < found["all_mib"]
    assert found["ratio"] == pytest.approx(found["pieces_mib"] / found["all_mib"])


def test_both_ways_of_memory_compute_something() -> None:
    for way in ("nothing", "pieces", "all"):
        logps_of(way, 5, 40, 3)
