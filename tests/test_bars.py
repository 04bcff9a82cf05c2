"""The learning results that the project promises, on the built-in recipes; `make bars` runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def trained(folder: Path, *words: str) -> dict[str, Any]:
    """The summary of `tba train` in a process of its own."""
    command = [sys.executable, "-m", "tba", "train", *words, "--run", str(folder / "run"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("words", "most"), [
    (("enumerable",), 0.02),
    (("enumerable", "mode=async", "trainer.steps=320", "trainer.sync_every=8"), 0.02),
    (("enumerable-llama",), 0.03),
])
def test_the_exact_target_is_reached_from_stale_data(
    words: tuple[str, ...], most: float, seed: int, tmp_path: Path
) -> None:
    summary = trained(tmp_path, *words, f"seed={seed}")
    assert summary["start"]["tv"] > 0.4
    assert summary["final"]["tv"] <= most


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_arithmetic_is_learnt_in_time_and_the_trainer_does_not_wait(seed: int, tmp_path: Path) -> None:
    summary = trained(tmp_path, "arithmetic", f"seed={seed}")
    assert summary["start"]["pass@1"] <= 0.45
    assert summary["final"]["pass@1"] >= 0.85
    assert summary["wall_s"] <= 120
    assert summary["trainer"]["wait_share"] <= 0.05
