"""The trajectories of a buffer as rows for people and their tools: plain data, JSON lines, Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.columns import utf8
from tba.buffer.entries import Entry
from tba.buffer.memory import ReplayBuffer
from tba.buffer.shards import ShardedBuffer
from tba.records import Prompt

Buffer = ReplayBuffer | ShardedBuffer

SCHEMA = 1
"""Version of an exported Parquet file's columns, kept in its metadata as `tba_schema`."""
PER_PIECE = 10_000
"""Rows turned into columns at a time."""
ORDERS = ("reward", "age", "used")
"""What `ordered` may sort by."""


def ordered(
    buffer: Buffer, most: int, *, top: str | None = None, prompt: str | None = None
) -> list[tuple[Prompt, Entry]]:
    """At most `most` trajectories, of one prompt or of all: the newest first, or those with the highest `top`."""
    found: list[tuple[float, int, ReplayBuffer, int]] = []
    for part in buffer.parts:
        rows = part.storage.rows
        held = rows.held()[::-1]
        if prompt is not None:
            pool = part.storage.by_id.get(prompt)
            held = held[rows.view("pool")[held] == (-1 if pool is None else pool.number)]
        worth = np.zeros(len(held))
        if top is not None:
            column, sign = {"reward": ("reward", 1), "age": ("version", -1), "used": ("uses", 1)}[top]
            worth = sign * rows.view(column)[held]
        for place in np.argsort(-worth, kind="stable")[:most].tolist():
            row = int(held[place])
            found.append((-float(worth[place]), -rows.number[row], part, row))
    found.sort(key=lambda one: one[:2])
    return [part.entry(row) for *_, part, row in found[:most]]


def rows_of(buffer: Buffer) -> Iterator[dict[str, Any]]:
    """Every trajectory, oldest first, as plain data."""
    for prompt, entry in buffer.entries():
        trajectory, completion = entry.trajectory, entry.trajectory.completion
        yield {
            "number": entry.number, "prompt_id": prompt.id, "prompt": prompt.text, "completion": completion.text,
            "tokens": list(completion.tokens), "reward": trajectory.reward,
            "reward_parts": dict(trajectory.reward_parts), "logp": completion.logp,
            "ref_logp": trajectory.ref_logp, "version": completion.version, "finish": completion.finish,
            "uses": entry.uses,
        }


def write_parquet(buffer: Buffer, path: Path) -> None:
    """Writes `rows_of` the buffer into a new file; parts of the reward as JSON.

    Raises:
        FileExistsError: there is such a file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        "number": pa.int64(), "prompt_id": pa.string(), "prompt": pa.string(), "completion": pa.string(),
        "tokens": pa.list_(pa.int32()), "reward": pa.float64(), "reward_parts": pa.string(), "logp": pa.float64(),
        "ref_logp": pa.float64(), "version": pa.int32(), "finish": pa.string(), "uses": pa.int32(),
    }
    schema = pa.schema(list(kinds.items()), metadata={"tba_schema": str(SCHEMA)})
    rows = rows_of(buffer)
    with path.open("xb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while piece := list(islice(rows, PER_PIECE)):
            for row in piece:
                row["reward_parts"] = json.dumps(row["reward_parts"])
                row.update({name: utf8(row[name]) for name in ("prompt_id", "prompt", "completion")})
            writer.write_table(pa.Table.from_pylist(piece, schema=schema))


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes plain rows, which all have the columns of the first, into a new Parquet file.

    Raises:
        FileExistsError: there is such a file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = [{name: utf8(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows]
    table = pa.Table.from_pylist(whole).replace_schema_metadata({"tba_schema": str(SCHEMA)})
    with path.open("xb") as file:
        pq.write_table(table, file, compression="zstd")  # pyright: ignore
