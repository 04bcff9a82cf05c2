"""The frontier benchmark: its figures by hand, its verdicts, what it skips, and one tiny run from end to end."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import frontier
import frontier_page
from classifiers import save_classifier, save_policy
from frontier import Cell, Said, cells, figures, main, standardised
from frontier_page import at_kl, table, verdicts
from tba.estimates import Z_95

pytestmark = pytest.mark.usefixtures("one_thread")


class Letters:
    """A judge that counts z, and a spread that is the share of texts that are not the first."""

    def scores(self, texts: Sequence[str]) -> list[float]:
        return [float(text.count("z")) for text in texts]

    def distance(self, texts: Sequence[str]) -> float:
        return sum(text != texts[0] for text in texts) / len(texts)


def said(prompt: str, text: str, **more: Any) -> Said:
    known = {"length": 3, "before": 2, "has_ended": True, "logp": -2.0, "ref_logp": -3.5, "proxy": 0.0, "gold": 0.0,
             "human_proxy": 0.0, "human_gold": 0.0}
    return Said(prompt=prompt, text=text, **{**known, **more})


FOUR = [
    said("a", " one two", gold=2.0, human_gold=1.0, proxy=5.0, human_proxy=1.0, logp=-1.0, ref_logp=-3.0),
    said("a", " one two", gold=1.0, human_gold=1.0, proxy=3.0, human_proxy=1.0, logp=-2.0, ref_logp=-2.5, length=5),
    said("b", " one three", gold=0.0, human_gold=3.0, proxy=4.0, human_proxy=5.0, logp=-4.0, ref_logp=-4.5, before=4),
    said("b", " four", gold=5.0, human_gold=3.0, proxy=8.0, human_proxy=5.0, logp=-3.0, ref_logp=-6.0, has_ended=False),
]


# ---- figures ------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    found = figures(FOUR, Letters())
    # gold: won, tied, lost, won; proxy: won, won, lost, won
    assert (found["win_rate"], found["ties"], found["judged"], found["proxy_win_rate"]) == (0.5, 1, 4, 0.75)
    # Both prompts won one of two: their deviations from the mean cancel, and so the error of the mean is 0.
    assert found["win_low"] == found["win_high"] == 0.5
    # log-ratios 2, 0.5, 0.5, 3; of a prompt 2.5 - 3 = -0.5 and 3.5 - 3 = 0.5: sqrt(2 (0.25 + 0.25)) / 4
    assert (found["kl"], found["kl_error"]) == (pytest.approx(1.5), pytest.approx(0.25))
    assert found["perplexity"] == pytest.approx(math.exp(16.0 / 14))
    diluted = [math.exp(3.0 / 5), math.exp(2.5 / 7), math.exp(4.5 / 7), math.exp(6.0 / 5)]
    assert found["perplexity_diluted"] == pytest.approx(sum(diluted) / 4)
    # humans, once a prompt: proxy 1 and 5, mean 3, deviation 2; gold 1 and 3, mean 2, deviation 1
    assert found["proxy_z"] == pytest.approx((5.0 - 3) / 2)
    assert found["gold_z"] == pytest.approx((2.0 - 2) / 1)
    assert found["gap"] == pytest.approx(1.0)
    assert found["distinct_1"] == pytest.approx(4 / 7)  # one two one two one three four
    assert found["distinct_2"] == pytest.approx(2 / 3)  # (one two) twice, (one three)
    assert found["embedding"] == pytest.approx((0 + 0.5) / 2)
    assert (found["length"], found["ended"]) == (3.5, 0.75)


def test_the_interval_takes_completions_of_a_prompt_together() -> None:
    rows = [said(name, " x", gold=won, human_gold=0.5) for name, wins in
            (("a", (1, 1)), ("b", (0, 0)), ("c", (1, 1))) for won in wins]
    rows[-1] = said("c", " x", gold=1, human_gold=0.4, human_proxy=1.0, proxy=1.0)  # so that human scores differ
    found = figures(rows, Letters())
    # Deviations 2/3, -4/3, 2/3 by prompt: sqrt(3/2 (4/9 + 16/9 + 4/9)) / 6 = 1/3
    assert found["win_high"] - found["win_rate"] == pytest.approx(Z_95 / 3)
    assert found["win_rate"] - found["win_low"] == pytest.approx(Z_95 / 3)


def test_scores_are_put_in_the_humans_units() -> None:
    assert standardised(FOUR, "proxy") == pytest.approx(1.0)
    assert standardised([said("a", "", gold=3.0, human_gold=-1.0), said("b", "", gold=4.0, human_gold=3.0)],
                        "gold") == pytest.approx((3.5 - 1.0) / 2.0)


# ---- the grid -----------------------------------------------------------------------------------


def test_the_grid_is_whole_and_a_seed_comes_before_the_next() -> None:
    grid = cells(list(frontier.BETAS), range(4), frontier.LAGS, 3, 80)
    assert len(grid) == len({cell.key for cell in grid}) == 4 * 4 * 2 * 3
    assert [cell.seed for cell in grid] == [0] * 32 + [1] * 32 + [2] * 32
    assert [cell.lag for cell in grid[:4]] == [0, 15, 0, 15]


def fake(cell: Cell, *rest: Any) -> dict[str, Any]:
    return row(objective=cell.objective, beta=cell.beta, lag=cell.lag, seed=cell.seed, steps=cell.steps)


def row(**more: Any) -> dict[str, Any]:
    known = {"objective": "rloo", "beta": 0.1, "lag": 0, "seed": 0, "steps": 80, "win_rate": 0.5, "win_low": 0.47,
             "win_high": 0.53, "ties": 1, "judged": 60, "gap": 0.3, "youngest_age": 0}
    return {**{key: 1.0 for key, _, _ in frontier_page.COLUMNS}, **known, **more}


def test_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "judges", lambda folder: (Letters(), Letters(), 0.5))
    ran: list[Cell] = []

    def counted(cell: Cell, *rest: Any) -> dict[str, Any]:
        ran.append(cell)
        return fake(cell)

    out = tmp_path / "f.json"
    words = [str(tmp_path), "--objectives", "rloo", "--strengths", "1", "--seeds", "1", "--json", str(out)]
    main(words, run=counted)
    assert [(cell.lag, cell.steps) for cell in ran] == [(0, 0), (0, 240), (15, 240)]  # the untrained model first
    assert [r["objective"] for r in json.loads(out.read_text())] == ["none", "rloo", "rloo"]
    main([*words, "--add", str(out)], run=counted)
    assert len(ran) == 3
    main([*words[:-4], "--seeds", "2", "--json", str(out), "--add", str(out)], run=counted)
    assert [cell.seed for cell in ran[3:]] == [1, 1]
    assert len(json.loads(out.read_text())) == 5


# ---- verdicts and page --------------------------------------------------------------------------


def test_equal_kl_is_looked_up_between_neighbours() -> None:
    points = [(1.0, 0.5, 0.02), (3.0, 0.7, 0.04)]
    assert at_kl(points, 1.5) == (pytest.approx(0.55), pytest.approx(0.025))
    assert at_kl(points, 3.0) == (pytest.approx(0.7), pytest.approx(0.04))
    assert at_kl(points, 0.9) is None
    assert at_kl(points[:1], 1.0) is None


def test_verdicts_by_hand() -> None:
    def late(name: str, beta: float, kl: float, rate: float, lag: int = 15) -> dict[str, Any]:
        return row(objective=name, beta=beta, lag=lag, kl=kl, win_rate=rate, win_low=rate - 0.03, win_high=rate + 0.03)

    rows = [
        late("rloo", 0.1, 1.0, 0.5), late("rloo", 0.03, 3.0, 0.7), late("grpo", 0.1, 1.0, 0.4),
        late("grpo", 0.03, 3.0, 0.8), late("trajectory_balance", 1.0, 2.0, 0.57),
        late("trajectory_balance", 0.3, 2.5, 0.60), late("trajectory_balance", 0.1, 9.0, 0.9),
        late("trajectory_balance", 1.0, 2.1, 0.58, lag=0), late("trajectory_balance", 0.3, 2.6, 0.63, lag=0),
    ]
    lines = verdicts(rows)
    # At KL 2 rivals are at 0.6 and 0.6, 0.03 above; the interval is sqrt(2) 0.03 = 0.042. At 2.5 grpo is at 0.7.
    assert "KL 2.00: trajectory_balance 0.570, best baseline" in lines[0]
    assert lines[0].endswith("0.600, interval of the difference +-0.042: holds")
    assert lines[1].endswith("best baseline grpo 0.700, interval of the difference +-0.042: MISSED")
    assert "no baseline reaches this KL" in lines[2]
    assert lines[3] == "beta 0.3: trajectory_balance loses 3.0 points from lag 0 to 15: MISSED"
    assert lines[4] == "beta 1: trajectory_balance loses 1.0 points from lag 0 to 15: holds"
    assert verdicts([row(objective="none", steps=0)]) == []


def test_the_page_keeps_what_stands_above_and_draws_every_run(tmp_path: Path) -> None:
    rows = [row(objective="none", steps=0), *(row(lag=lag, seed=seed) for lag in (0, 15) for seed in (0, 1))]
    (tmp_path / "frontier.md").write_text(f"# Mine\n\nwords\n\n{frontier_page.MARK}\nreplaced\n")
    frontier_page.page(rows, tmp_path)
    text = (tmp_path / "frontier.md").read_text()
    assert text.startswith("# Mine\n\nwords\n")
    assert "replaced" not in text
    assert "4 runs of 80 steps." in text
    svg = (tmp_path / "frontier.svg").read_text()
    assert svg.count('r="3.5"') == 3 + 3 + 5  # a lag's two runs and the start, for each lag; all in the gap's panel
    assert table(rows).count("\n") == 1 + 3
    with pytest.raises(SystemExit, match="one number of steps"):
        table([row(), row(steps=40)])


# ---- a tiny run ---------------------------------------------------------------------------------


def test_a_tiny_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_policy(tmp_path / "language" / "final")
    save_classifier(tmp_path / "proxy" / "final")
    rng = random.Random(4)
    for name, number in (("prompts", 6), ("held_out", 4)):
        rows = [{"id": f"{name}{n}", "prompt": "".join(rng.choices("abz", k=3)), "human": "zz"} for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    recipe = yaml.safe_load(frontier.RECIPE.read_text())
    recipe["search"] |= {"num_samples": 3, "max_new_tokens": 4, "batch_prompts": 2}
    recipe["trainer"] |= {"groups_per_step": 2, "group_size": 3}
    (tmp_path / "frontier.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(frontier, "RECIPE", tmp_path / "frontier.yaml")
    cell = Cell(objective="trajectory_balance", beta=0.3, lag=3, seed=1, steps=6)
    found = frontier.run(cell, tmp_path, Letters(), Letters())
    assert (found["judged"], found["youngest_age"]) == (4 * frontier.SAMPLES, 3)
    assert found["age"] == pytest.approx((0 + 1 + 2 + 3 + 3 + 3) / 6)
    start = frontier.run(Cell(objective="trajectory_balance", beta=0.3, lag=0, seed=1, steps=0), tmp_path, Letters(),
                         Letters())
    assert start["kl"] == pytest.approx(0.0, abs=1e-5)
    assert found["kl"] != start["kl"]
    assert start["youngest_age"] is None
