"""Small records for the tests of the rooms between searchers and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from tba.reading import check_settings, recipe_text
from tba.records import Completion, Group, Lease, Prompt, Trajectory, Unscored
from tba.settings import Settings


def a_prompt(name: str = "p", **more: Any) -> Prompt:
    return Prompt(**{"id": name, "tokens": (1, 7), "text": f"ask {name}", **more})


def a_completion(tokens: Sequence[int] = (5, 2), *, version: int = 0, text: str = "x") -> Completion:
    logps = tuple(-0.25 * (place + 1) for place in range(len(tokens)))
    return Completion(tokens=tuple(tokens), text=text, logps=logps, version=version, finish="stop")


def a_trajectory(
    name: str = "p", tokens: Sequence[int] = (5, 2), reward: float = 0.3, *, version: int = 0, text: str = "x"
) -> Trajectory:
    return Trajectory(
        prompt_id=name, completion=a_completion(tokens, version=version, text=text), reward=reward, ref_logp=-1.75
    )


def a_group(
    name: str, items: Sequence[tuple[Sequence[int], float]], *, version: int = 0, unscored: Sequence[str] = (),
    **more: Any,
) -> Group:
    """`items` are (ids, reward) of the trajectories; `unscored` are reasons."""
    return Group(
        prompt=a_prompt(name), version=version,
        trajectories=tuple(a_trajectory(name, ids, reward, version=version) for ids, reward in items),
        unscored=tuple(Unscored(completion=a_completion((8, 8, 2), version=version), reason=r) for r in unscored),
        **more,
    )


def an_answer(lease: Lease, *, tokens: Sequence[Sequence[int]] = ((4, 2), (5, 6, 2)), **more: Any) -> Group:
    """What a searcher delivers for a lease."""
    name = lease.prompt.id
    return Group(
        prompt=lease.prompt, number=lease.number, attempt=lease.attempt,
        trajectories=tuple(a_trajectory(name, ids, 0.1 * n, version=more.get("version", 0))
                           for n, ids in enumerate(tokens, 1)),
        **more,
    )


def settings_with(recipe: str = "enumerable", **sections: Any) -> Settings:
    """A built-in recipe's tree with whole values replaced: trainer={"steps": 32}, seed=3."""
    tree = yaml.safe_load(recipe_text(recipe).replace("3e-3", "0.003").replace("3e-4", "0.0003"))
    for name, value in sections.items():
        name = name.rstrip("_")
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return check_settings(tree)


def balances(ledger: dict[str, dict[str, Any]]) -> bool:
    """Delivered = in buffer + evicted + rejected, in trajectories and in tokens."""
    return all(
        account["delivered"]
        == account["in_buffer"] + sum(account["evicted"].values()) + sum(account["rejected"].values())
        for account in (ledger["trajectories"], ledger["tokens"])
    )
