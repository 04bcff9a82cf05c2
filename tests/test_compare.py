"""Runs side by side: whatever is in them, text stays text, numbers stand where they belong, mistakes are named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tba.cli import main
from tba.report import compare, drawing
from tba.report.drawing import Dot, Trace
from test_report import HOSTILE, PLAIN, Page, make_run


def run_of(path: Path, final: dict[str, Any], *, beta: float = 0.3, steps: int = 7) -> Path:
    """A run directory with what a comparison reads."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump({"seed": 5, "objective": {"name": "rloo", "beta": beta}}))
    (path / "summary.json").write_text(json.dumps({
        "run": str(path), "status": "done", "steps": steps, "wall_s": 12.5, "start": {"reward": 0.125}, "final": final,
    }))
    lines = [{"step": s, "train/reward": s / 8, "train/kl": s / 4} for s in range(1, steps + 1)]
    lines += [{"eval/version": v, "reward": 0.125 + v / 16, "kl": v / 2} for v in (0, 4)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [
        run_of(tmp_path / "first", {"reward": 0.375, "kl": 2.5, "win_rate": 0.625, "win_rate_low": 0.5,
                                    "win_rate_high": 0.75}),
        run_of(tmp_path / "second", {"reward": 0.875, "kl": 4.5}, beta=0.07, steps=9),
    ]


# ---- figures ------------------------------------------------------------------------------------


def test_the_table_of_two_runs(two: list[Path]) -> None:
    sides = compare.read_sides(two)
    assert compare.known_metrics(sides) == ["reward", "kl", "win_rate", "win_rate_low", "win_rate_high"]
    assert compare.metric_of(sides, None) == ("win_rate", [])
    head, first, second = compare.table(sides, "win_rate")
    assert head == ["run", "status", "objective", "beta", "seed", "steps", "time", "win_rate", "kl", "reward"]
    assert first == ["first", "done", "rloo", "0.3", "5", "7", "12.5 s", "0.6250", "2.500", "0.3750"]
    assert second == ["second", "done", "rloo", "0.07", "5", "9", "12.5 s", "-", "4.500", "0.8750"]


@pytest.mark.parametrize(("has", "by"), [
    ({"reward": 0.1, "pass@1": 0.2, "attack_success": 0.3}, "attack_success"),
    ({"reward": 0.1, "pass@1": 0.2}, "pass@1"), ({"reward": 0.1, "length": 4.0}, "reward"),
])
def test_runs_are_compared_by_what_their_task_is_judged_by(has: dict[str, float], by: str, tmp_path: Path) -> None:
    sides = compare.read_sides([run_of(tmp_path / name, has) for name in "ab"])
    assert compare.metric_of(sides, None) == (by, [])


def test_diversity_is_drawn_where_a_run_has_it(two: list[Path]) -> None:
    titles = [drawn.title for drawn in compare.drawings(compare.read_sides(two), "reward")]
    assert not any("Diversity" in title for title in titles)
    with (two[1] / "metrics.jsonl").open("a") as file:
        for version, value in ((0, 3.5), (4, 2.25)):
            file.write(json.dumps({"eval/version": version, "effective_answers": value, "self_bleu": value / 8}) + "\n")
    sides = compare.read_sides(two)
    assert "effective_answers" in compare.table(sides, "reward")[0]
    drawn = {drawn.title: drawn for drawn in compare.drawings(sides, "reward")}
    assert {t for t in drawn if "Diversity" in t} == {"Diversity: effective_answers", "Diversity: self_bleu"}
    (trace,) = drawn["Diversity: effective_answers"].traces
    assert trace.run == 1
    assert "Diversity: self_bleu" not in [d.title for d in compare.drawings(sides, "self_bleu")]  # drawn first


def test_a_run_without_summary_is_told_by_its_evaluations(two: list[Path]) -> None:
    (two[1] / "summary.json").unlink()
    (two[1] / "config.yaml").unlink()
    row = compare.table(compare.read_sides(two), "reward")[2]
    assert row == ["second", "not finished", "-", "-", "-", "9", "-", "0.3750", "2"]  # version 4: 0.125 + 4/16, 4/2


def test_the_frontier_and_its_intervals(two: list[Path]) -> None:
    by_reward = compare.drawings(compare.read_sides(two), "reward")[0]
    assert [trace.run for trace in by_reward.traces] == [0, 1]
    (x_0, y_0), (x_1, y_1) = by_reward.traces[0].dots[0], by_reward.traces[1].dots[0]
    assert x_0 < x_1  # more KL lies on the right
    assert y_0 > y_1  # more reward lies higher, where the drawing's own units are smaller
    by_wins = compare.drawings(compare.read_sides(two), "win_rate")[0]
    (only,) = by_wins.traces
    (_, y), (_, top, bottom) = only.dots[0], only.whiskers[0]
    assert top < y < bottom
    assert y - top == pytest.approx(bottom - y, abs=0.11)


def test_intervals_are_found_in_both_forms() -> None:
    assert compare.interval({"a_interval": [0.1, 0.4]}, "a") == (0.1, 0.4)
    assert compare.interval({"a_low": 0.2, "a_high": 0.3}, "a") == (0.2, 0.3)
    for odd in ({}, {"a_interval": [0.1]}, {"a_interval": "ab"}, {"a_interval": [0.1, None]}, {"a_low": 1}):
        assert compare.interval(odd, "a") == (None, None)


def test_places_of_a_drawing() -> None:
    made = drawing.drawing("i", "t", "a", "x", "y", [
        Trace(run=3, dots=[Dot(x=0, y=10), Dot(x=10, y=20)], is_line=True),
        Trace(run=4, dots=[Dot(x=5, y=15)], is_line=False), Trace(run=5, dots=[], is_line=True),
    ])
    # The axes reach from -0.5 to 10.5 and from 9.5 to 20.5; the frame is 350 wide and 208 high, 58 and 12 in.
    places = [(58 + 350 * (x + 0.5) / 11, 12 + 208 * (20.5 - y) / 11) for x, y in ((0, 10), (10, 20), (5, 15))]
    assert made.traces[0].path == " ".join(f"{round(x, 1)},{round(y, 1)}" for x, y in places[:2])
    assert list(made.traces[0].dots) == []
    assert made.traces[1].dots[0] == pytest.approx(places[2], abs=0.051)
    assert [tick.label for tick in made.x_ticks] == ["0", "2", "4", "6", "8", "10"]
    assert [trace.run for trace in made.traces] == [3, 4]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 9e5), (0.4999, 0.5001), (1e-9, 2e-9), (-7.0, -6.0)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = drawing.ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-12 <= at <= high + 1e-12 for at in found)


def test_one_value_has_room_around_it() -> None:
    for values in ([0.0], [3.0, 3.0], [-2.0], [1e-12]):
        low, high = drawing.limits(values)
        assert low < min(values) <= max(values) < high


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    lines = [{"step": s, "train/reward": 1.0} for s in range(1, 1002)]
    record = compare.RunRecord(name="", summary={}, settings_text="", settings={}, steps=lines, evaluations=[],
                               ledger={}, answered=[], notes=[])
    dots = compare._course(compare._side("x", record), "train/reward", "step")
    assert len(dots) <= compare.MAX_POINTS + 1
    assert (dots[0].x, dots[-1].x) == (1, 1001)


def test_labels_are_as_short_as_tells_them_apart() -> None:
    assert compare.labels([Path("/r/a/x"), Path("/r/b/y")]) == ["x", "y"]
    assert compare.labels([Path("/r/a/x"), Path("/r/b/x")]) == ["a/x", "b/x"]


# ---- page ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", HOSTILE)
def test_text_of_a_run_stays_text(word: str, tmp_path: Path) -> None:
    pages = {}
    for kind, said in (("plain", PLAIN), ("hostile", word)):
        runs = [make_run(tmp_path / kind / name, said) for name in ("a", "b")]
        for run in runs:
            config = yaml.safe_load((run / "config.yaml").read_text()) or {}
            config["objective"] = {"name": said.encode("utf-8", "replace").decode()}
            (run / "config.yaml").write_text(yaml.safe_dump(config))
            summary = json.loads((run / "summary.json").read_text())
            summary["final"] = {**summary.get("final", {}), said: 0.5}
            (run / "summary.json").write_text(json.dumps(summary))
        assert main(["compare", *map(str, runs), "--html", str(tmp_path / f"{kind}.html")]) == 0
        pages[kind] = Page(tmp_path / f"{kind}.html")
    assert pages["hostile"].elements == pages["plain"].elements
    assert not pages["hostile"].scripts
    assert set(pages["hostile"].urls) == {"data:,", "#table", "#drawings", "#meanings"}
    assert "default-src 'none'" in pages["hostile"].source


def test_the_page_holds_every_run_and_number(two: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "c.html"
    assert main(["compare", *map(str, two), "--metric", "reward", "--html", str(out)]) == 0
    page = Page(out)
    for said in ("first", "second", "0.8750", "0.3750", "reward against KL", "Compared by reward", "train/kl"):
        assert said in page.text
    assert len(re.findall(r"<circle", page.source)) == 2
    before = out.read_bytes()
    assert main(["compare", *map(str, two), "--metric", "reward", "--html", str(out)]) == 0
    assert out.read_bytes() == before


def test_runs_that_have_nothing_can_be_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("{broken\n")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "c.html")]) == 0
    assert "No run has both numbers." in Page(tmp_path / "c.html").text


# ---- mistakes -----------------------------------------------------------------------------------


def test_mistakes_are_named_all_at_once(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("my own page")
    assert main(["compare", str(two[0]), str(two[0]), str(tmp_path / "none"), "--html", str(mine)]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 3
    for part in ("is given twice", "is no run directory", "was not written by tba compare"):
        assert part in said
    assert mine.read_text() == "my own page"


@pytest.mark.parametrize(("words", "said"), [
    (["--metric", "wim_rate"], "did you mean win_rate? there are: reward, kl, win_rate"),
    (["--html", "no/such/folder/c.html"], "must be a file in a folder that there is"),
])  # fmt: skip
def test_a_wrong_option_is_one_line(
    two: list[Path], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, two), *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_one_run_is_nothing_to_compare(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(two[0])]) == 2
    assert "1 run is nothing to compare; give two or more, or: tba report RUN" in capsys.readouterr().err
