"""Segments, prompts and index as tables with named columns, and back."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from tba.buffer.ledger import Tally
from tba.buffer.rows import Pool
from tba.buffer.segments import FINISHES, RAGGED, Ragged, Segment
from tba.buffer.storage import Storage
from tba.records import Prompt

OF_ROWS = ("number", "pool", "version", "reward", "digest", "copy")
"""Columns of a segment's table that the storage keeps by row."""
INDEX = ("number", "uses", "slot", "window")
"""Columns of the index: what changes while a trajectory is held."""
TEXTS = ("text", "reward_parts")


def of_segment(segment: Segment, storage: Storage) -> Any:
    """A table of a segment of which nothing has left."""
    import pyarrow as pa

    rows = np.frombuffer(segment.rows, np.int32)
    table = {name: pa.array(storage.rows.view(name)[rows]) for name in OF_ROWS}
    for name, one in segment.lists.items():
        table[name] = _texts(one) if name in TEXTS else _lists(one)
    for name, column in segment.numbers.items():
        table[name] = pa.array(np.array(column))
    table["finish"] = pa.array([FINISHES[at] for at in segment.numbers["finish"]])
    if segment.logp:
        table["logp"] = pa.array(np.array(segment.logp))
    return pa.table(table)


def to_segment(table: Any) -> tuple[Segment, dict[str, np.ndarray]]:
    """A closed segment, all of whose rows are still to be set, and its columns for the storage."""
    segment = Segment()
    count = table.num_rows
    for name, one in segment.lists.items():
        column = table[name].combine_chunks()
        if name in TEXTS:
            column = column.cast("binary")
        offsets, values = _flat(column, RAGGED[name])
        one.extend_flat(values, np.diff(offsets).tolist())
    for name, numbers in segment.numbers.items():
        values = table[name].to_pylist()
        numbers.extend([FINISHES.index(v) for v in values] if name == "finish" else values)
    if "logp" in table.column_names:
        segment.logp.extend(table["logp"].to_pylist())
    segment.rows = array("i", [-1]) * count
    segment.close()
    found = {name: table[name].to_numpy() for name in OF_ROWS}
    found["length"] = np.diff(segment.lists["tokens"].starts_N1)
    return segment, found


def of_index(storage: Storage) -> Any:
    """A table of what changes, one row per trajectory held, in order of insertion."""
    import pyarrow as pa

    held = storage.rows.held()
    return pa.table({name: pa.array(storage.rows.view(name)[held]) for name in INDEX})


def of_tally(tally: Tally) -> Any:
    """A table of the sums of each prompt, in the order in which prompts were first seen."""
    import pyarrow as pa

    return pa.table({name: pa.array(np.array(column)) for name, column in tally.sums.items()})


def to_arrays(table: Any) -> dict[str, np.ndarray]:
    """Every column of a table of numbers."""
    return {name: table[name].to_numpy() for name in table.column_names}


def of_prompts(pools: Sequence[Pool]) -> Any:
    """A table of prompts; ids and columns are JSON, which holds what UTF-8 cannot."""
    import pyarrow as pa

    prompts = [pool.prompt for pool in pools]
    return pa.table({
        "pool": pa.array([pool.number for pool in pools], pa.int64()),
        "id": pa.array([json.dumps(p.id) for p in prompts]),
        "tokens": pa.array([list(p.tokens) for p in prompts], pa.list_(pa.int64())),
        "text": pa.array([utf8(p.text) for p in prompts]),
        "columns": pa.array([json.dumps(dict(p.columns)) for p in prompts]),
    })


def to_prompts(table: Any) -> list[Prompt]:
    """The prompts of a table that `of_prompts` made."""
    return [
        Prompt(id=json.loads(row["id"]), tokens=tuple(row["tokens"]), text=row["text"],
               columns=json.loads(row["columns"]))
        for row in table.to_pylist()
    ]


def utf8(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot hold, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _lists(one: Ragged) -> Any:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(one.starts_N1), pa.array(one.values))


def _texts(one: Ragged) -> Any:
    import pyarrow as pa

    data = one.values.tobytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return pa.array([utf8(one[at].tobytes().decode("utf-8", "surrogatepass")) for at in range(len(one))])
    return pa.Array.from_buffers(pa.string(), len(one), [None, pa.py_buffer(one.starts_N1), pa.py_buffer(data)])


def _flat(column: Any, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and values of a column of lists or of bytes."""
    if kind == "uint8":
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
        values = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
    else:
        ends, values = column.offsets.to_numpy(), column.values.to_numpy()
    return ends, values[ends[0] : ends[-1]]
