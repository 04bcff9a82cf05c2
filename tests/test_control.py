"""A run under way, seen from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tba.control import LOCK, REQUESTS, Hold, Requests, ask, is_under_way
from tba.settings import SettingsError


def test_a_run_has_one_process_and_is_free_when_it_ends(tmp_path: Path):
    assert not is_under_way(tmp_path)
    hold = Hold(tmp_path)
    assert is_under_way(tmp_path)
    with pytest.raises(SettingsError, match=r"is under way \(process \d+ on .*\); wait for its end, or stop it first"):
        Hold(tmp_path)
    hold.close()
    assert not is_under_way(tmp_path)
    Hold(tmp_path).close()


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path):
    code = ("import os, signal, sys; from pathlib import Path; from tba.control import Hold; "
            "hold = Hold(Path(sys.argv[1])); print('held', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert out == "held\n"
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == process.pid
    assert not is_under_way(tmp_path)


def test_nobody_is_asked_where_no_run_is_under_way(tmp_path: Path):
    with pytest.raises(SettingsError, match="no run is under way"):
        ask(tmp_path, {"do": "list"})
    assert not (tmp_path / REQUESTS).exists()


def test_a_request_is_answered_or_refused_once(tmp_path: Path):
    hold, requests, seen = Hold(tmp_path), Requests(tmp_path), list[Any]()

    def do(request: Mapping[str, Any]) -> Mapping[str, Any]:
        seen.append(request["n"])
        if request["n"] == 7:
            raise ValueError("7 is too many.")
        return {"double": 2 * request["n"]}

    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.01):
            requests.serve(do)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ask(tmp_path, {"n": 3}, limit_s=20) == {"double": 6}
        with pytest.raises(SettingsError, match=r"7 is too many\."):
            ask(tmp_path, {"n": 7}, limit_s=20)
    finally:
        is_over.set()
        thread.join()
        hold.close()
    assert seen == [3, 7]
    assert list((tmp_path / REQUESTS).iterdir()) == []


def test_a_run_that_does_not_answer_is_not_waited_for_and_forgets(tmp_path: Path):
    hold = Hold(tmp_path)
    with pytest.raises(SettingsError, match=r"did not answer within 0\.2 s"):
        ask(tmp_path, {"do": "list"}, limit_s=0.2)
    assert list((tmp_path / REQUESTS).iterdir()) == []
    hold.close()


def test_what_was_asked_of_an_earlier_process_is_not_done_by_the_next(tmp_path: Path):
    folder = tmp_path / REQUESTS
    folder.mkdir()
    (folder / "1-a.ask").write_text('{"do": "remove", "count": 3}')
    Requests(tmp_path).serve(lambda request: pytest.fail(f"did {request}"))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[1", "\x00"])
def test_a_broken_request_is_refused_and_the_run_goes_on(tmp_path: Path, text: str):
    requests, folder = Requests(tmp_path), tmp_path / REQUESTS
    folder.mkdir()
    (folder / "1-a.ask").write_text(text)
    requests.serve(lambda request: pytest.fail(f"did {request}"))
    assert "refused" in json.loads((folder / "1-a.answer").read_text())
