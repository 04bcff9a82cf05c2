"""The replay buffer on disk: Parquet and JSON with a schema version."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.buffer.entries import Entry
from tba.records import Completion, Prompt, Trajectory

SCHEMA = 2
"""Version of the files."""


def write_files(path: Path, entries: Iterable[Entry], prompts: Sequence[Prompt], state: Mapping[str, Any]) -> None:
    """Writes trajectories as Parquet, prompts and counters as JSON, into the folder `path`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_to_row(entry) for entry in entries]
    columns = {name: [row[name] for row in rows] for name in _schema().names}
    pq.write_table(pa.table(columns, schema=_schema()), path / "trajectories.parquet")
    kept = [
        {"id": p.id, "tokens": list(p.tokens), "text": _utf8(p.text), "columns": dict(p.columns)} for p in prompts
    ]
    (path / "prompts.json").write_text(json.dumps(kept), "utf-8")
    (path / "buffer.json").write_text(json.dumps({"schema": SCHEMA, **state}), "utf-8")


def read_files(path: Path) -> tuple[dict[str, Any], list[Prompt], list[tuple[str, Entry]]]:
    """Counters, prompts in the order first seen, and entries with their prompt ids, oldest first.

    Raises:
        ValueError: the files are of another schema version.
    """
    import pyarrow.parquet as pq

    state = json.loads((path / "buffer.json").read_text("utf-8"))
    if state["schema"] != SCHEMA:
        raise ValueError(f"{path} holds a buffer of schema {state['schema']}; this version reads schema {SCHEMA}.")
    prompts = [
        Prompt(id=p["id"], tokens=tuple(p["tokens"]), text=p["text"], columns=p["columns"])
        for p in json.loads((path / "prompts.json").read_text("utf-8"))
    ]
    rows = pq.read_table(path / "trajectories.parquet").to_pylist()
    return state, prompts, [(json.loads(row["prompt_id"]), _from_row(row)) for row in rows]


def _schema() -> Any:
    import pyarrow as pa

    floats, ids = pa.list_(pa.float64()), pa.list_(pa.int64())
    return pa.schema([
        ("number", pa.int64()), ("uses", pa.int64()), ("prompt_id", pa.string()), ("tokens", ids),
        ("text", pa.string()), ("logps", floats), ("behaviour_logps", floats), ("token_versions", ids),
        ("version", pa.int64()), ("finish", pa.string()), ("reward", pa.float64()), ("reward_parts", pa.string()),
        ("ref_logp", pa.float64()), ("ref_version", pa.int64()),
        ("ref_logps", floats),
    ])


def _to_row(entry: Entry) -> dict[str, Any]:
    trajectory, completion = entry.trajectory, entry.trajectory.completion
    return {
        "number": entry.number, "uses": entry.uses, "prompt_id": json.dumps(trajectory.prompt_id),
        "tokens": list(completion.tokens), "text": _utf8(completion.text), "logps": list(completion.logps),
        "behaviour_logps": list(completion.behaviour_logps), "token_versions": list(completion.token_versions),
        "version": completion.version, "finish": completion.finish, "reward": trajectory.reward,
        "reward_parts": json.dumps(dict(trajectory.reward_parts)), "ref_logp": trajectory.ref_logp,
        "ref_version": trajectory.ref_version, "ref_logps": list(trajectory.ref_logps),
    }


def _from_row(row: dict[str, Any]) -> Entry:
    completion = Completion(
        tokens=tuple(row["tokens"]), text=row["text"], logps=tuple(row["logps"]), version=row["version"],
        finish=row["finish"], behaviour_logps=tuple(row["behaviour_logps"]),
        token_versions=tuple(row["token_versions"]),
    )
    trajectory = Trajectory(
        prompt_id=json.loads(row["prompt_id"]), completion=completion, reward=row["reward"],
        reward_parts=json.loads(row["reward_parts"]), ref_logp=row["ref_logp"], ref_version=row["ref_version"],
        ref_logps=tuple(row["ref_logps"]),
    )
    return Entry(number=row["number"], trajectory=trajectory, uses=row["uses"])


def _utf8(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot hold, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
