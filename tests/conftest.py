"""Shapes are enforced in the test run, quick tests come first, and a machine's cores are shared out.

With `-n`, a file's tests stay together in one process, and those that start Ray are in one or two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

# Before anything imports these rooms; in production the annotations cost nothing.
install_import_hook(["tba.policy", "tba.batch", "tba.objectives"], "beartype.beartype")

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; also for the processes of tests

RAY = {"test_cluster": "ray", "test_cluster_replay": "ray", "test_elastic": "more ray", "test_publishing": "more ray",
       "test_cluster_ranks": "more ray"}
"""Files that start Ray: with workers the first ones come before all other files, the rest after them."""
LAST = ("test_trainer_api", "test_loop", "test_cli", "test_resume")
"""Files that train or start processes, quickest first; all others but those of Ray run before them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            stem = Path(nodeid.split("::")[0]).stem
            return RAY.get(stem, stem)

    return Together(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_workers = "PYTEST_XDIST_WORKER" in os.environ

    def place(item: pytest.Item) -> int:
        if item.path.stem in RAY:
            return -1 if has_workers and RAY[item.path.stem] == "ray" else len(LAST) + 1
        return next((n for n, name in enumerate(LAST, 1) if item.path.stem.startswith(name)), 0)

    items.sort(key=place)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in a fixed order, whatever the machine's cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
