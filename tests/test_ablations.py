"""The ablation grid: what its cells are, and the table, the figure and the page that its runs give."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import ablations
import ablations_page
from tba import metrics as m
from tba.cli import main
from tba.reading import read_settings

DOCS = Path(__file__).parents[1] / "docs"
OTHERS = [name for name in ablations.CELLS if name != ablations.CENTRE]


def settings_of(name: str) -> Any:
    return read_settings(ablations.RECIPE, ablations.words_of(ablations.CELLS[name], 0, 400, "lockstep"))


def a_row(cell: str, seed: int, **figures: Any) -> dict[str, Any]:
    """A finished run, made up."""
    given = dict.fromkeys(ablations.FIGURES, 0.5) | figures
    return {
        "cell": cell, "seed": seed, "steps": 60, "mode": "lockstep", "status": "done", "samples": 4,
        "overrides": list(ablations.CELLS[cell].overrides), "wait_share": 0.25, "seconds": 31.4, "age": 3.25,
        "flat": 0.5, "start": dict.fromkeys(ablations.FIGURES, 0.125), **given,
    }


MADE_UP = [
    a_row("k 8", 0, **{"pass@1": 0.9, "kl": 6.0}), a_row("k 8", 1, **{"pass@1": 0.8, "kl": 7.0}),
    a_row("recipe", 0, **{"pass@1": 0.93, "kl": 5.0}), a_row("recipe", 1, **{"pass@1": 0.96, "kl": 5.5}),
    a_row("m 0", 0, **{"pass@1": 0.7, "kl": 4.0}),
    {"cell": "m 0", "seed": 1, "steps": 60, "mode": "lockstep", "status": "failed", "message": "x", "steps_done": 7,
     "overrides": list(ablations.CELLS["m 0"].overrides)},
]


# ---- the cells -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ablations.CELLS)
def test_every_cell_passes_tba_check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ablations.words_of(ablations.CELLS[name], 2, 400, "lockstep")
    assert main(["check", ablations.RECIPE, *words]) == 0
    assert "512 trajectories a step" in capsys.readouterr().out


def test_cells_are_distinct_few_and_never_the_recipe_again() -> None:
    cells = ablations.CELLS.values()
    trees = [json.dumps(settings_of(cell.name).resolved(), sort_keys=True) for cell in cells]
    assert len(set(trees)) == len(cells) == 16
    assert [sum(cell.knob == knob for cell in cells) for knob in ablations_page.KNOBS] == [3] * 5
    assert all(cell.value != ablations_page.KNOBS[cell.knob][1] for cell in cells if cell.knob != ablations.CENTRE)
    assert [ablations_page.split(cell.name) for cell in cells] == [(cell.knob, cell.value) for cell in cells]


def test_what_the_page_takes_for_the_recipe_is_in_the_recipe() -> None:
    found = settings_of(ablations.CENTRE)
    own = {knob: value for knob, (_, value) in ablations_page.KNOBS.items()}
    assert own == {"m": found.buffer.mix["recent"], "k": found.trainer.sync_every, "K": found.trainer.group_size,
                   "beta": found.objective.beta, "T": None}
    assert found.recent_age == ablations.RECENT_AGE


@pytest.mark.parametrize("name", OTHERS)
def test_a_cell_changes_its_knob_and_what_is_said_to_go_with_it(name: str) -> None:
    cell, found, recipe = ablations.CELLS[name], settings_of(name), settings_of(ablations.CENTRE)
    knob = {"m": lambda s: s.buffer.mix["recent"], "k": lambda s: s.trainer.sync_every,
            "K": lambda s: s.trainer.group_size, "beta": lambda s: s.objective.beta,
            "T": lambda s: s.buffer.reward_temperature}[cell.knob]
    assert knob(found) == cell.value
    goes_with = {
        "m": {"buffer.mix"}, "k": {"trainer.sync_every", "buffer.recent_age"}, "beta": {"objective.beta"},
        "K": {"trainer.group_size", "trainer.groups_per_step", "search.num_samples", "search.batch_prompts"},
        "T": {"buffer.reward_temperature", "buffer.mix", "buffer.reuse", "search.num_samples", "search.batch_prompts"},
    }[cell.knob]
    trees = (found.resolved(), recipe.resolved())
    changed = {f"{section}.{key}" for section, keys in trees[0].items() if isinstance(keys, dict)
               for key in keys if keys[key] != trees[1][section][key]}
    assert changed <= goes_with


def test_the_window_of_recent_grows_with_k_as_in_the_paper() -> None:
    found = {name: settings_of(f"k {name}").recent_age for name in (1, 8, 20)}
    assert found == {1: 7, 8: 15, 20: 39}  # 2 k - 1, and never less than the recipe's


@pytest.mark.parametrize("name", ablations.CELLS)
def test_every_cell_searches_trains_and_reuses_as_much_as_the_recipe(name: str) -> None:
    found = settings_of(name)
    # 64 groups x 8 = 512 trajectories a step; 64 prompts x 8 completions for two steps = 256 a step; 512 / 256 = 2.
    assert found.groups_per_step * found.trainer.group_size == 512
    assert found.prompts_per_round * found.search.num_samples == 256 * found.trainer.sync_every
    assert ablations.group_count(ablations.CELLS[name]) == found.groups_per_step
    shares = found.buffer.shares
    assert sum(shares.values()) == pytest.approx(1.0)
    if name[0] in "mk":
        assert shares["reward"] == shares["uniform"]


def test_only_the_cells_of_the_temperature_have_pools_larger_than_a_group() -> None:
    # 21^3 operands x 4 pairs of signs - 500 held out = 36,544 prompts, of which the recipe visits 400 x 32 = 12,800:
    # each at most once. A pool is one delivery then; where it is one group too, any temperature draws all of it.
    assert 21**3 * 4 - 500 == 36_544 >= 400 * 32
    for name in ablations.CELLS:
        found = settings_of(name)
        over = found.search.num_samples / found.trainer.group_size
        assert over == (2 if name.startswith("T ") else 1)


# ---- runs and their JSON -------------------------------------------------------------------------


def test_figures_of_a_run_are_the_last_evaluation_and_means_over_steps() -> None:
    final = {name: number for number, name in enumerate(ablations.FIGURES, 1)} | {m.SAMPLES: 4, "more": 9}
    summary = {"status": "done", "final": final, "start": final, "trainer": {"wait_share": 0.375}, "wall_s": 40.5}
    steps = [{m.AGE_MEAN: 1.0, m.FLAT_GROUPS: 3}, {m.AGE_MEAN: 4.0, m.FLAT_GROUPS: 6}]
    found = ablations.outcome(summary, steps, 12)
    assert (found["age"], found["flat"]) == (2.5, 0.375)  # (1 + 4) / 2 and (3 + 6) / (2 x 12)
    assert (found[m.PASS_1], found[m.DISTINCT], found["wait_share"], found["seconds"]) == (1, 6, 0.375, 40.5)
    failed = ablations.outcome({"status": "failed", "message": "no", "steps": 7, "final": {}}, [], 12)
    assert failed == {"status": "failed", "message": "no", "steps_done": 7}


def test_earlier_runs_are_kept_and_those_of_a_cell_that_changed_are_refused(tmp_path: Path) -> None:
    ablations.write(MADE_UP, tmp_path / "a.json")
    assert ablations.kept([tmp_path / "a.json"]) == MADE_UP
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    ablations.write([{**MADE_UP[0], "overrides": ["trainer.sync_every=9"]}], tmp_path / "a.json")
    with pytest.raises(SystemExit, match=r"'k 8', seed 0.*sync_every=9.*remove it"):
        ablations.kept([tmp_path / "a.json"])


def test_a_grid_goes_on_where_it_stopped(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    def interrupted_at_the_third(cell: ablations.Cell, seed: int, steps: int, mode: str) -> dict[str, Any]:
        assert (steps, mode) == (60, "lockstep")
        asked.append((cell.name, seed))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return a_row(cell.name, seed)

    path = tmp_path / "grid.json"
    words = ["--knobs", "recipe", "beta", "--seeds", "0", "4", "--steps", "60", "--json", str(path)]
    with pytest.raises(KeyboardInterrupt):
        ablations.main(words, interrupted_at_the_third)
    assert [(row["cell"], row["seed"]) for row in json.loads(path.read_text("utf-8"))] == asked[:2]
    ablations.main([*words, "--add", str(path)], interrupted_at_the_third)
    names = ["recipe", "beta 0.002", "beta 0.006", "beta 0.06"]
    assert asked[:2] + asked[3:] == [(name, seed) for seed in (0, 4) for name in names]
    assert len(json.loads(path.read_text("utf-8"))) == 8


@pytest.mark.slow
def test_a_run_of_one_round_gives_every_figure_of_the_table() -> None:
    row = ablations.run(ablations.CELLS["k 20"], 3, 20, "lockstep")
    assert row["status"] == "done"
    assert row["age"] == pytest.approx(9.5)  # nothing but round 0, consumed at ages 0 to 19
    assert 0 < row["flat"] < 1
    assert row[m.PASS_K] >= row[m.PASS_1] > row["start"][m.PASS_1]
    assert json.loads(json.dumps(row)) == row
    assert ablations_page.table([row]).count("\n") == 2


# ---- the page ------------------------------------------------------------------------------------


def test_the_table_has_means_and_ends_the_recipe_first_and_failures_counted() -> None:
    # (0.93 + 0.96) / 2 = 0.945; (5 + 5.5) / 2 = 5.25; (0.9 + 0.8) / 2 = 0.85; (6 + 7) / 2 = 6.5
    lines = ablations_page.table(MADE_UP).splitlines()
    assert lines[2:] == [
        "| recipe | - | 2 | 0.945 (0.930 to 0.960) | 0.500 | 0.500 | 5.25 (5.00 to 5.50) | 0.50 | 0.500 | 3.2 | 0.50 "
        "| 0.25 | 31 |",
        "| m | 0 | 2, 1 failed | 0.700 | 0.500 | 0.500 | 4.00 | 0.50 | 0.500 | 3.2 | 0.50 | 0.25 | 31 |",
        "| k | 8 | 2 | 0.850 (0.800 to 0.900) | 0.500 | 0.500 | 6.50 (6.00 to 7.00) | 0.50 | 0.500 | 3.2 | 0.50 "
        "| 0.25 | 31 |",
    ]
    assert len({line.count("|") for line in lines}) == 1
    assert "n/a" in ablations_page.table([MADE_UP[-1]])


def test_runs_of_two_kinds_make_no_table() -> None:
    with pytest.raises(SystemExit, match=r"one mode.*'async', 60.*'lockstep', 60"):
        ablations_page.table([*MADE_UP, {**MADE_UP[0], "mode": "async"}])


def test_the_page_keeps_what_is_written_by_hand_and_is_a_function_of_the_runs(tmp_path: Path) -> None:
    (tmp_path / "ablations.md").write_text("# By hand\n\nWords.\n", "utf-8")
    pages = []
    for found in (MADE_UP, MADE_UP[::-1]):
        ablations_page.page(found, tmp_path)
        pages.append([(tmp_path / name).read_text("utf-8") for name in ("ablations.md", "ablations.svg")])
    assert pages[0] == pages[1]
    text = pages[0][0]
    assert text.startswith("# By hand\n\nWords.\n\n<!--")
    assert text.count("| k | 8 |") == 1
    assert "6 runs, mode lockstep, 60 steps" in text
    assert "pass@1 0.125" in text


def test_the_figure_has_a_dot_a_seed_and_its_colours_from_the_page() -> None:
    drawn = ablations_page.figure(MADE_UP)
    root = ElementTree.fromstring(drawn)
    # Knobs m and k, three rows: in each, one run of m 0 and two of k 8, and the recipe's two on both axes; two keys.
    assert drawn.count('<circle class="dot"') == 3 * (1 + 2) + 1
    assert drawn.count('<circle class="owndot"') == 3 * (2 + 2) + 1
    assert "prefers-color-scheme: dark" in drawn
    assert not re.search(r'(fill|stroke)="', drawn)
    box = [float(number) for number in root.attrib["viewBox"].split()]
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(circle.attrib["cx"]) < box[2]
        assert 0 < float(circle.attrib["cy"]) < box[3]


def test_higher_is_higher_and_the_mean_is_between() -> None:
    (low, high), top = ablations_page.limits([0.8, 0.96, 0.9]), 10
    places = [ablations_page._down(top, low, high, at) for at in (0.96, 0.9, 0.8)]
    assert places == sorted(places)
    assert top < places[0] < places[-1] < top + ablations_page.HEIGHT


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.0, 1.0, [0.0, 0.5, 1.0]), (0.71, 0.96, [0.75, 0.8, 0.85, 0.9, 0.95]),
    (3.1, 12.2, [4.0, 6.0, 8.0, 10.0, 12.0]), (-0.5, 0.5, [-0.4, -0.2, 0.0, 0.2, 0.4]),
])
def test_ticks_are_the_narrowest_round_steps_that_give_five_at_most(
    low: float, high: float, expected: list[float]
) -> None:
    assert ablations_page.ticks(low, high) == pytest.approx(expected)


def test_the_page_in_the_docs_is_what_its_json_gives() -> None:
    path = DOCS / "ablations.json"
    text = (DOCS / "ablations.md").read_text("utf-8")
    if not path.exists():
        assert ablations_page.MARK not in text, "a table without its runs: keep the grid's JSON beside it"
        return
    found = ablations.kept([path])
    assert text.endswith(f"\n\n{ablations_page.below(found)}")
    assert (DOCS / "ablations.svg").read_text("utf-8") == ablations_page.figure(found)
