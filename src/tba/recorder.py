"""What entered the loss of past steps, as Parquet, so that it can be computed again."""

# Shape legend: N trajectories of a micro-batch, U distinct ones among them, T positions.

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.batch import MicroBatch, Rows
from tba.buffer.columns import utf8
from tba.buffer.entries import Draw
from tba.loss import completion_mask, widened
from tba.settings import SettingsError

SCHEMA = 1
"""Version of the files' columns, kept in their metadata as `tba_schema`."""
FILES = 64
"""Files kept, at most; each holds its part of the bound on their size, or one step."""
TOGETHER = 8
"""Recorded steps that are written at a time, if no checkpoint comes before."""
_NAME = re.compile(r"steps-\d+\.parquet")
FOLDER = "steps"
"""Where the files are, in a run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a group of a batch comes from, for people."""

    text: str
    """The prompt as text."""
    sampler: str
    """Which of the buffer's samplers drew the group."""
    numbers: tuple[int, ...]
    """[K] what names its trajectories in the buffer's files."""

    @staticmethod
    def of(draw: Draw) -> Source:
        """That of a draw; the number of a group is the place of its draw."""
        return Source(text=draw.prompt.text, sampler=draw.sampler, numbers=draw.numbers)


UNKNOWN = Source(text="", sampler="", numbers=())
"""The source of a group that nobody says more of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """What entered the loss of one micro-batch."""

    micro: MicroBatch
    """Reference log-probs are those that the loss saw: of the newest reference."""
    logps_NT: Tensor
    """Policy's log-prob of each target before the step, nats, zero outside completions."""
    log_z_N: Tensor | None
    """Nats; None unless learned."""


class Recorder:
    """Keeps the newest recorded steps of a run in few files of Parquet, one row a trajectory.

    Each file holds the steps from that in its name to that before the next file's. The newest is written again, in
    one move, whenever steps come to it, until it has its share of the bound; then another is begun. The share is
    small, and counted before compression, so that writing again costs little.
    """

    def __init__(self, folder: Path, *, every: int, max_mib: int, keeps_logps: bool) -> None:
        """Records each `every`-th step into `folder`; beyond `max_mib` the oldest file goes.

        `keeps_logps`: whether the buffer keeps the log-prob of each token, so that behaviour log-probs are known.
        """
        import pyarrow as pa
        import pyarrow.parquet

        pa.array([0])  # like the imports above, takes half a second once: now, so that no step pays for it
        self._folder, self._every, self._keeps_logps = folder, every, keeps_logps
        self._most, self._share = max_mib * 2**20, max_mib * 2**20 // FILES
        self._first = 0
        self._open: list[Any] = []
        self._open_bytes = self._unwritten = 0
        self.lost = 0
        """Steps that could not be written, the disk being full."""

    def is_due(self, step: int) -> bool:
        """Whether `step` is to be recorded whatever its loss."""
        return step % self._every == 0

    def add(
        self, step: int, entered: Sequence[Entered], sources: Sequence[Source], facts: Mapping[str, float]
    ) -> None:
        """Records a step; `facts` are its `round`, `policy_version`, `beta`, `prior` and `loss`."""
        import pyarrow as pa

        if not self._open:
            self._first = step
        parts = [
            pa.table(_columns(one, place, sources, self._keeps_logps), schema=_schema_of_rows())
            for place, one in enumerate(entered)
        ]
        table = pa.concat_tables(parts)
        for place, (name, value) in enumerate({"step": step, **facts}.items()):
            kind = _facts()[name]
            table = table.add_column(place, pa.field(name, kind), pa.repeat(pa.scalar(value, kind), len(table)))
        self._open.append(table)
        self._open_bytes += table.nbytes
        self._unwritten += 1
        if self._unwritten == TOGETHER or self._open_bytes >= self._share:
            self.flush()

    def flush(self) -> None:
        """Writes what is not written yet. If that fails the steps are counted as lost: training goes on."""
        if not self._unwritten:
            return
        try:
            self._write()
        except OSError:
            self.lost += self._unwritten
            del self._open[-self._unwritten :]
            self._open_bytes = sum(table.nbytes for table in self._open)
        self._unwritten = 0
        if self._open_bytes >= self._share:
            self._open, self._open_bytes = [], 0
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Removes files until those that remain, and one more, are within the bounds."""
        sizes = {file: file.stat().st_size for file in _files(self._folder)}
        for file in [*sizes][:-1]:
            if len(sizes) >= FILES or sum(sizes.values()) > self._most - self._share:
                del sizes[file]
                file.unlink()

    def _write(self) -> None:
        """Puts the newest file in place, whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.concat_tables(self._open, promote_options="default")  # older versions recorded fewer columns
        table = table.replace_schema_metadata({"tba_schema": str(SCHEMA)})
        repeated = [field.name for field in table.schema if not pa.types.is_list(field.type)]
        partial = self._folder / ".partial"
        try:
            self._folder.mkdir(exist_ok=True)
            with partial.open("wb") as file:
                pq.write_table(table, file, compression="zstd", use_dictionary=repeated)  # pyright: ignore
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._folder / f"steps-{self._first:09d}.parquet")
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    def rewind(self, step: int) -> None:
        """Forgets the steps after `step`: the resumed run records what really happens."""
        import pyarrow.compute as pc

        self._open, self._open_bytes, self._unwritten = [], 0, 0
        for file in _files(self._folder):
            if _first_of(file) > step:
                file.unlink()
        for file in _files(self._folder)[-1:]:
            try:
                table = _read(file)
            except SettingsError:  # it cannot be gone on with; what it held is lost already
                file.unlink()
                continue
            kept = table.filter(pc.less_equal(table["step"], step))  # pyright: ignore
            is_cut = kept.num_rows < table.num_rows
            if is_cut or kept.nbytes < self._share:
                self._first, self._open, self._open_bytes = _first_of(file), [kept], kept.nbytes
                self._unwritten = int(is_cut)
                self.flush()


# ---- columns ----------------------------------------------------------------------------------------


def _facts() -> dict[str, Any]:
    import pyarrow as pa

    return {
        "step": pa.int64(), "round": pa.int64(), "policy_version": pa.int64(), "beta": pa.float64(),
        "prior": pa.float64(), "loss": pa.float64(),
    }


def _schema_of_rows() -> Any:
    import pyarrow as pa

    ids, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    return pa.schema([
        ("micro_batch", pa.int32()), ("group", pa.int32()), ("prompt_id", pa.string()), ("prompt", pa.string()),
        ("sampler", pa.string()), ("number", pa.int64()), ("version", pa.int64()), ("reward", pa.float32()),
        ("searcher_logp", pa.float32()), ("ref_logp", pa.float32()), ("ref_version", pa.int64()),
        ("log_z", pa.float32()), ("prompt_tokens", ids), ("tokens", ids), ("logps", floats),
        ("behaviour_logps", floats), ("ref_logps", floats),
    ])


def _columns(one: Entered, place: int, sources: Sequence[Source], keeps_logps: bool) -> dict[str, Any]:
    """A micro-batch's rows, by column; those of a group in the order of its draw."""
    import pyarrow as pa

    micro, count = one.micro, len(one.micro.group_N)
    groups: list[int] = micro.group_N.tolist()
    sizes = Counter(groups)
    of = {group: sources[group] if sources else UNKNOWN for group in sizes}
    texts = {group: utf8(source.text) for group, source in of.items()}
    ids = {group: utf8(name) for group, name in dict(zip(groups, micro.prompt_ids, strict=True)).items()}
    mask_NT = completion_mask(micro)
    target_NT = _wide(micro, [rows.target_NT for rows in micro.rows])
    prompt_NT = _wide(micro, [_prompt_mask(rows) for rows in micro.rows])
    input_NT = _wide(micro, [rows.input_NT for rows in micro.rows])
    return {
        "micro_batch": np.full(count, place), "group": groups, "prompt_id": [ids[group] for group in groups],
        "prompt": [texts[group] for group in groups], "sampler": [of[group].sampler for group in groups],
        "number": [n for group, size in sizes.items() for n in of[group].numbers or (None,) * size],
        "version": micro.version_N.numpy(), "reward": micro.reward_N.numpy(),
        "searcher_logp": micro.searcher_logp_N.numpy(), "ref_logp": micro.ref_logp_N.numpy(),
        "ref_version": micro.ref_version_N.numpy(),
        "log_z": pa.nulls(count, pa.float32()) if one.log_z_N is None else one.log_z_N.numpy(),
        "prompt_tokens": _lists(input_NT.int(), prompt_NT), "tokens": _lists(target_NT.int(), mask_NT),
        "logps": _lists(one.logps_NT.cpu(), mask_NT),
        "behaviour_logps": _lists(micro.behaviour_logps_NT if keeps_logps else None, mask_NT),
        "ref_logps": _lists(micro.ref_logps_NT, mask_NT),
    }


def _wide(micro: MicroBatch, pieces: Sequence[Tensor]) -> Tensor:
    return widened(pieces)[micro.row_N]


def _prompt_mask(rows: Rows) -> Tensor:
    """Places of `input_NT` that hold a prompt's id: those up to the one that predicts the first completion id."""
    start_N1 = rows.completion_NT.int().argmax(1, keepdim=True)
    return torch.arange(rows.input_NT.shape[1]) <= start_N1


def _lists(value_NT: Tensor | None, mask_NT: Tensor) -> Any:
    """One list a row, of the values where the mask is set; null for each if there are no values."""
    import pyarrow as pa

    if value_NT is None:
        return pa.nulls(len(mask_NT), pa.list_(pa.float32()))
    ends = np.concatenate([[0], mask_NT.sum(1).cumsum(0).numpy()]).astype(np.int32)
    return pa.ListArray.from_arrays(ends, pa.array(value_NT[mask_NT].numpy()))


# ---- reading ----------------------------------------------------------------------------------------


def recorded_steps(run: Path) -> list[int]:
    """The steps that the files of a run directory hold, in order."""
    found = {step for file in _files(run / FOLDER) for step in _read(file, ["step"])["step"].unique().to_pylist()}
    return sorted(found)


def rows_of_step(run: Path, step: int) -> list[dict[str, Any]]:
    """What was recorded of a step, one dictionary a trajectory; empty if it was not recorded."""
    import pyarrow.compute as pc

    files = [file for file in _files(run / FOLDER) if _first_of(file) <= step]
    if not files:
        return []
    table = _read(files[-1])
    return table.filter(pc.equal(table["step"], step)).to_pylist()  # pyright: ignore


def _files(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted((f for f in folder.glob("steps-*.parquet") if _NAME.fullmatch(f.name)), key=_first_of)


def _first_of(file: Path) -> int:
    return int(file.stem.removeprefix("steps-"))


def _read(file: Path, columns: list[str] | None = None) -> Any:
    """The table of a file.

    Raises:
        SettingsError: it is damaged.
    """
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file, columns=columns)
    except (OSError, ValueError) as error:
        raise SettingsError([f"{str(file)!r} is damaged ({error}); remove it, and its steps are gone."]) from error
    lacking = [name for name in columns or _schema_of_rows().names if name not in table.column_names]
    if lacking:
        raise SettingsError([f"{str(file)!r} has no column {lacking[0]!r}; remove it, and its steps are gone."])
    return table
