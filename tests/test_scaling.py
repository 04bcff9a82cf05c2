"""Scaling: what its benchmark measures, the page that its runs give, and the guide's scripts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

import scaling
import scaling_page
from makers import a_prompt
from tba.records import Lease
from tba.simulation import Fixed
from tba.weights import Weights

DOCS = Path(__file__).parents[1] / "docs"


def a_run(
    name: str, searchers: int, per_s: float, *, depot: float = 0.3, trainer: float = 0.5, lead: int | None = None,
    seed: int = 0, **calls: tuple[float, float],
) -> dict[str, Any]:
    """A simulation, made up; `calls` are (share, milliseconds)."""
    given = calls or {"deliver": (0.25, 2.0), "draw": (0.05, 6.0), "step": (0.5, 60.0)}
    return {
        "name": name, "rate": 10, "lead": lead, "searchers": searchers, "seed": seed, "seconds": 4.0, "per_s": per_s,
        "steps_per_s": 8.25, "depot": depot, "trainer": trainer, "searching": 0.75,
        "calls": {call: {"share": share, "ms": ms} for call, (share, ms) in given.items()},
    }


FREE = [
    a_run("free", 1, 80.0, trainer=0.1), a_run("free", 1, 82.0, seed=1, trainer=0.12),
    a_run("free", 1, 90.0, seed=2, trainer=0.11), a_run("free", 4, 312.0, trainer=0.96), a_run("free", 16, 656.0,
    depot=0.99, trainer=0.97, deliver=(0.8, 2.5), draw=(0.15, 6.0), lease=(0.04, 0.1), step=(0.97, 60.0)),
]
"""One searcher: a median of 82 of three rounds. 312 / (4 x 82) = 0.951; 656 / (16 x 82) = 0.5."""
BAR = {
    "8": [{"lease": 0.01, "deliver: unpack": 0.05, "deliver: take in": 0.25, "draw: pack it": 0.5}],
    "64": [{"lease": 0.02, "deliver: unpack": 0.06, "deliver: take in": 0.3, "draw: pack it": 0.25}],
}


# ---- what is measured ---------------------------------------------------------------------------


def test_prepared_groups_answer_their_leases_with_the_weights_they_were_given() -> None:
    searcher = scaling.Prepared("ann", 3)
    searcher.adopt(Weights(version=7, round=2, digest="d", tensors={}))
    leases = [Lease(prompt=a_prompt(f"p{n}"), visit=0, attempt=n, number=40 + n, round=0) for n in range(3)]
    groups = list(searcher.search(leases, run_attempt=5))
    assert [(g.prompt.id, g.number, g.attempt) for g in groups] == [("p0", 40, 0), ("p1", 41, 1), ("p2", 42, 2)]
    assert {(g.version, g.digest, g.searcher, g.run_attempt) for g in groups} == {(7, "d", "ann", 5)}
    assert [g.num_tokens for g in groups] == [8 * 128] * 3
    everything = [c for g in groups for c in g.completions]
    assert len({c.tokens for c in everything}) == 24
    assert {c.version for c in everything} == {7}
    assert min(min(c.tokens) for c in everything) == 3
    assert max(max(c.tokens) for c in everything) == 28  # 26 letters from 3 on


def test_searches_take_their_time_give_or_take_a_tenth_and_loading_none() -> None:
    costs = scaling.Paced(Fixed({"deliver": 5.0, "load": 9.0}), 2.0, seed=1)
    taken = [costs("search", lambda: 7) for _ in range(400)]
    assert {result for result, _ in taken} == {7}
    seconds = [s for _, s in taken]
    assert 1.8 <= min(seconds) < 1.82 < 2.18 < max(seconds) <= 2.2
    assert sum(seconds) / 400 == pytest.approx(2.0, abs=0.02)
    assert costs("deliver", lambda: 3) == (3, 5.0)
    assert costs("load", lambda: 4) == (4, 0.0)


def test_two_searchers_deliver_twice_their_rate_while_nothing_is_saturated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CAPACITY", 400), ("SEARCHES", 12), ("LEAST_S", 1.0)):
        monkeypatch.setattr(scaling, name, value)
    row = scaling.measure(scaling.Setting("slow", 2, None), 2, 0)
    # A search of 4 groups takes 2 s, so that 6 each are a window of 12 s; 2 searchers x 2 groups/s x 8 = 32.
    assert row["per_s"] == pytest.approx(32, rel=0.2)
    assert row["seconds"] == pytest.approx(12, abs=1)
    assert row["searching"] > 0.9
    assert 0 < row["depot"] < 0.5
    assert set(row["calls"]) >= {"lease", "deliver", "draw", "step", "publish", "store"}
    parts = sum(row["calls"][name]["share"] for name in ("lease", "deliver", "draw", "store"))
    assert parts == pytest.approx(row["depot"], abs=0.02)
    assert json.loads(json.dumps(row)) == row


def test_a_second_of_the_bar_delivers_and_draws_640_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "CAPACITY", 600)
    monkeypatch.setattr(scaling, "CARRIED_GROUPS", 64)
    second = scaling.Second(16)
    before = second._depot.buffer.consumed
    spent = second.run()
    assert second._depot.leases.delivered == 64
    assert second._depot.buffer.consumed - before == 64 * 8
    assert set(spent) == {"lease", "deliver: unpack", "deliver: take in", "draw: choose and read",
                          "draw: make the batch", "draw: pack it"}
    assert all(seconds >= 0 for seconds in spent.values())


# ---- figures and sentences ----------------------------------------------------------------------


def test_shares_between_two_moments() -> None:
    # At 2 s it has worked 0.5 x 2 = 1 s, at 10 s 0.74 x 10 = 7.4 s: 6.4 of the 8 s between.
    assert scaling_page.shares_between((2.0, {"depot": 0.5}), (10.0, {"depot": 0.74})) == {"depot": pytest.approx(0.8)}


def test_linearity_is_over_so_many_times_one_searcher() -> None:
    cells = scaling_page.grouped(FREE)["free"]
    assert scaling_page.linearity(cells) == {1: 1.0, 4: pytest.approx(312 / 328), 16: pytest.approx(0.5)}
    del cells[1]
    assert scaling_page.linearity(cells)[16] == pytest.approx(656 / 4 / 312)


def test_the_trainer_limits_only_where_the_lead_is_bounded() -> None:
    saturated = a_run("x", 8, 1.0, trainer=0.95, depot=0.94)
    assert scaling_page.limiting([saturated]) == []
    assert scaling_page.limiting([{**saturated, "lead": 3}]) == ["trainer"]
    assert scaling_page.limiting([{**saturated, "depot": 0.97}]) == ["depot"]


def test_the_verdict_says_how_far_which_part_and_why() -> None:
    said = scaling_page.verdict(scaling_page.grouped(FREE)["free"])
    assert said == (
        "linear to within 10% up to 4 searchers (lowest 0.95); at 16 the depot is saturated, 80% of its time by "
        "deliver (2.5 ms a call); the trainer is saturated from 4 on, and nobody waits for it"
    )
    bounded = [a_run("b", 1, 80.0, lead=4), a_run("b", 2, 130.0, lead=4), a_run("b", 4, 140.0, lead=4, trainer=0.99)]
    # 130 / 160 = 0.81 while the trainer is at work half of the time: that is a miss.
    assert scaling_page.verdict(scaling_page.grouped(bounded)["b"]) == (
        "linear to within 10% up to 1 searchers (lowest 1.00); at 4 the trainer is saturated, 50% of its time by step "
        "(60 ms a call); missed before that at 2"
    )
    assert "no part that searchers wait for saturates" in scaling_page.verdict({1: FREE[:3]})


def test_the_table_has_medians_and_ends_of_rounds() -> None:
    lines = scaling_page.table(FREE).splitlines()
    assert lines[2:] == [
        "| free | 10 | 1 | 82 (80 to 90) | 1.00 | 0.30 (deliver 0.25, draw 0.05) | 0.11 | 0.75 | 8.2 | - |",
        "| free | 10 | 4 | 312 | 0.95 | 0.30 (deliver 0.25, draw 0.05) | 0.96 | 0.75 | 8.2 | trainer |",
        "| free | 10 | 16 | 656 | 0.50 | 0.99 (deliver 0.80, draw 0.15, lease 0.04) | 0.97 | 0.75 | 8.2 "
        "| depot and trainer |",
    ]
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_of_the_bar_sums_what_searchers_ask_and_everything() -> None:
    # 0.01 + 0.05 + 0.25 = 0.31 and 0.02 + 0.06 + 0.3 = 0.38; with the draws 0.81 and 0.63.
    lines = scaling_page.bar_table(BAR).splitlines()
    assert lines[0] == "| share of the depot's time | steps of 8 groups | steps of 64 groups |"
    assert lines[-2:] == [
        "| searchers' calls together | 0.310 (0.310 to 0.310) | 0.380 (0.380 to 0.380) |",
        "| all calls | 0.810 (0.810 to 0.810) | 0.630 (0.630 to 0.630) |",
    ]


def test_the_page_keeps_what_is_written_by_hand_and_the_figure_is_inside_its_box(tmp_path: Path) -> None:
    (tmp_path / "scaling_measured.md").write_text("# By hand\n\nWords.\n", "utf-8")
    found = {"bar": BAR, "runs": FREE}
    for _ in range(2):
        scaling_page.page(found, tmp_path)
    text = (tmp_path / "scaling_measured.md").read_text("utf-8")
    assert text.startswith("# By hand\n\nWords.\n\n<!--")
    assert text.count(scaling_page.MARK) == 1
    assert "Medians of 3 rounds" in text
    drawn = (tmp_path / "scaling_measured.svg").read_text("utf-8")
    root = ElementTree.fromstring(drawn)
    box = [float(number) for number in root.attrib["viewBox"].split()]
    lines = [line.attrib["points"] for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == 5  # completions and n x one above; depot, trainer and searchers below
    for x, y in (map(float, point.split(",")) for points in lines for point in points.split()):
        assert 0 < x < box[2]
        assert 0 < y < box[3]
    assert "prefers-color-scheme: dark" in drawn


def test_the_page_in_the_docs_is_what_its_json_gives() -> None:
    found = json.loads((DOCS / "scaling_measured.json").read_text("utf-8"))
    assert (DOCS / "scaling_measured.md").read_text("utf-8").endswith(f"\n\n{scaling_page.below(found)}")
    assert (DOCS / "scaling_measured.svg").read_text("utf-8") == scaling_page.figure(found["runs"])


# ---- the guide's scripts ------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    """Fenced blocks of the guide in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / "scaling.md").read_text("utf-8"), re.M | re.S)


def test_every_yaml_of_the_guide_parses_and_the_job_fits_the_operator() -> None:
    trees = [yaml.safe_load(text) for text in blocks("yaml")]
    assert len(trees) == 2
    recipe, job = sorted(trees, key=lambda tree: "kind" in tree)
    assert set(recipe["resources"]) <= {"trainer", "searcher", "depot", "evaluator"}
    assert all(set(share) <= {"cpus", "gpus"} for share in recipe["resources"].values())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        (container,) = template["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]
    folder = container["volumeMounts"][0]["mountPath"]
    assert job["spec"]["entrypoint"].count(f"{folder}/first") == 3
    command = job["spec"]["entrypoint"].removeprefix("sh -c ").strip("'")
    assert subprocess.run(["sh", "-n", "-c", command], check=False).returncode == 0


FAKES = {
    "scontrol": 'if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; else echo "$@" >> "$SAID"; fi',
    "srun": 'echo "srun $*" >> "$SAID"',
    "ray": "exit 0",
    "tba": """trap "sleep 0.2; exit 130" TERM
until [ "$(grep -c ^srun "$SAID")" -ge 3 ]; do sleep 0.05; done
echo "tba $*" >> "$SAID"
while [ -z "$QUICK" ]; do sleep 0.05; done""",
}
"""Commands of a SLURM node: what they are asked is noted; a run sees all nodes, and lasts until it is told to stop."""


@pytest.mark.parametrize(("is_warned", "is_begun"), [(True, False), (False, True)])
def test_the_slurm_script_starts_ray_trains_and_goes_on_after_the_time_limit(
    is_warned: bool, is_begun: bool, tmp_path: Path
) -> None:
    (script,) = blocks("bash")
    (tmp_path / "job.sh").write_text(script, "utf-8")
    for name, text in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    run, said = tmp_path / "runs" / "redteam", tmp_path / "said"
    said.touch()
    if is_begun:
        run.mkdir(parents=True)
        (run / "config.yaml").touch()
    job = subprocess.Popen(["bash", tmp_path / "job.sh"], env={
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SCRATCH": str(tmp_path), "SAID": str(said), "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_PER_TASK": "32", "QUICK": "" if is_warned else "yes",
    })
    if is_warned:
        deadline = time.monotonic() + 30
        while "tba train" not in said.read_text("utf-8"):
            assert time.monotonic() < deadline, said.read_text("utf-8")
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
    assert job.wait(30) == (130 if is_warned else 0)
    lines = said.read_text("utf-8").splitlines()
    started = sorted(line for line in lines if line.startswith("srun"))
    assert [re.findall(r"--nodelist=(\S+) ray start --(head|address=n1:20077)", line)[0] for line in started] == [
        ("n1", "head"), ("n2", "address=n1:20077"), ("n3", "address=n1:20077"),
    ]
    (ran,) = (line for line in lines if line.startswith("tba"))
    assert ran == f"tba resume {run}" if is_begun else ran.endswith(f"ray.address=auto search.searchers=14 --run {run}")
    assert ("requeue 77" in lines) == is_warned
