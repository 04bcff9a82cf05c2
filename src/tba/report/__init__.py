"""Run directory to one self-contained HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.report.page import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    if name == "write_report":
        from tba.report.page import write_report

        return write_report
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}."
    )
