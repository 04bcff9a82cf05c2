"""A scorer behind an HTTP endpoint: timed calls, retries, bounded concurrency, and no wrong score."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tba.preference_settings import RewardSettings
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, clip
from tba.rewards.inputs import whole_characters
from tba.sections import SettingsError

T = TypeVar("T")

MAX_REPLY_BYTES = 4 << 20
"""Longest reply that is read; a score takes far less."""
MAX_BACKOFF_S = 60.0
"""Longest wait before a further call, whatever the server asks for."""
PATHS = {"score": "/score", "classify": "/classify", "pooling": "/pooling", "chat": "/v1/chat/completions"}
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be others at the next call."""
OVERLOADED = frozenset({429, 503})
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)")


class CallFailed(Exception):
    """One call gave no score."""

    def __init__(self, reason: str, detail: str, *, may_pass: bool, after_s: float = 0.0) -> None:
        """`may_pass`: whether another call is worth it, not before `after_s` seconds."""
        super().__init__(detail)
        self.reason, self.detail, self.may_pass, self.after_s = reason, detail, may_pass, after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a server answered."""

    status: int
    body: bytes
    retry_after_s: float = 0.0


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
        assert reward.endpoint is not None, "settings refuse a scorer without model or endpoint"
        address = urlsplit(reward.endpoint)
        self._reward = reward
        self._is_secret = address.scheme == "https"
        self._host, self._port = str(address.hostname), address.port
        self._path = address.path.rstrip("/") + PATHS[reward.protocol]
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if reward.key_env is not None:
            if not environment.get(reward.key_env):
                raise SettingsError([
                    f"key_env = {reward.key_env!r} of {reward.endpoint!r} names an environment variable that is not "
                    f"set; set it to the server's key, or drop key_env."
                ])
            self._headers["Authorization"] = f"Bearer {environment[reward.key_env]}"
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.calls = 0
        """Calls made so far, retries included."""
        self.failed_calls: Counter[str] = Counter()
        """Calls so far that gave no score, by reason; a later call may have given it."""
        self.failures: Counter[str] = Counter()
        """Completions so far that got no score, by reason."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | Failure]:
        """One outcome per completion, in order."""
        return list(self._threads().map(lambda completion: self._score(prompt, completion), completions))

    def ask_all(self, bodies: Sequence[Mapping[str, Any]], read: Callable[[Any], T]) -> list[T | Failure]:
        """What `read` makes of the reply to each body, in order; it raises ValueError or TypeError where it is none."""
        return list(self._threads().map(lambda body: self._ask(body, read), bodies))

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._reward.concurrency, thread_name_prefix="endpoint")
        return self._pool

    def close(self) -> None:
        """Ends the waits between calls and the threads; calls in flight end at their limit."""
        self._closing.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _score(self, prompt: Prompt, completion: Completion) -> float | Failure:
        """The score of one completion, after as many calls as the settings allow."""
        reward = self._reward
        if completion.finish != "stop" and reward.without_eos is not None:
            return reward.without_eos
        return self._ask(request_of(reward, prompt, completion), lambda reply: score_in(reply, reward))

    def _ask(self, asked: Mapping[str, Any], read: Callable[[Any], T]) -> T | Failure:
        reward, body = self._reward, json.dumps(asked).encode()
        for call in range(reward.retries + 1):
            try:
                return self._call(body, read)
            except CallFailed as failed:
                last = failed
                self._count(failed.reason)
            if call == reward.retries or not last.may_pass or self._closing.is_set():
                break
            self._wait(min(MAX_BACKOFF_S, max(reward.backoff_s * 2**call, last.after_s)))
        with self._lock:
            self.failures[last.reason] += 1
        return Failure(reason=last.reason, detail=clip(f"{last.detail} (call {call + 1} of {reward.retries + 1})"))

    def _call(self, body: bytes, read: Callable[[Any], T]) -> T:
        with self._lock:
            self.calls += 1
        reply = self._post(body)
        if reply.status != 200:
            said = " ".join(reply.body[:200].decode("utf-8", "replace").split())
            reason = "overloaded" if reply.status in OVERLOADED else "refused"
            raise CallFailed(reason, f"status {reply.status}: {said}", may_pass=reply.status in PASSING,
                             after_s=reply.retry_after_s)
        try:
            return read(json.loads(reply.body))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            shown = reply.body[:120].decode("utf-8", "replace")
            raise CallFailed("bad_reply", f"{type(error).__name__}: {error} in {shown!r}", may_pass=True) from error

    def _post(self, body: bytes) -> Reply:
        """One exchange, from connecting to the last byte within `limit_s` seconds."""
        limit_s, started = self._reward.limit_s, time.monotonic()
        kind = http.client.HTTPSConnection if self._is_secret else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=limit_s)
        watch: threading.Timer | None = None
        try:
            connection.connect()
            # The socket's own limit holds for each read; a server that sends a byte now and then outlasts it.
            left_s = max(0.0, limit_s - (time.monotonic() - started))
            watch = threading.Timer(left_s, _hang_up, [connection.sock])
            watch.daemon = True
            watch.start()
            connection.request("POST", self._path, body=body, headers=self._headers)
            with connection.getresponse() as answer:
                text = answer.read(MAX_REPLY_BYTES + 1)
                after = answer.headers.get("Retry-After", "")
            reply = Reply(status=answer.status, body=text, retry_after_s=float(after) if after.isdecimal() else 0.0)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            if isinstance(error, TimeoutError) or time.monotonic() - started >= limit_s:
                raise CallFailed("timeout", f"no reply within {limit_s:g} s", may_pass=True) from error
            raise CallFailed("unreachable", f"{type(error).__name__}: {error}", may_pass=True) from error
        finally:
            if watch is not None:
                watch.cancel()
            connection.close()
        if time.monotonic() - started >= limit_s:  # what was read may be cut
            raise CallFailed("timeout", f"no whole reply within {limit_s:g} s", may_pass=True)
        if len(text) > MAX_REPLY_BYTES:
            raise CallFailed("bad_reply", f"more than {MAX_REPLY_BYTES} bytes", may_pass=False)
        return reply

    def _count(self, reason: str) -> None:
        with self._lock:
            self.failed_calls[reason] += 1


def _hang_up(held: socket.socket) -> None:
    """Ends whatever a thread is reading from or writing to the socket."""
    try:
        held.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already


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
