"""The ends of a process: Ctrl-C and SIGTERM on its way up, and threads that were given up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAY_BE_LEFT = "may be left"
"""Name of a thread that the process does not wait for at its end."""


def end_if_one_is_left(code: int) -> None:
    """Ends the process at once if such a thread still works: the interpreter's own end can abort in its midst."""
    if any(thread.name == MAY_BE_LEFT for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM is a Ctrl-C inside: processes are ended, files are closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM come after what is inside, not in its midst; whatever handlers that sets are undone.

    A library that handles SIGTERM below Python, as Ray does once it is half up, still ends the process by it.

    Raises:
        KeyboardInterrupt: at the end, if one came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
