"""Functions of a script, lambdas and closures too, as bytes that other processes call them from."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_MIB = 256
"""Size of all functions with what they hold; more belongs into a file that they read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Functions by name, as bytes. They only ever travel through pipes and Ray, and are never read from a file."""

    packed: bytes
    names: tuple[str, ...]


def packed(functions: Mapping[str, Callable[..., Any]]) -> tuple[Carried, list[str]]:
    """The functions as bytes, and what is wrong with those that cannot be sent.

    What a script, a notebook or a function defines goes by value; what a module defines goes by name.
    """
    from ray import cloudpickle

    sent: dict[str, bytes] = {}
    problems: list[str] = []
    for name, function in functions.items():
        try:
            sent[name] = cloudpickle.dumps(function)  # pyright: ignore[reportPrivateImportUsage]
        except Exception as error:
            # Pickling runs methods of whatever the function holds.
            problems.append(
                f"reward function {name!r} cannot be sent to the process that scores: {type(error).__name__}: {error}; "
                f"make what it holds (a client, a lock, an open file) inside the function, at its first call."
            )
    whole = pickle.dumps(sent)
    if len(whole) > MOST_MIB << 20:
        problems.append(
            f"the reward functions with what they hold take {len(whole) >> 20} MiB, more than {MOST_MIB}; have them "
            f"read it from a file."
        )
    return Carried(packed=whole, names=tuple(functions)), problems


def unpacked(whole: bytes) -> dict[str, Callable[..., Any]]:
    """The functions of `packed`.

    Raises:
        ValueError: one cannot be made again: a module that it needs is not here.
    """
    found = {}
    for name, one in pickle.loads(whole).items():
        try:
            found[name] = pickle.loads(one)
        except Exception as error:
            # Unpickling imports what the function needs, which may raise anything.
            raise ValueError(
                f"reward function {name!r} cannot be made again in the process that scores: {type(error).__name__}: "
                f"{error}"
            ) from error
    return found
