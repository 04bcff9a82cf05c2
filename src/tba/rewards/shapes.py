"""The shapes of a user's reward function: what each is called with, and what is wrong with others."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tba.records import Completion, Prompt

MESSAGES = "messages"
"""Column of a prompt with the chat messages that it was made of."""
GIVEN = ("prompts", "completions", "completion_ids")
"""What a function of many is called with, besides the columns."""
WITHHELD = ("prompt", "completion", *GIVEN)
"""Columns that no function of many is called with, since their names mean something else."""


class Called:
    """A user's function as a `RewardFunction`: one of (prompt, completions), or one of many, by keyword.

    A function of many takes those that it names of `prompts`, `completions` and `completion_ids`, and of the prompt's
    columns, or all of them if it has `**`: lists of one entry per completion. Of a chat, a prompt is its list of
    messages, and a completion a list of the one message of the assistant. It may be asynchronous.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """`function` has one of the two shapes; see `shape_problem`."""
        self.__name__ = name_of(function)
        self._function = function
        self._names = names_of(function)
        self._runner: asyncio.Runner | None = None

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> Any:
        """What the function gives, or raises."""
        if self._names is None:
            found = self._function(prompt, completions)
        else:
            given = arguments_of(prompt, completions)
            takes = given if "**" in self._names else [name for name in given if name in self._names]
            found = self._function(**{name: given[name] for name in takes})
        return self._awaited(found) if inspect.isawaitable(found) else found

    def _awaited(self, found: Any) -> Any:
        """What an asynchronous function gives; always in the same loop, which clients may be bound to."""
        async def wait() -> Any:
            return await found

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(wait())

    def close(self) -> None:
        """Ends the loop of an asynchronous function."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def arguments_of(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, list[Any]]:
    """Everything that a function of many may be called with: lists of one entry per completion."""
    chat: Any = prompt.columns.get(MESSAGES)
    texts = [completion.text for completion in completions]
    columns: Mapping[str, object] = prompt.columns
    return {
        **{name: [value] * len(texts) for name, value in columns.items() if name not in WITHHELD},
        "prompts": [list(chat) if chat else prompt.text for _ in texts],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else list(texts),
        "completion_ids": [list(completion.tokens) for completion in completions],
    }


def name_of(function: Any) -> str:
    """What the function is called."""
    return getattr(function, "__name__", None) or type(function).__name__


def names_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names by which a function of many is called, `**` for any; None of one of (prompt, completions)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function that is not written in Python nothing is known
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {p.name for p in parameters if p.kind in by_name}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if "prompt" in names or not ({"completions"} & names or takes_any):
        return None
    return frozenset(names | ({"**"} if takes_any else set()))


def shape_problem(function: Callable[..., Any], columns: Collection[str]) -> str:
    """What is wrong with the shape of a function whose prompts have `columns`; '' if nothing is."""
    name, names = name_of(function), names_of(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    if names is None:
        try:
            signature.bind(None, None)
        except TypeError:
            return (f"{name} takes {signature}; write def {name}(completions, **columns) with the columns that it "
                    f"reads, or def {name}(prompt, completions).")
        return ""
    known = {*GIVEN, *(column for column in columns if column not in WITHHELD)}
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty
              and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)]
    unknown = [repr(needs) for needs in needed if needs not in known]
    if unknown:
        return (f"{name} needs {', '.join(unknown)}, which is no column of the prompts; it can have "
                f"{', '.join(sorted(known))}, for a reward depends on prompt and completion alone. Rename the "
                f"parameter, or give it a default.")
    return ""
