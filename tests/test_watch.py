"""Watching a run: what is shown is what the files say at any moment, to this machine only, at next to no cost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tba.cli import main
from tba.control import Hold, Requests
from tba.newest import FILE
from tba.report.read import Answered, RunReader, read_run
from tba.report.text import visible
from tba.settings import SettingsError
from tba.watch import board as board_room
from tba.watch import terminal
from tba.watch.board import Board
from tba.watch.differences import difference
from tba.watch.follower import CUT_OFF, UNDER_WAY, Follower, check_run
from tba.watch.searchers import EVERY_S as ASK_EVERY_S
from tba.watch.searchers import Known, SearcherList
from tba.watch.server import HOST, PORT, listen, make_server
from test_report import HOSTILE, make_run


@pytest.fixture(scope="module", autouse=True)
def short_plotly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "0;\r\n")
        yield


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def newest_of(path: Path, text: str = "a text", *, step: int = 7) -> None:
    group = {"prompt_id": text, "prompt": text, "sampler": text, "size": 9,
             "completions": [{"text": text, "reward": 0.25, "version": 3, "age": 4, "cut": False}]}
    (path / FILE).write_text(json.dumps({"step": step, "version": step - 1, "groups": [group]}))


# ---- reading as it grows ---------------------------------------------------------------------------


LINES = st.lists(
    st.one_of(
        st.builds(lambda n, x: json.dumps({"step": n, "train/reward": x}).encode(), st.integers(1, 6), st.floats(0, 1)),
        st.builds(lambda n: json.dumps({"eval/version": n, "pass@1": n / 7}).encode(), st.integers(0, 3)),
        st.sampled_from([b"", b"  ", b"{", b"[1]", b'{"step": 2.5}', b"\xff\x00", b'{"step": 4} x']),
    ),
    max_size=8,
)
"""Lines of a metrics file, numbers that come again and lines that are none among them."""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINES, min_size=1, max_size=3), st.data())
def test_reading_as_it_grows_and_is_cut_back_gives_what_reading_once_gives(
    tmp_path: Path, versions: list[list[bytes]], data: st.DataObject
) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    reader, kept = RunReader(run), b""
    for lines in versions:  # each a part of the run that was resumed from a checkpoint within the part before
        whole = kept + b"".join(line + b"\n" for line in lines)
        cuts = sorted(data.draw(st.lists(st.integers(len(kept), len(whole)), max_size=4)))
        for cut in [*cuts, len(whole)]:
            (run / "metrics.jsonl").write_bytes(whole[:cut])
            assert reader.read() == read_run(run)
        ends = [0, *(place + 1 for place, byte in enumerate(whole) if byte == 10)]
        kept = whole[: data.draw(st.sampled_from(ends))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 100), steps=st.integers(0, 2))
def test_every_prefix_of_a_real_log_reads_the_same_either_way(tmp_path: Path, cut: int, steps: int) -> None:
    run = tmp_path / f"run-{cut}-{steps}"
    if not run.exists():
        make_run(run, num_steps=5)
    reader = RunReader(run)
    for name in ("metrics.jsonl", "completions.jsonl", "summary.json", "ledger.json", "config.yaml"):
        file = run / name
        content = file.read_bytes()
        reader.read()
        file.write_bytes(content[: len(content) * cut // 100])
        assert reader.read() == read_run(run)
        file.write_bytes(content)
        assert reader.read() == read_run(run)


def test_a_log_that_was_cut_back_and_grew_beyond_what_was_read_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(f'{{"step": {n}, "wall_s": {n}.25}}\n' for n in range(1, 6)))
    reader = RunReader(tmp_path)
    assert len(reader.read().steps) == 5
    log.write_text("".join(f'{{"step": {n}, "wall_s": {n}.75}}\n' for n in range(1, 8)))  # longer, another time
    assert [step["wall_s"] for step in reader.read().steps] == [n + 0.75 for n in range(1, 8)]


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", num_steps=5)
    reader = RunReader(run)
    before, parsed = reader.read(), list[bytes]()
    assert reader.read() is before
    parse = monkeypatch.setattr  # counts the lines that are parsed from here on
    from tba.report import logs

    real = logs.parse
    parse("tba.report.logs.parse", lambda raw: (parsed.append(raw), real(raw))[1])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6}\n')
    after = reader.read()
    assert parsed == [b'{"step": 6}\n']
    assert len(after.steps) == 6
    assert after.answered is before.answered


# ---- a run at a moment -----------------------------------------------------------------------------


def test_a_run_is_under_way_while_a_process_holds_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=5)
    follower = Follower(run)
    ended = follower.look()
    assert (ended.status, ended.record.summary["message"]) == ("done", "a plain text")
    assert follower.look() is ended
    hold = Hold(run)
    view = follower.look()
    assert view.status == UNDER_WAY
    # Five steps of 1.1 s with 0.2 s of waiting each; no sums of an earlier part.
    assert view.record.summary["trainer"] == pytest.approx({"wait_s": 1.0, "draw_s": 0, "publish_s": 0, "step_s": 5.5})
    assert not any("summary.json" in note for note in view.record.notes)
    hold.close()
    (run / "summary.json").unlink()
    assert follower.look().status == CUT_OFF
    assert any("summary.json is missing" in note for note in follower.look().record.notes)


def test_the_rest_takes_as_long_as_the_last_steps_say(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=23)
    (run / "config.yaml").write_text("trainer: {steps: 30}\n")
    hold = Hold(run)
    view = Follower(run).look()
    # 7 steps to go at 1.5 s each.
    assert (view.steps, view.left_s) == ((23, 30), pytest.approx(10.5))
    assert board_room.progress(view) == "step 23 of 30, about 10.5 s left"
    hold.close()
    assert board_room.progress(Follower(run).look()) == "step 23 of 30"


def test_a_run_that_has_just_begun_is_shown_and_a_folder_that_is_none_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    view = Follower(tmp_path).look()
    assert (view.steps, view.left_s, view.newest, view.logged_at) == ((0, None), None, None, None)
    state = json.loads(Board(tmp_path).state().body)
    assert state["progress"] == "step 0"
    assert "no such numbers" in state["curves"]["html"]
    check_run(tmp_path)
    with pytest.raises(SettingsError, match=r"nowhere' is no run directory: it has no config\.yaml"):
        check_run(tmp_path / "nowhere")
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"step": "x"}', '{"step": 1, "groups": 3}', '{"step": 1, "groups": [3, {}, {"completions": [1]}]}',
    '{"step": 1, "groups": [{"completions": [{"text": 7, "reward": NaN, "version": "v", "age": [1], "cut": 1}]}]}',
    "[" * 100_000,
])
def test_whatever_newest_json_holds_gives_a_page(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run", num_steps=2)
    (run / FILE).write_text(content)
    json.loads(Board(run).state().body)


# ---- hostile texts ---------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Elements and attributes of HTML, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, ...]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, *(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def fragments(run: Path, text: str) -> dict[str, Elements]:
    """All HTML that the server sends of a run whose every text is `text`."""
    made = make_run(run, text, num_steps=3)
    newest_of(made, text)
    board = Board(made)
    state = json.loads(board.state().body)
    known = Known(lines=[dict.fromkeys(("name", "state", "delivered", "held", "heard", "where"), visible(text))],
                  said_at=1.5, trouble=visible(text))
    hold = Hold(made)
    searchers = board_room.parts(Follower(made).look(), known)["searchers"]
    hold.close()
    html = {**state["parts"], "searchers": searchers, "curves": state["curves"]["html"],
            "difference": board.difference(state["choices"]["prompts"][0], 0, 20).body.decode(),
            "page": board.page().body.decode()}
    return {name: Elements(one) for name, one in html.items()}


def test_hostile_texts_add_no_element_and_no_attribute(tmp_path: Path) -> None:
    benign = fragments(tmp_path / "benign", "a plain text")
    for number, word in enumerate(HOSTILE):
        hostile = fragments(tmp_path / f"run-{number}", word)
        assert {name: one.found for name, one in hostile.items()} == {name: one.found for name, one in benign.items()}
        for name in ("newest", "difference", "searchers", "message"):
            assert " ".join(visible(word).split()) in " ".join(" ".join(hostile[name].words).split()), name


def test_attacks_are_behind_a_click_and_not_in_the_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=3)
    newest_of(run, "an attack")
    (run / "config.yaml").write_text("task: {name: redteam}\n")
    page = Board(run).page().body.decode()
    for place in ('id="part-newest"', 'id="difference"'):
        before = page.split(place)[0]
        assert before.count("<details>") > before.count("</details>")
    assert "an attack" not in shown_in_terminal(run)
    (run / "config.yaml").write_text("task: {name: arithmetic}\n")
    assert "<details" not in Board(run).page().body.decode()
    assert "an attack" in shown_in_terminal(run)


def test_the_name_of_a_folder_is_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<img src=x onerror=alert(1)>&quot;", num_steps=2)
    page = Elements(Board(run).page().body.decode())
    assert page.found == Elements(Board(make_run(tmp_path / "run", num_steps=2)).page().body.decode()).found
    assert "<img src=x onerror=alert(1)>&quot;" in page.words


# ---- two versions ----------------------------------------------------------------------------------


def test_two_versions_are_told_apart_by_their_texts() -> None:
    def answered(version: int, *completions: tuple[str, float | None]) -> Answered:
        return Answered(version=version, prompt_id="p", prompt="2+2=",
                        completions=tuple((text, reward, -1.0, "stop") for text, reward in completions))

    old = answered(3, ("5", 0.0), ("4", 1.0), ("5", 0.0), ("?", None))
    new = answered(17, ("4", 1.0), ("4", 1.0), ("4.", 0.4))
    found = difference([new, old, answered(9, ("x", 0.0))], "p", 3, 17)
    assert found is not None
    first, second = found.sides
    # 1 of 3 scored ones has full marks, mean (0 + 1 + 0) / 3; then 2 of 3, mean (1 + 1 + 0.4) / 3.
    assert (first.version, first.count, first.scored) == (3, 4, 3)
    assert (first.full_marks, first.reward) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (second.full_marks, second.reward) == (pytest.approx(2 / 3), pytest.approx(0.8))
    assert [(t.text, t.times, t.is_only_here) for t in first.texts] == [("5", 2, True), ("4", 1, False), ("?", 1, True)]
    assert [(t.text, t.times, t.is_only_here) for t in second.texts] == [("4", 2, False), ("4.", 1, True)]
    assert difference([old], "p", 3, 17) is None
    assert difference([old, new], "q", 3, 17) is None


# ---- searchers -------------------------------------------------------------------------------------


def test_searchers_are_asked_now_and_then_and_nobody_waits(tmp_path: Path) -> None:
    clock, asked, may_answer = Clock(), list[Mapping[str, Any]](), threading.Event()

    def ask(run: Path, request: Mapping[str, Any], *, limit_s: float) -> Mapping[str, Any]:
        asked.append(request)
        assert may_answer.wait(20)
        if len(asked) > 1:
            raise SettingsError(["the run did not answer"])
        return {"changed": [], "searchers": [{"name": "searcher-0", "state": "searching", "delivered": 1234,
                                              "heard_s": 2.4, "held": None, "where": "<b>"}, 7]}

    searchers = SearcherList(tmp_path, ask=ask, clock=clock)
    for _ in range(3):  # at once, although the run does not answer
        assert searchers.known() == Known()
    may_answer.set()
    searchers.wait()
    known = searchers.known()
    assert len(asked) == 1
    assert known.lines[0] == {"name": "searcher-0", "state": "searching", "delivered": "1,234", "held": "0",
                              "heard": "2 s before", "where": "<b>"}
    assert known.said_at is not None
    clock.now += ASK_EVERY_S
    searchers.known()
    searchers.wait()
    assert (len(asked), searchers.known().lines, searchers.known().said_at) == (2, known.lines, known.said_at)
    assert searchers.known().trouble == "the run did not answer"


def test_a_run_that_does_not_answer_is_said_so_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.watch.searchers.LIMIT_S", 0.2)
    run = make_run(tmp_path / "run", num_steps=3)
    hold, clock, searchers = Hold(run), Clock(), SearcherList(run)
    board = Board(run, searchers=searchers, clock=clock)
    assert "The run is being asked" in json.loads(board.state().body)["parts"]["searchers"]
    searchers.wait()
    clock.now += board_room.EVERY_S
    assert "did not answer within 0.2 s" in json.loads(board.state().body)["parts"]["searchers"]
    hold.close()
    clock.now += board_room.EVERY_S
    assert "No run is under way" in json.loads(board.state().body)["parts"]["searchers"]


def test_searchers_of_a_run_that_answers_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=3)
    hold, requests, is_over = Hold(run), Requests(run), threading.Event()
    line = {"name": "searcher-3", "state": "on its way up", "life": 0, "where": None, "held": None, "delivered": None,
            "overdue": None, "heard_s": None}

    def serve() -> None:
        while not is_over.wait(0.01):
            requests.serve(lambda request: {"changed": [], "searchers": [line]} if request["do"] == "list" else {})

    thread = threading.Thread(target=serve)
    thread.start()
    searchers = SearcherList(run)
    searchers.known()
    searchers.wait()
    is_over.set()
    thread.join()
    html = board_room.parts(Follower(run).look(), searchers.known())["searchers"]
    hold.close()
    assert "searcher-3</th><td>on its way up</td><td class=\"n\">0</td><td class=\"n\">never</td>" in html


# ---- pace ------------------------------------------------------------------------------------------


def test_a_look_that_took_long_is_followed_by_a_long_rest(tmp_path: Path) -> None:
    run, clock, spent = make_run(tmp_path / "run", num_steps=3), Clock(), iter([0.0, 0.3, 1.0, 1.001])
    board = Board(run, clock=clock, work=lambda: next(spent))
    first = board.state()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4}\n')
    clock.now = board_room.REST * 0.3 - 0.01  # 30 s after a look of 0.3 s of the processor
    assert board.state() is first
    clock.now += 0.02
    second = board.state()
    assert json.loads(second.body)["progress"] == "step 4"
    clock.now += board_room.EVERY_S - 0.01  # 0.1 s would do, but for the least that is rested
    assert board.state() is second


def test_nothing_changed_is_nothing_made_anew(tmp_path: Path) -> None:
    run, clock = make_run(tmp_path / "run", num_steps=3), Clock()
    board = Board(run, clock=clock)
    first = board.state()
    clock.now += 1000
    assert board.state() is first
    newest_of(run, step=3)
    clock.now += 1000
    other = board.state()
    assert other.tag != first.tag
    assert json.loads(other.body)["curves"] == json.loads(first.body)["curves"]


# ---- the server ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    port: int
    run: Path


@contextmanager
def serving(run: Path) -> Iterator[Served]:
    with listen(0) as made:
        port = made.getsockname()[1]
        server = make_server(run, port)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [made]})
        thread.start()
        try:
            yield Served(port, run)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    run = make_run(tmp_path_factory.mktemp("served") / "run", HOSTILE[0], num_steps=5)
    newest_of(run)
    with serving(run) as found:
        yield found


def get(served: Served, path: str, method: str = "GET", **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{HOST}:{served.port}{path}", headers=named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def test_the_page_its_files_and_the_state_are_served(served: Served) -> None:
    status, headers, body = get(served, "/")
    page = body.decode()
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert {name for name in named if name != "data:,"} == {
        "/plotly.js", "/charts.js", "/watch.js", "/page.css", "/watch.css"}  # fmt: skip
    for name in named:
        if name != "data:,":
            status, headers, body = get(served, name)
            assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
            assert headers["Content-Type"].startswith("text/css" if name.endswith("css") else "text/javascript")
            assert body
    status, headers, body = get(served, "/state")
    state = json.loads(body)
    assert (status, headers["Content-Type"], state["status"]) == (200, "application/json", "done")
    places = set(re.findall(r'id="part-(\w+)"', page))
    assert set(state["parts"]) == places  # every part has its place, and every place its part
    assert set(state["curves"]["specs"]) == set(re.findall(r'id="plot-(\w+)"', state["curves"]["html"]))
    status, _, body = get(served, "/difference?" + urllib.parse.urlencode(
        {"prompt": state["choices"]["prompts"][0], "one": 0, "other": 20}))
    assert status == 200
    assert body.count(b"in both versions") == 4
    assert b"<script>" not in body
    assert get(served, "/config.yaml")[0] == 404


def test_the_same_state_is_sent_once(served: Served) -> None:
    _, headers, body = get(served, "/state")
    assert body
    status, again, nothing = get(served, "/state", If_None_Match=headers["ETag"])
    assert (status, nothing, again["ETag"]) == (304, b"", headers["ETag"])
    assert again["Date"]  # what the page's clock goes by
    assert get(served, "/state", If_None_Match='"other"')[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", "[::1]:{port}",
                                  "127.0.0.1:{port}.evil.example", "LOCALHOST:{port}@evil.example", ""])
def test_other_names_of_the_server_are_refused(served: Served, host: str) -> None:
    for path in ("/", "/state", "/watch.js"):
        status, _, body = get(served, path, Host=host.format(port=served.port))
        assert (status in (400, 403), b"script" in body) == (True, False)


def test_its_own_names_are_let_in_and_only_to_read(served: Served) -> None:
    assert get(served, "/state", Host=f"localhost:{served.port}")[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert get(served, "/state", method)[0] == 405
    _, headers, _ = get(served, "/state", Origin="http://evil.example")
    assert not [name for name in headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("asked", ["", "prompt=p", "prompt=p&one=x&other=1", "prompt=p&one=-1&other=1",
                                   "prompt=p&one=1&other=" + "9" * 400, "prompt=p&one=%C2%B2&other=1"])
def test_versions_that_are_none_are_refused(served: Served, asked: str) -> None:
    assert get(served, f"/difference?{asked}")[0] == 400


def test_a_policy_goes_with_every_answer(served: Served) -> None:
    for path in ("/", "/state", "/watch.js", "/nothing", "/difference"):
        _, headers, _ = get(served, path)
        rules = headers["Content-Security-Policy"] if path != "/nothing" else "script-src 'self'; connect-src 'self'"
        assert "script-src 'self';" in rules
        assert "connect-src 'self'" in rules
        assert "http" not in rules


def test_a_port_that_is_taken_is_refused_or_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(0) as first:
        taken = first.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"--port {taken}: 127\.0\.0\.1:{taken} cannot be had"):
            listen(taken)
        monkeypatch.setattr("tba.watch.server.PORT", taken)
        with listen(None) as second:
            assert second.getsockname()[1] not in (0, taken)
            assert second.getsockname()[0] == HOST
    assert PORT == 7860


def test_nothing_is_written_into_the_run_directory(served: Served) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in served.run.iterdir()}
    get(served, "/")
    get(served, "/state")
    assert {file.name: file.stat().st_mtime_ns for file in served.run.iterdir()} == before


def test_the_command_prints_the_address_first_and_ends_well_with_ctrl_c(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=2)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "tba", "watch", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )
    assert process.stdout is not None
    address = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\n", process.stdout.readline())
    assert address is not None
    assert get(Served(int(address[1]), run), "/state")[0] == 200
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


def test_what_watches_loads_nothing_that_trains() -> None:
    code = ("import sys, tba.cli, tba.watch.server, tba.watch.terminal; "
            "print(*sorted({'torch', 'ray', 'transformers', 'pyarrow', 'numpy', 'pandas'} & set(sys.modules)))")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


# ---- terminal --------------------------------------------------------------------------------------


def shown_in_terminal(run: Path, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal.show(run, console)
    console.file.close()
    return console.export_text()


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_terminal_shows_the_run_and_no_text_steers_it(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path / "run", "[red]evil[/red] \x1b[31m \x07 \u202e", num_steps=23)
    newest_of(run, "[bold]\x1b]0;title\x07")
    shown = shown_in_terminal(run, width)
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    if width == 200:
        for said in ("done", "step 23", "pass@1", "0.6000", "Reward: consumed", "0.4600", "searchers",
                     "trajectories: 100 delivered = 60 in buffer + 33 evicted + 7 rejected  (adds up: yes)",
                     "[red]evil[/red]", "[bold]\\u001B]0;title", "age 4"):
            assert said in shown


def test_small_curves_go_from_the_lowest_to_the_highest() -> None:
    assert terminal.small_curve([0.0, None, 7.0, 3.5], 9) == "▁█▅"
    assert terminal.small_curve([2.0, 2.0], 9) == "▁▁"
    assert terminal.small_curve([], 9) == ""
    assert terminal.small_curve(list(range(100)), 8) == "▁▂▃▄▅▆▇█"


def test_the_terminal_ends_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=3)
    hold, rests = Hold(run), list[float]()

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 2:
            hold.close()

    assert [view.status for view in terminal.looks(Follower(run), rest)] == [UNDER_WAY, UNDER_WAY, "done"]
    assert all(seconds >= board_room.EVERY_S for seconds in rests)
