"""The ends of a process: Ctrl-C and SIGTERM while a run is on its way up, and threads that were given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


@pytest.mark.parametrize(("left", "code"), [(True, 3), (False, 0)])
def test_a_thread_that_was_given_up_does_not_keep_the_end_of_the_process(left: bool, code: int) -> None:
    name = "MAY_BE_LEFT" if left else "'another'"
    script = (
        "import atexit, threading\nfrom tba.signals import MAY_BE_LEFT, end_if_one_is_left\n"
        "atexit.register(print, 'the interpreter ends')\nprint('said')\n"
        f"threading.Thread(target=threading.Event().wait, name={name}, daemon=True).start()\n"
        "end_if_one_is_left(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stdout == ("said\n" if left else "said\nthe interpreter ends\n")
