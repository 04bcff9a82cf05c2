"""Saves and restores a whole run, atomically: a folder without its COMPLETE mark does not count."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

MARK = "COMPLETE"
FORMAT = 1
"""Version of the folder's layout."""
_STEP = re.compile(r"(?:partial_)?step_(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or is not there; the message says what remains."""


def save(run_dir: Path, step: int, write: Callable[[Path], None], facts: Mapping[str, Any], *, keep: int) -> Path:
    """Writes `checkpoints/step_<step>`: what `write` puts into the folder, `facts` as JSON, then the mark.

    The folder appears under its name only when it is whole. Older complete ones beyond `keep` are removed
    afterwards.

    Raises:
        CheckpointError: writing failed (disk full, say); older checkpoints are untouched.
    """
    parent = run_dir / "checkpoints"
    final = parent / f"step_{step}"
    partial = parent / f"partial_step_{step}"
    try:
        parent.mkdir(exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        (partial / "run.json").write_text(json.dumps({"format": FORMAT, "step": step, **facts}), "utf-8")
        for path in partial.iterdir():
            _to_disk(path)
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        (partial / MARK).write_text(json.dumps(sizes), "utf-8")
        _to_disk(partial)
        _remove(final)
        os.replace(partial, final)
        _to_disk(parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {step} in {parent} was not written ({error}); older checkpoints are intact."
        ) from error
    for _, old in complete(run_dir)[:-keep]:
        _remove(old)
    return final


def _remove(folder: Path) -> None:
    """Removes a checkpoint, its mark first, so that it does not count while half of it is gone."""
    with contextlib.suppress(OSError):
        (folder / MARK).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def complete(run_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints, oldest first; one that has lost files or parts of them is not."""
    found = [
        (int(match[1]), path)
        for path in (run_dir / "checkpoints").glob("*step_*")
        if (match := _STEP.fullmatch(path.name)) and (path / MARK).is_file() and not damage(path)
    ]
    return sorted(found)


def damage(path: Path) -> str:
    """Which file of a finished checkpoint is gone or of another size than it was written with; '' if none is."""
    try:
        sizes: dict[str, int] = json.loads((path / MARK).read_text("utf-8"))
    except (OSError, ValueError):
        return MARK
    found = {file.name: file.stat().st_size for file in path.iterdir()}
    return next((name for name, size in sizes.items() if found.get(name) != size), "")


def incomplete(run_dir: Path) -> list[Path]:
    """Folders in `checkpoints/` that were not finished, or are damaged."""
    whole = {path for _, path in complete(run_dir)}
    return sorted(path for path in (run_dir / "checkpoints").glob("*") if path.is_dir() and path not in whole)


def facts_of(path: Path) -> dict[str, Any]:
    """What `save` was given as facts.

    Raises:
        CheckpointError: the folder is of another format.
    """
    facts = json.loads((path / "run.json").read_text("utf-8"))
    if facts["format"] != FORMAT:
        raise CheckpointError(f"{path} is of format {facts['format']}; this version reads format {FORMAT}.")
    return facts


def _to_disk(path: Path) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
