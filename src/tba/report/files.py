"""A page is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(page: str, target: Path) -> None:
    """Replaces `target` by a page; OSError if it cannot be written, and then an older page stays."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(page.encode("utf-8", errors="replace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
