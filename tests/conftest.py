"""Shapes are enforced in the test run, and quick tests come first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jaxtyping import install_import_hook

# Before anything imports these rooms; in production the annotations cost nothing.
install_import_hook(["tba.policy", "tba.batch", "tba.objectives"], "beartype.beartype")

LAST = ("test_trainer_api", "test_loop", "test_cli", "test_resume", "test_cluster")
"""Files that train or start processes, quickest first; all others run before them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
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
