"""How a process of an async run starts: threads, niceness, garbage, the parts it needs."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import ray

from tba.reading import check_settings
from tba.settings import Settings

YIELDS = 10
"""How much nicer depot and searchers are than the trainer they share a machine with: who is ahead makes room."""


def settle(*, nicer_by: int = 0) -> None:
    """Ends the start of a process: it makes room by `nicer_by`, and spares the garbage collector what is there now.

    What the libraries hold after their import takes the collector 0.2 s a pass, in which the process stands still.
    """
    threads = Path("/proc/self/task")
    if threads.is_dir():  # niceness is each thread's own here, and the caller may be one of several
        for thread in map(int, os.listdir(threads)):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nicer_by)
    else:
        os.nice(nicer_by)
    gc.collect()
    gc.freeze()


def check_run_dir(run_dir: str, who: str) -> None:
    """FileNotFoundError if the run directory is not there on this node; `who` is to write into it."""
    if not Path(run_dir).is_dir():
        raise FileNotFoundError(
            f"the {who} is on node {ray.util.get_node_ip_address()}, where the run directory {run_dir} is not there; "
            f"choose one with --run that all nodes share."
        )


def use_threads(threads: int) -> None:
    """Makes the calling thread compute with `threads` threads."""
    import torch

    torch.set_num_threads(threads)


def start_process(
    tree: dict[str, Any], threads: int, brought: object = None, *, on_host: bool = False
) -> tuple[Settings, Any, Any]:
    """Settings, task and start policy in a new process that is to use `threads` threads.

    `brought` is what a script hands over for scoring. `on_host`: the policy stays in host memory, to be cut there.
    """
    use_threads(threads)
    from tba import assembly

    settings = check_settings(tree)
    task = assembly.make_task_of(settings, brought)
    has_none = settings.policy.device == "auto" and not ray.get_gpu_ids()  # no GPU was set aside for it
    device = "cpu" if on_host or has_none else None
    return settings, task, assembly.make_policy(settings, task, device)
