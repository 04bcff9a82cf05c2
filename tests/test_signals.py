"""Ctrl-C and SIGTERM while a run is on its way up."""

from __future__ import annotations

import os
import signal

import pytest

from tba.signals import interrupts_held, terminated_as_interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_comes_after_what_it_would_have_torn(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    done: list[str] = []

    def start() -> None:
        with interrupts_held():
            os.kill(os.getpid(), number)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the library inside does
            done.append("started")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["started"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_sigterm_is_a_ctrl_c_inside_and_what_it_was_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def start() -> None:
        with terminated_as_interrupted():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert signal.getsignal(signal.SIGTERM) == before
