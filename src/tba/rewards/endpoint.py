"""A scorer behind an HTTP endpoint: timed calls, retries, bounded concurrency, and no wrong score."""

from __future__ import annotations

import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tba.calls import CallFailed, Calls
from tba.preference_settings import RewardSettings
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, clip
from tba.rewards.inputs import whole_characters

T = TypeVar("T")

PATHS = {"score": "/score", "classify": "/classify", "pooling": "/pooling", "chat": "/v1/chat/completions"}
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)")


class EndpointScorer:
    """Scores completions through vLLM's /score, /classify or /pooling, or a judge behind /v1/chat/completions.

    A completion either has the number that the server gave for it alone, or a recorded failure: after the last
    retry, `timeout`, `unreachable`, `overloaded` or `refused` (by status), or `bad_reply`. At most `concurrency`
    calls are in flight; whoever asks waits for the rest, so that a slow server slows the searchers and no queue grows.
    """

    def __init__(
        self, reward: RewardSettings, *, wait: Callable[[float], object] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`wait` sleeps between calls; `environment` holds the key that `key_env` names."""
        self._reward, self._calls = reward, Calls(reward, wait=wait, environment=environment)
        self._lock = threading.Lock()
        self.failures: Counter[str] = Counter()
        """Completions so far that got no score, by reason."""

    @property
    def calls(self) -> int:
        """Calls made so far, retries included."""
        return self._calls.made

    @property
    def failed_calls(self) -> Counter[str]:
        """Calls so far that gave no score, by reason; a later call may have given it."""
        return self._calls.failed

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | Failure]:
        """One outcome per completion, in order."""
        return self._calls.each(lambda completion: self._score(prompt, completion), completions)

    def ask_all(self, bodies: Sequence[Mapping[str, Any]], read: Callable[[Any], T]) -> list[T | Failure]:
        """What `read` makes of the reply to each body, in order; it raises ValueError or TypeError where it is none."""
        return self._calls.each(lambda body: self._ask(body, read), bodies)

    def close(self) -> None:
        """Ends the waits between calls and the threads; calls in flight end at their limit."""
        self._calls.close()

    def _score(self, prompt: Prompt, completion: Completion) -> float | Failure:
        """The score of one completion, after as many calls as the settings allow."""
        reward = self._reward
        if completion.finish != "stop" and reward.without_eos is not None:
            return reward.without_eos
        return self._ask(request_of(reward, prompt, completion), lambda reply: score_in(reply, reward))

    def _ask(self, asked: Mapping[str, Any], read: Callable[[Any], T]) -> T | Failure:
        found = self._calls.ask(PATHS[self._reward.protocol], asked, read)
        if not isinstance(found, CallFailed):
            return found
        with self._lock:
            self.failures[found.reason] += 1
        return Failure(reason=found.reason, detail=clip(found.detail))


def request_of(reward: RewardSettings, prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """The body of the call for one completion, in the words of `reward.protocol`."""
    asked, text = whole_characters(prompt.text), whole_characters(completion.text)
    named = {} if reward.served_model is None else {"model": reward.served_model}
    if reward.protocol == "score":
        return {**named, "text_1": asked, "text_2": text}
    if reward.protocol == "chat":
        low, high = reward.judge_range
        fields = {"prompt": asked, "completion": text, "low": f"{low:g}", "high": f"{high:g}"}
        content = re.sub(r"\{(prompt|completion|low|high)\}", lambda field: fields[field[1]], reward.judge)
        return {**named, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16}
    read = text if reward.reads == "completion" else asked + text
    return {**named, "input": read}


def score_in(reply: Any, reward: RewardSettings) -> float:
    """The score in a server's reply to the call for one completion.

    Raises:
        ValueError, KeyError, IndexError, TypeError: it is not the reply to such a call.
    """
    if reward.protocol == "chat":
        return _judgement(reply["choices"][0]["message"]["content"], reward.judge_range)
    rows = reply["data"]
    if not isinstance(rows, list) or len(rows) != 1:
        raise ValueError(f"{len(rows)} rows for one text; expected 1")
    if rows[0].get("index", 0) != 0:
        raise ValueError(f"the one row has index {rows[0]['index']!r}; expected 0")
    if reward.protocol == "score":
        return _number(rows[0]["score"])
    values = rows[0]["probs" if reward.protocol == "classify" else "data"]
    if reward.protocol == "pooling" and isinstance(values, list) and values and isinstance(values[0], list):
        values = values[-1]  # scored token by token: the last one's
    if not isinstance(values, list):
        values = [values]
    if reward.index is None:
        if reward.protocol == "classify" and len(values) > 1:
            raise ValueError(f"{len(values)} probabilities, which sum to 1; set index to the label that counts")
        return math.fsum(map(_number, values)) / len(values)
    return _number(values[reward.index])


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _judgement(text: str, limits: tuple[float, float]) -> float:
    """The number that a judge's reply consists of; anything around it makes it no judgement."""
    match = _NUMBER.fullmatch(text.strip().rstrip("."))
    if match is None:
        raise ValueError(f"the judge said {text[:60]!r}, which is not a number alone")
    value = float(match[0])
    if not limits[0] <= value <= limits[1]:
        raise ValueError(f"the judge said {value:g}, outside {limits[0]:g} to {limits[1]:g}")
    return value
