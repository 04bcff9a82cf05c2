"""Calls to an HTTP endpoint: each within a limit, repeated where that may help, a few at once."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tba.preference_settings import CallSettings
from tba.sections import SettingsError

T = TypeVar("T")

MAX_REPLY_BYTES = 4 << 20
"""Longest reply that is read."""
MAX_BACKOFF_S = 60.0
"""Longest wait before a further call, whatever the server asks for."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be others at the next call."""
OVERLOADED = frozenset({429, 503})


class CallFailed(Exception):
    """One call, or the last of several, gave nothing."""

    def __init__(self, reason: str, detail: str, *, may_pass: bool, after_s: float = 0.0) -> None:
        """`reason`: timeout, unreachable, overloaded, refused or bad_reply. `may_pass`: whether another call is worth
        it, not before `after_s` seconds."""
        super().__init__(detail)
        self.reason, self.detail, self.may_pass, self.after_s = reason, detail, may_pass, after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a server answered."""

    status: int
    body: bytes
    retry_after_s: float = 0.0


class Calls:
    """Asks one server. At most `concurrency` calls are in flight; who asks waits for the rest: no queue grows."""

    def __init__(
        self, how: CallSettings, *, wait: Callable[[float], object] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`wait` sleeps between calls; `environment` holds the key that `key_env` names.

        Raises:
            SettingsError: that variable is not set.
        """
        assert how.endpoint is not None, "settings refuse calls without an endpoint"
        address = urlsplit(how.endpoint)
        self._how = how
        self._is_secret = address.scheme == "https"
        self._host, self._port = str(address.hostname), address.port
        self._before = address.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if how.key_env is not None:
            if not environment.get(how.key_env):
                raise SettingsError([
                    f"key_env = {how.key_env!r} of {how.endpoint!r} names an environment variable that is not "
                    f"set; set it to the server's key, or drop key_env."
                ])
            self._headers["Authorization"] = f"Bearer {environment[how.key_env]}"
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.made = 0
        """Calls made so far, repeated ones included."""
        self.failed: Counter[str] = Counter()
        """Calls so far that gave nothing, by reason; a later one may have."""

    def each(self, work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """`work` of each item, in order, as many at once as calls may be in flight."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._how.concurrency, thread_name_prefix="endpoint")
        return list(self._pool.map(work, items))

    def ask(self, path: str, asked: Mapping[str, Any], read: Callable[[Any], T]) -> T | CallFailed:
        """What `read` makes of the reply, after as many calls as the settings allow, or how the last one failed.

        `read` raises ValueError, KeyError, IndexError or TypeError where the reply is none.
        """
        return self._repeated(path, asked, lambda body: read(json.loads(body)))

    def do(self, path: str, asked: Mapping[str, Any]) -> CallFailed | None:
        """Has something done that is told by the status alone: None if it was, else how the last call failed."""
        return self._repeated(path, asked, lambda body: None)

    def _repeated(self, path: str, asked: Mapping[str, Any], read: Callable[[bytes], T]) -> T | CallFailed:
        how, body = self._how, json.dumps(asked).encode()
        for call in range(how.retries + 1):
            try:
                return self._call(self._before + path, body, read)
            except CallFailed as failed:
                last = failed
                with self._lock:
                    self.failed[failed.reason] += 1
            if call == how.retries or not last.may_pass or self._closing.is_set():
                break
            self._wait(min(MAX_BACKOFF_S, max(how.backoff_s * 2**call, last.after_s)))
        last.detail += f" (call {call + 1} of {how.retries + 1})"
        return last

    def close(self) -> None:
        """Ends the waits between calls and the threads; calls in flight end at their limit."""
        self._closing.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _call(self, path: str, body: bytes, read: Callable[[bytes], T]) -> T:
        with self._lock:
            self.made += 1
        reply = self._post(body, path)
        if reply.status != 200:
            said = " ".join(reply.body[:200].decode("utf-8", "replace").split())
            reason = "overloaded" if reply.status in OVERLOADED else "refused"
            raise CallFailed(reason, f"status {reply.status}: {said}", may_pass=reply.status in PASSING,
                             after_s=reply.retry_after_s)
        try:
            return read(reply.body)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            shown = reply.body[:120].decode("utf-8", "replace")
            raise CallFailed("bad_reply", f"{type(error).__name__}: {error} in {shown!r}", may_pass=True) from error

    def _post(self, body: bytes, path: str) -> Reply:
        """One exchange, from connecting to the last byte within `limit_s` seconds."""
        limit_s, started = self._how.limit_s, time.monotonic()
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
            connection.request("POST", path, body=body, headers=self._headers)
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


def _hang_up(held: socket.socket) -> None:
    """Ends whatever a thread is reading from or writing to the socket."""
    try:
        held.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already
