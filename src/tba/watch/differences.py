"""What a prompt's completions of one version have that those of another have not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tba.report.read import Answered
from tba.rewards.functions import FULL_MARKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text of one version and how often it came. Untrusted, not yet escaped for HTML."""

    text: str
    times: int
    reward: float | None
    """Reward units; the first one of equal texts."""
    is_only_here: bool
    """Whether the other version has no such text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A prompt's completions of one version."""

    version: int
    count: int
    scored: int
    """Completions with a reward."""
    full_marks: float | None
    """Share of the scored ones with full marks; None if there are none."""
    reward: float | None
    """Mean of the scored ones, reward units."""
    texts: Sequence[Text]
    """Different ones, the most frequent first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two versions' completions of one prompt, side by side."""

    prompt_id: str
    prompt: str
    sides: tuple[Side, Side]


def difference(answered: Sequence[Answered], prompt_id: str, one: int, other: int) -> Difference | None:
    """The completions of `prompt_id` by the versions `one` and `other`; None unless both have some."""
    found = {a.version: a for a in answered if a.prompt_id == prompt_id and a.version in (one, other)}
    if one not in found or other not in found:
        return None
    first, second = found[one], found[other]
    return Difference(
        prompt_id=prompt_id, prompt=first.prompt, sides=(_side(first, second), _side(second, first))
    )


def _side(own: Answered, other: Answered) -> Side:
    times = Counter(text for text, *_ in own.completions)
    rewards: dict[str, float | None] = {}
    for text, reward, *_ in own.completions:
        rewards.setdefault(text, reward)
    elsewhere = {text for text, *_ in other.completions}
    scored = [reward for _, reward, *_ in own.completions if reward is not None]
    return Side(
        version=own.version, count=len(own.completions), scored=len(scored),
        full_marks=sum(reward >= FULL_MARKS for reward in scored) / len(scored) if scored else None,
        reward=sum(scored) / len(scored) if scored else None,
        texts=[Text(text=text, times=count, reward=rewards[text], is_only_here=text not in elsewhere)
               for text, count in times.most_common()],
    )
