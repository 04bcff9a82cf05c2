"""The report of a run: hostile text stays text, broken files become notes, the page needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from tba import report
from tba.report import charts, read, text

FILES = ("config.yaml", "metrics.jsonl", "ledger.json", "summary.json", "completions.jsonl")
HOSTILE = (
    "<script>document.title='x'</script><img src=x onerror=alert(1)> & <b>",
    "</td></table></div></section></main>",
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "]]> {{ 7 * 7 }} {% raw %} ${alert(1)} `",
    '" onmouseover="alert(1)" x=\'',
    "a\u2028b\u2029c",
    "nul \x00 bell \x07 escape \x1b[31m delete \x7f",
    "abc \u202elive\u202c \u200f \u2066 zero\u200bwidth \ufeff",
    "lone \ud800 surrogate \udfff",
    "tags \U000e0041",
)
PLAIN = "a plain text"


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, text outside scripts, scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: Counter[tuple[str, ...]] = Counter()
        self.urls: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.source = path.read_bytes().decode("utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[(tag, *sorted(name for name, _ in attrs))] += 1
        self.urls += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "data")
        ]
        if tag not in ("meta", "link", "input", "br", "img"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            attributes, so_far = self.scripts[-1]
            self.scripts[-1] = (attributes, so_far + data)
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(body for attributes, body in self.scripts if attributes.get("id") == "data"))


def lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(path: Path, word: str = PLAIN, *, num_steps: int = 23) -> Path:
    """A small run whose every free text is `word`."""
    path.mkdir(parents=True)
    steps = [
        {
            "step": s,
            "wall_s": 1.5 * s,
            "train/reward": s / 50,
            "train/kl": 0.3 * s,
            "train/entropy": 2 - s / 50,
            "train/tokens": 300,
            "search/tokens": 700 * s,
            "search/reward": None if s % 2 else s / 40,
            "train/step_s": 1.1,
            "train/wait_s": 0.2,
            "buffer/size": 7 * s,
            "buffer/reuse": 0.9,
            "buffer/age_histogram": {"0": 3, "4": 2, word: 1},
            "buffer/drawn_by": {word: 3, "recent": 5},
        }
        for s in range(1, num_steps + 1)
    ]
    evaluations = [
        {
            "eval/version": v,
            "wall_s": 1.5 * v,
            "pass@1": 0.1 + v / 40,
            "pass@1_greedy": 0.2 + v / 40,
            "reward": v / 30,
            "kl": 0.3 * v,
            "entropy": 9 - v / 10,
            "distinct": 0.9,
        }
        for v in (0, 10, 20)
    ]
    lines(path / "metrics.jsonl", [*evaluations[:1], *steps, *evaluations[1:]])
    counts = {"delivered": 100, "in_buffer": 60, "evicted": {word: 23, "capacity": 10}, "rejected": {word: 7}}
    ledger = {
        "trajectories": counts,
        "tokens": {**counts, "delivered": 103},
        "prompts": {"leased": 31, "delivered": 25, "open": 4, "lost": 2},
    }
    (path / "ledger.json").write_text(json.dumps(ledger))
    (path / "summary.json").write_text(
        json.dumps(
            {
                "status": "done",
                "run": word,
                "steps": num_steps,
                "version": num_steps,
                "wall_s": 34.5,
                "startup_s": 2.0,
                "seed": 3,
                "start": {"pass@1": 0.1, word: 1.5},
                "final": {"pass@1": 0.6, word: 2.5},
                "message": word,
                "trainer": {"step_s": 12.0, "wait_s": 6.0, "draw_s": 2.0, "publish_s": 2.0, "checkpoint_s": 9.0},
                "searchers": {
                    "searcher-0": {"sampling_s": 6.0, "scoring_s": 1.0, "idle_s": 2.0},
                    word: {"sampling_s": 9.0, "idle_s": 1.0, f"{word}_s": 1.0},
                },
                "advice": word,
            }
        )
    )
    tree = {"seed": 3, "task": {"name": word}, word: {"key": word}, "buffer": {"recent_age": 3}}
    (path / "config.yaml").write_text(yaml.safe_dump(tree))
    lines(
        path / "completions.jsonl",
        [
            {
                "version": v,
                "prompt_id": f"{word}{p}",
                "prompt": word,
                "completions": [
                    {"text": word, "reward": 1.0, "logp": -3.5, "finish": "stop"},
                    {"text": f"second {word}", "reward": None, "logp": -7.25, "finish": word},
                ],
            }
            for v in (0, 10, 20)
            for p in range(3)
        ],
    )
    return path


def report_of(run_dir: Path) -> Page:
    return Page(report.write_report(run_dir))


@pytest.fixture(scope="module", autouse=True)
def short_plotly() -> Iterator[None]:
    """Four bytes for five million; one test has the real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "0;\r\n")
        yield


@pytest.fixture(scope="module")
def benign(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report_of(make_run(tmp_path_factory.mktemp("benign") / "run"))


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_text_adds_no_element_and_no_attribute(tmp_path: Path, benign: Page, word: str) -> None:
    page = report_of(make_run(tmp_path / "run", word))
    assert page.elements == benign.elements
    assert page.open == []
    assert len(page.scripts) == 3
    assert " ".join(text.visible(word).split()) in page.text


def test_markup_is_escaped_in_html_and_in_json(tmp_path: Path) -> None:
    page = report_of(make_run(tmp_path / "run", HOSTILE[0]))
    assert "&lt;script&gt;document.title=&#39;x&#39;&lt;/script&gt;&lt;img src=x onerror=" in page.source
    body = next(body for attributes, body in page.scripts if attributes.get("id") == "data")
    assert not set("<>&") & set(body)
    assert body.isascii()
    assert page.data["answered"][0]["completions"][0][0] == HOSTILE[0]


def test_unseen_characters_are_shown_as_escapes(tmp_path: Path) -> None:
    for word in HOSTILE[6:]:
        page = report_of(make_run(tmp_path / f"run-{ord(word[-1])}", word))
        assert not re.search(
            "[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]",
            " ".join(page.words),
        )
    assert text.visible("a\u202e\x00\n\t\ud800\U000e0041é") == "a\\u202E\\u0000\n\t\\uD800\\U000E0041é"


def test_settings_beyond_the_bound_are_cut_and_not_parsed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("seed: 3\n" + "a: &a [x, x]\n" * 9000)
    record = read.read_run(run)
    assert len(record.settings_text) < read.MAX_SETTINGS + 100
    assert "config.yaml is long: only its beginning is shown." in record.notes


def test_long_text_is_cut_with_a_note() -> None:
    assert text.visible("x" * 5003) == "x" * 4000 + " [cut here: 1,003 more characters]"


def test_page_asks_no_host_and_runs_only_its_own_scripts(benign: Page) -> None:
    assert [url for url in benign.urls if not url.startswith(("#", "data:,"))] == []
    assert "@import" not in benign.source.split("</style>")[0]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', benign.source)
    assert policy is not None
    rules = policy[1].replace("&#39;", "'")
    assert rules.startswith("default-src 'none'; ")
    assert "http" not in rules
    script_rule = re.search("script-src ([^;]*);", rules)
    assert script_rule is not None
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
        for attributes, body in benign.scripts
        if attributes.get("type") != "application/json"
    }
    assert set(script_rule[1].split()) == hashes


def test_real_plotly_is_embedded_once_and_ends_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files("plotly").joinpath("package_data/plotly.min.js")
    source = path.read_text(encoding="utf-8")
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: source)
    page = report_of(make_run(tmp_path / "run"))
    assert [body for _, body in page.scripts].count(source) == 1
    assert len(page.scripts) == 3
    assert not re.search("</script|<!--|<script", source, flags=re.IGNORECASE)


def test_page_shows_the_run(benign: Page) -> None:
    shown = benign.text
    assert "pass@1 0.6000 at the start 0.1000" in shown
    assert "at version 20 (first 0.1000)" in shown
    # 23 steps of 5 trajectories: 3 of age 0 and 2 of age 4; recent is age <= 3.
    assert (
        "115 trajectories consumed: mean age 1.600 steps, largest 4, 60 % of age 0, 60 % recent (age at"
        in shown
    )
    # Per step: 300 tokens trained, 700 delivered, 1.5 s.
    assert "trainer 200 at step 23" in shown
    assert "searchers 466.7 at step 23" in shown
    for chart_id, spec in benign.data["charts"].items():
        assert f'id="plot-{chart_id}"' in benign.source
        assert spec["unit"]
    for caption in re.findall(r'<figcaption id="[^"]*">([^<]*)', benign.source):
        assert len(caption) > 20


def test_page_tells_where_the_time_went(benign: Page) -> None:
    # Trainer: 12 + 2 + 2 + (6 - 2) = 20 s. Searchers: 15 + 1 + 3 + 1 = 20 s, in their order, unknown parts last.
    assert "Where the time went a plain text trainer" in benign.text
    for said in (
        "training 60.0 % 12.0 s forward", "drawing 10.0 % 2.00 s", "publishing 10.0 % 2.00 s",
        "idle 20.0 % 4.00 s waiting",
        "2 in all", "sampling 75.0 % 15.0 s", "scoring 5.0 % 1.00 s", "idle 15.0 % 3.00 s", "a plain text 5.0 % 1.00 s",
    ):
        assert said in benign.text
    assert 'aria-label="trainer: training 60.0 %, drawing 10.0 %, publishing 10.0 %, idle 20.0 %"' in benign.source
    widths = [float(width) for width in re.findall(r'style="width: ([0-9.]+)%"', benign.source)]
    assert widths == [60, 10, 10, 20, 75, 5, 15, 5]


@pytest.mark.parametrize("spent", [
    {}, {"trainer": None, "searchers": [1]}, {"trainer": {"wait_share": 0.3}, "searchers": {"searcher-0": "no"}},
    {"trainer": {"step_s": math.nan, "wait_s": -1, "publish_s": True}, "searchers": {"searcher-0": {"idle_s": "1"}}},
    {"trainer": {"step_s": 10**400}, "searchers": {}, "advice": None},
])
def test_a_summary_that_does_not_tell_of_times_gives_a_page(tmp_path: Path, spent: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    kept = {name: value for name, value in summary.items() if name not in ("trainer", "searchers", "advice")}
    (run / "summary.json").write_text(json.dumps({**kept, **spent}))
    page = report_of(run)
    assert page.open == []
    assert "Where the time went The summary does not tell. Curves" in page.text


def test_half_of_the_times_is_shown_and_lockstep_is_told_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("mode: lockstep\n")
    many = {f"part-{number:02d}_s": 1.0 for number in range(30)}
    (run / "summary.json").write_text(json.dumps({"searchers": {"searcher-0": {**many, "idle_s": 2.0}}}))
    page = report_of(run)
    assert "1 in all, their time summed; one process: while one side works, the other is idle" in page.text
    assert "idle 6.2 % 2.00 s waiting for leases and weights part-00 3.1 % 1.00 s" in page.text
    assert page.source.count('<span class="key') == 8


def test_styles_of_lines_differ_without_colour(benign: Page) -> None:
    for spec in benign.data["charts"].values():
        styles = [line["style"] for line in spec.get("lines", ())]
        assert len(set(styles)) == len(styles)


def test_page_speaks_the_words_of_the_project(benign: Page) -> None:
    foreign = (
        "rollout",
        "episode",
        "query",
        "response",
        "generation",
        "iteration",
        "actor",
        "learner",
        "worker",
    )
    assert [word for word in foreign if re.search(rf"\b{word}s?\b", benign.text.lower())] == []


def test_ledger_identity_is_checked_in_view(benign: Page) -> None:
    rows = dict(
        re.findall(
            r'<th scope="row">(trajectories|tokens|prompts)</th>.*?class="verdict ([a-z-]+)"',
            benign.source,
            flags=re.DOTALL,
        )
    )
    # 60 + (23 + 10) + 7 = 100 of 100 trajectories, but of 103 tokens; 25 + 4 + 2 = 31 of 31 prompts.
    assert rows == {"trajectories": "yes", "tokens": "no", "prompts": "yes"}
    assert "the parts sum to 100, off by -3" in benign.text


def test_ledger_with_a_missing_number_is_not_called_right(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    counts = {"delivered": 5, "in_buffer": 5, "evicted": {"a": None}, "rejected": {}}
    (run / "ledger.json").write_text(json.dumps({"trajectories": counts, "prompts": "none"}))
    page = report_of(run)
    assert "not known a number is missing" in page.text


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("state", ["missing", "empty", "half", "bytes", "wrong", "folder", "deep"])
def test_broken_files_become_notes(tmp_path: Path, name: str, state: str) -> None:
    run = make_run(tmp_path / "run")
    path = run / name
    content = path.read_bytes()
    path.unlink()
    if state == "folder":
        path.mkdir()
    elif state != "missing":
        path.write_bytes(
            {
                "empty": b"",
                "half": content[:-9],
                "bytes": bytes(range(256)),
                "wrong": b"[1, 2]\n",
                "deep": b"[" * 2000,
            }[state]
        )
    record = read.read_run(run)
    if (name, state) not in {("config.yaml", "half"), ("config.yaml", "wrong")}:
        assert [note for note in record.notes if name in note]
    built, _ = charts.build(record)
    assert built


def test_diversity_and_full_marks_within_k_stand_beside_reward(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    plain = {chart.id for chart in charts.build(read.read_run(run))[0]}
    assert "diversity" in plain  # its `distinct` alone
    assert plain.isdisjoint({"effective", "pass_k", "pass_each"})
    several = [
        {"eval/version": version, "pass@each": {"1": 0.1 + at, "2": 0.2 + at, "4": 0.3 + at, "x": 1, "9" * 5000: 1},
         "distinct_1": 0.5, "distinct_2": 0.6, "self_bleu": 0.7, "embedding_distance": 0.8, "effective_answers": 2 + at}
        for version, at in ((0, 0.0), (8, 0.25), (20, 0.5))
    ]  # fmt: skip
    lines(run / "metrics.jsonl", several)
    built, columns = charts.build(read.read_run(run))
    found = {chart.id: chart for chart in built}
    assert [line["name"] for line in found["diversity"].spec["lines"]] == [
        "distinct-1", "distinct-2", "embedding distance", "self-BLEU"]
    assert [line["style"] for line in found["diversity"].spec["lines"]] == [1, 2, 3, 4]
    assert found["effective"].caption.endswith("effective answers 2.500 at version 20 (first 2).")
    assert columns["k"]["step"] == [1, 2, 4]
    assert columns["k"]["start"] == [0.1, 0.2, 0.3]
    assert columns["k"]["final"] == pytest.approx([0.6, 0.7, 0.8])
    assert found["pass_k"].spec["x"] == "k"
    assert found["pass_k"].caption.endswith(
        "start 0.3000 at k = 4 (first 0.1000); final 0.8000 at k = 4 (first 0.6000).")
    assert [line["name"] for line in found["pass_each"].spec["lines"]] == ["k = 1", "k = 2", "k = 4"]
    assert columns["eval"]["pass@each:4"] == pytest.approx([0.3, 0.55, 0.8])
    lines(run / "metrics.jsonl", several[:1])  # one evaluation so far: a start, and no end
    built, columns = charts.build(read.read_run(run))
    assert "final" not in columns["k"] or columns["k"]["final"] == [None] * 3
    assert [line["name"] for line in next(c for c in built if c.id == "pass_k").spec["lines"]] == ["start"]


def test_empty_run_gives_a_page(tmp_path: Path) -> None:
    page = report_of(tmp_path)
    assert all(name in page.text for name in FILES)
    assert len(page.scripts) == 2
    assert page.open == []


def test_half_written_and_bad_lines_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n[1]\n{"step": 24, "train/rew')
    page = report_of(run)
    assert "metrics.jsonl: 2 lines are not a JSON object; skipped." in page.text
    assert "metrics.jsonl ends in a half-written line; skipped." in page.text


def test_numbers_that_are_none_are_not_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    odd = [None, float("nan"), float("inf"), "1", True, [1], 10**400, -0.5]
    misplaced = [
        {"step": None, "train/reward": 5.0},
        {"eval/version": "x", "reward": 5.0},
        {"eval/version": 2},
    ]
    names = ("train/reward", "buffer/age_histogram", "search/tokens", "buffer/drawn_by")
    lines(
        run / "metrics.jsonl",
        [
            *misplaced,
            *(
                {"step": i, "wall_s": i, **dict.fromkeys(names, value)}
                for i, value in enumerate(odd, start=1)
            ),
        ],
    )
    page = report_of(run)
    assert page.data["columns"]["train"]["train/reward"] == [None] * 7 + [-0.5]
    assert "consumed -0.5000 at step 8" in page.text


def test_step_written_twice_counts_once_and_the_last_wins(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/reward": 0.875}\n')
    page = report_of(run)
    assert page.data["columns"]["train"]["step"] == [1, 2, 3, 4, 5]
    assert page.data["columns"]["train"]["train/reward"][3] == 0.875


def test_same_files_same_bytes_and_nothing_left_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", HOSTILE[0])
    first = report.write_report(run).read_bytes()
    assert report.write_report(run).read_bytes() == first
    assert sorted(path.name for path in run.iterdir()) == sorted([*FILES, "report.html"])


def test_size_is_bounded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines(run / "metrics.jsonl", [{"step": s, "train/reward": s / 7, "wall_s": s} for s in range(1, 9001)])
    lines(
        run / "completions.jsonl",
        [
            {
                "version": v,
                "prompt_id": str(p),
                "prompt": "p" * 9000,
                "completions": [{"text": "é" * 4500, "reward": 0.0, "logp": -1.0, "finish": "stop"}] * 4,
            }
            for v in range(25)
            for p in range(3)
        ],
    )
    page = report_of(run)
    steps = page.data["columns"]["train"]["step"]
    assert len(steps) <= charts.MAX_POINTS
    assert (steps[0], steps[-1]) == (1, 9000)
    assert page.data["answered"][0]["version"] == 24
    assert page.data["answered"][-1]["version"] == 0
    assert len(page.source) < 1.5 * read.MAX_COMPLETIONS_JSON


def test_completions_are_shared_out_over_versions(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    entry = {"text": "t", "reward": 1.0, "logp": -1.0, "finish": "stop"}
    lines(
        run / "completions.jsonl",
        [
            {"version": v, "prompt_id": str(p), "prompt": "p", "completions": [entry] * 3}
            for v in (0, 5)
            for p in range(700)
        ]
        + [{"version": 5}],
    )
    record = read.read_run(run)
    per_version = Counter(
        {
            version: sum(len(a.completions) for a in record.answered if a.version == version)
            for version in (0, 5)
        }
    )
    assert per_version == {0: 1000, 5: 1000}
    assert "completions.jsonl: 2,000 of 4,200 completions" in " ".join(record.notes)
    assert "1 entry lacks" in " ".join(record.notes)


def test_truncated_anywhere_gives_a_page(tmp_path: Path) -> None:
    rng = random.Random(7)
    run = make_run(tmp_path / "run", HOSTILE[2])
    whole = {name: (run / name).read_bytes() for name in FILES}
    for _ in range(30):
        for name, content in whole.items():
            (run / name).write_bytes(content[: rng.randrange(len(content))])
        charts.build(read.read_run(run))
    assert report_of(run).open == []


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no run directory .*nowhere"):
        report.write_report(tmp_path / "nowhere")


def test_failed_write_leaves_the_older_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    older = report.write_report(run).read_bytes()
    (run / "ledger.json").unlink()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        report.write_report(run)
    assert (run / "report.html").read_bytes() == older
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == []


def test_import_is_light() -> None:
    code = (
        "import sys, tba.report; "
        "print(sorted({'torch', 'ray', 'transformers', 'plotly', 'jinja2'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert done.stdout.strip() == "[]"
