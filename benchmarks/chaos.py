"""Runs under attack: a storm of killed searchers and failing scorers, kill -9 and resume, many short runs.

    python benchmarks/chaos.py storm --task enumerable --minutes 10 --json chaos.json
    python benchmarks/chaos.py storm --task arithmetic --minutes 10 --json chaos.json
    python benchmarks/chaos.py kills --mode lockstep --moments 20 --json chaos.json
    python benchmarks/chaos.py kills --mode async --moments 20 --json chaos.json
    python benchmarks/chaos.py short --runs 50 --json chaos.json

Linux only: processes are found in /proc. Each part is added to the JSON file, in place of an older one of its name.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chaos_kills
import chaos_short
import chaos_storm


def rows_of(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A part's figures, as they are shown."""
    def shown(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4g}"
        if isinstance(value, list):
            return ", ".join(map(shown, value)) or "none"
        if isinstance(value, dict):
            return ", ".join(f"{name} {shown(one)}" for name, one in value.items()) or "none"
        return str(value)

    return [(name, shown(value)) for name, value in found.items() if name not in ("part", "met")]


def table(parts: Sequence[Mapping[str, Any]]) -> str:
    """The parts as Markdown."""
    lines = []
    for found in parts:
        lines += [f"## {found['part']}", "", "| figure | value |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in rows_of(found)] + [""]
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    storm = parts.add_parser("storm", help="killed searchers, failing scorers, a lost node and a new one")
    storm.add_argument("--task", choices=[*chaos_storm.KIND], default="enumerable")
    storm.add_argument("--minutes", type=float, default=10.0)
    storm.add_argument("--seeds", type=int, default=3, help="calm runs to compare with")
    kills = parts.add_parser("kills", help="kill -9 at random moments, then tba resume")
    kills.add_argument("--mode", choices=["lockstep", "async"], default="async")
    kills.add_argument("--moments", type=int, default=20)
    kills.add_argument("--steps", type=int, default=320)
    kills.add_argument("--seed", type=int, default=0)
    kills.add_argument("--warm", action="store_true", help="lockstep: fork from a process that has imported everything")
    kills.add_argument("--most-minutes", type=float, default=math.inf, help="begin no run after these")
    short = parts.add_parser("short", help="short runs in a row")
    short.add_argument("--runs", type=int, default=50)
    for part in (storm, kills, short):
        part.add_argument("--json", type=Path)
        part.add_argument("--keep", type=Path, help="a new folder for the runs, which is kept")
    return parser.parse_args(arguments)


def measured(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The part that was chosen."""
    if chosen.part == "storm":
        return chaos_storm.measure(chosen.task, chosen.minutes, seeds=chosen.seeds, folder=folder)
    if chosen.part == "kills":
        return chaos_kills.measure(
            chosen.mode, chosen.moments, seed=chosen.seed, steps=chosen.steps, folder=folder, is_warm=chosen.warm,
            most_minutes=chosen.most_minutes,
        )
    return chaos_short.measure(chosen.runs, folder=folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one part; 0 if its bar holds."""
    chosen = parsed(arguments)
    if chosen.keep is None:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            found = measured(chosen, Path(folder))
    else:
        chosen.keep.mkdir(parents=True)
        found = measured(chosen, chosen.keep.resolve())
    print(table([found]))
    if chosen.json is not None:
        parts = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
        parts[found["part"]] = found
        chosen.json.write_text(json.dumps(parts, indent=1) + "\n")
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
