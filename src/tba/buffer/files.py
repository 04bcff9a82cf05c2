"""The replay buffer on disk: Parquet files written once and shared, and an index of what is alive."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer import columns
from tba.buffer.ledger import Tally
from tba.buffer.restore import restore
from tba.buffer.storage import Storage

SCHEMA = 2
"""Version of the files."""
STEMS = ("trajectories", "prompts", "index", "tally")
HEAD = "buffer.json"
"""Names the files that count; what it does not name is left over from a save that was cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file that does not change any more."""

    name: str
    device: int
    inode: int

    def is_at(self, path: Path) -> bool:
        """Whether `path` is this very file."""
        try:
            found = path.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


class Files:
    """What of a storage has been written, and where, so that the next save writes only what is new."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._head: Written | None = None
        self._next = 0
        self._prompts: list[tuple[int, int, Written]] = []

    def save(self, path: Path, storage: Storage, prompts: Tally, state: Mapping[str, Any]) -> None:
        """Writes what is new into `path`, links the rest, then the head, in one move; then removes what is old."""
        storage.close_segment()
        storage.merge_small()
        home = self._home(path)
        unwritten = [key for key, s in storage.segments.items() if not self._link(path, home, s.file)]
        for key in unwritten:
            whole = storage.whole(key)
            whole.file = self._write(path, "trajectories", columns.of_segment(whole, storage))
        self._save_prompts(path, home, storage)
        index = self._write(path, "index", columns.of_index(storage))
        tally = self._write(path, "tally", columns.of_tally(prompts))
        head = {
            "schema": SCHEMA, **state, "next_number": storage.next_number, "next_segment": storage.next_segment,
            "next_file": self._next, "window_from": storage.window_from, "index": index.name, "tally": tally.name,
            "prompts": [[first, end, file.name] for first, end, file in self._prompts],
            "trajectories": [[key, segment.file.name] for key, segment in storage.segments.items()],
        }
        partial = path / f"{HEAD}.partial"
        partial.write_text(json.dumps(head, allow_nan=False), "utf-8")
        to_disk(partial)
        os.replace(partial, path / HEAD)
        self._folder, self._head = path, _written(path / HEAD)
        to_disk(path)
        named = set(_names_in(head))
        for stem in STEMS:
            for file in path.glob(f"{stem}-*.parquet"):
                if file.name not in named:
                    file.unlink()

    def load(self, path: Path, storage: Storage) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Fills an empty storage from `path`; returns the state that `save` was given, and the prompts' sums.

        Raises:
            ValueError: the files are of another schema version, do not belong together, or are those of shards.
        """
        if not (path / HEAD).exists():
            raise ValueError(f"{path} holds no {HEAD}, so no buffer of one piece; buffer.shards must be what it was "
                             f"when the buffer was saved.")
        head = json.loads((path / HEAD).read_text("utf-8"))
        if head["schema"] != SCHEMA:
            raise ValueError(f"{path} holds a buffer of schema {head['schema']}; this version reads schema {SCHEMA}.")
        self._folder, self._head, self._next = path, _written(path / HEAD), head["next_file"]
        for first, end, name in head["prompts"]:
            for prompt in columns.to_prompts(_read(path / name)):
                storage.pool_of(prompt)
            self._prompts.append((first, end, _written(path / name)))
        rows: dict[int, dict[str, np.ndarray]] = {}
        for key, name in head["trajectories"]:
            segment, rows[key] = columns.to_segment(_read(path / name))
            segment.file = _written(path / name)
            storage.segments[key] = segment
        storage.next_number, storage.next_segment = head["next_number"], head["next_segment"]
        storage.window_from = head["window_from"]
        try:
            restore(storage, rows, columns.to_arrays(_read(path / head["index"])))
        except KeyError as error:
            raise ValueError(f"{path}: the index names trajectories that no file holds ({error}).") from error
        sums = {name: array.tolist() for name, array in columns.to_arrays(_read(path / head["tally"])).items()}
        return head, sums

    # ---- inside ----

    def _save_prompts(self, path: Path, home: Path, storage: Storage) -> None:
        """Prompts first seen since the last save are a file of their own; small neighbours become one."""
        ranges: list[tuple[int, int, Written | None]] = [*self._prompts]
        if (seen := ranges[-1][1] if ranges else 0) < len(storage.pools):
            ranges.append((seen, len(storage.pools), None))
        while len(ranges) > 1 and ranges[-1][1] - ranges[-1][0] > (ranges[-2][1] - ranges[-2][0]) // 2:
            (first, _, _), (_, end, _) = ranges[-2:]
            ranges[-2:] = [(first, end, None)]
        self._prompts = []
        for first, end, file in ranges:
            if file is None or not self._link(path, home, file):
                file = self._write(path, "prompts", columns.of_prompts(storage.pools[first:end]))
            self._prompts.append((first, end, file))

    def _home(self, path: Path) -> Path:
        """The folder of the last save: where it was, in `path`, or, if it or the folder that it is in was given another
        name, beside `path` or in a folder beside that of `path`.
        """
        if self._folder is None or self._head is None:
            return path
        beside = sorted(f for f in path.parent.iterdir() if f.is_dir())
        for folder in (self._folder, path, *beside, *sorted(path.parent.parent.glob(f"*/{self._folder.name}"))):
            if self._head.is_at(folder / self._head.name):
                return folder
        return path

    def _link(self, path: Path, home: Path, file: Written | None) -> bool:
        """Whether `path` holds the file now, by a link if it did not."""
        if file is None:
            return False
        if file.is_at(path / file.name):
            return True
        if not file.is_at(home / file.name):
            return False
        try:
            os.link(home / file.name, path / file.name)
        except OSError:  # the file system has no links, or the name is taken: write it instead
            return False
        return True

    def _write(self, path: Path, stem: str, table: Any) -> Written:
        import pyarrow.parquet as pq

        while (file := path / f"{stem}-{self._next}.parquet").exists():
            self._next += 1
        self._next += 1
        pq.write_table(table, file, compression="zstd", use_dictionary=False, write_statistics=False)
        to_disk(file)
        return _written(file)


def _names_in(head: Mapping[str, Any]) -> Sequence[str]:
    return [head["index"], head["tally"], *(p[-1] for p in head["prompts"]), *(t[-1] for t in head["trajectories"])]


def _read(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path).read()


def _written(path: Path) -> Written:
    found = path.stat()
    return Written(name=path.name, device=found.st_dev, inode=found.st_ino)


def to_disk(path: Path) -> None:
    """Waits until a file or the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


