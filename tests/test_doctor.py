"""tba doctor, shell completion, and what a package promises of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from tba import doctor
from tba.cli import main

ROOT = Path(__file__).resolve().parents[1]


def test_what_there_is_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["found"]["torch"] == doctor.version_of("torch")
    assert said["found"]["devices"].startswith("cpu")
    assert float(said["found"]["cores"]) > 0
    for name in doctor.WANTED:
        assert (name in said["found"]) != any(line.startswith(f"{name} is not there") for line in said["missing"])


def test_what_is_short_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "cores", lambda: 0.5)
    monkeypatch.setattr(doctor, "FREE_DISK_GIB", 1e9)
    monkeypatch.setattr(doctor, "NEEDED", ("no-such-package",))
    _, missing = doctor.examine()
    for word in ("0.5 core", "less than 1e+09 GiB free here", "pip install no-such-package"):
        assert any(word in line for line in missing), missing


def test_a_shell_completes_commands() -> None:
    words = {"_TBA_COMPLETE": "complete_bash", "COMP_WORDS": "tba tr", "COMP_CWORD": "1"}
    environment = {**os.environ, **words, "PYTHONPATH": str(ROOT / "src")}
    code = "import sys; sys.argv = ['tba']; from tba.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["train", "try"], done.stderr


def test_the_package_is_typed() -> None:
    assert resources.files("tba").joinpath("py.typed").is_file()
