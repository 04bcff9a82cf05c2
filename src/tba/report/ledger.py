"""The ledger as a table, each identity checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.report.text import figure, mapping, number, visible

MAX_REASONS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """One identity: a whole and the parts that must add up to it."""

    what: str
    whole: tuple[str, str]
    """Label and number, as text."""
    parts: Sequence[tuple[str, str]]
    verdict: str
    """`yes`, `no` or `not known`."""
    detail: str
    """The sum and by how much it misses; empty where it adds up."""


def balances(ledger: Mapping[str, Any]) -> list[Balance]:
    """The identities of the ledger, in trajectories, tokens and prompts.

    delivered = in buffer + evicted + rejected; leased = delivered + open + lost.
    """
    rows = []
    for what in ("trajectories", "tokens"):
        entry = mapping(ledger.get(what))
        if entry:
            rows.append(
                _balance(
                    what,
                    ("delivered", number(entry.get("delivered"))),
                    (
                        ("in buffer", number(entry.get("in_buffer"))),
                        ("evicted", _total(entry.get("evicted"))),
                        ("rejected", _total(entry.get("rejected"))),
                    ),
                )
            )
    entry = mapping(ledger.get("prompts"))
    if entry:
        rows.append(
            _balance(
                "prompts",
                ("leased", number(entry.get("leased"))),
                tuple((part, number(entry.get(part))) for part in ("delivered", "open", "lost")),
            )
        )
    return rows


def reasons(ledger: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Why trajectories left or never entered: fate, reason, trajectories, tokens."""
    rows = []
    for fate in ("evicted", "rejected"):
        trajectories, tokens = (
            mapping(mapping(ledger.get(what)).get(fate)) for what in ("trajectories", "tokens")
        )
        for reason in sorted({*trajectories, *tokens}):
            rows.append(
                (fate, visible(reason, 80), figure(trajectories.get(reason)), figure(tokens.get(reason)))
            )
    return rows[:MAX_REASONS]


def _total(value: object) -> int | float | None:
    """A number, or the sum of the numbers by reason; None where one of them is no number."""
    if not isinstance(value, Mapping):
        return number(value)
    known = [number(item) for item in value.values()]
    return None if None in known else sum(item for item in known if item is not None)


def _balance(
    what: str, whole: tuple[str, int | float | None], parts: Sequence[tuple[str, int | float | None]]
) -> Balance:
    values = [value for _, value in parts if value is not None]
    verdict, detail = "not known", "a number is missing"
    if whole[1] is not None and len(values) == len(parts):
        total = sum(values)
        verdict, detail = "yes", ""
        if total != whole[1]:
            verdict, detail = "no", f"the parts sum to {figure(total)}, off by {figure(total - whole[1])}"
    return Balance(
        what=what,
        whole=(whole[0], figure(whole[1])),
        verdict=verdict,
        detail=detail,
        parts=[(label, figure(value)) for label, value in parts],
    )
