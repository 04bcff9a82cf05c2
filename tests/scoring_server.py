"""A scoring server in a thread, whose faults are a function of seed, text and attempt."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["none", "error", "hang", "slow"]


def true_score(text: str) -> float:
    """What the server says of a text: 7 letters are 1, and a z is worth 3."""
    return len(text) / 7 + 3 * text.count("z")


def fault_of(seed: int, text: str, attempt: int) -> Fault:
    """20 % errors, 5 % hangs, 30 % slow, the rest at once."""
    drawn = random.Random(f"{seed} {text} {attempt}").random()
    return "error" if drawn < 0.20 else "hang" if drawn < 0.25 else "slow" if drawn < 0.55 else "none"


class ScoringServer:
    """Answers /score, /classify, /pooling and /v1/chat/completions; use as a context manager."""

    def __init__(
        self, *, fault: Callable[[str, int], Fault] = lambda text, attempt: "none", slow_s: float = 0.05,
        answer: Callable[[str, str], tuple[int, bytes, dict[str, str]]] | None = None,
    ) -> None:
        """`answer` of (path, text) replaces the right reply: status, body, headers."""
        self._fault, self._slow_s, self._answer = fault, slow_s, answer
        self.attempts: Counter[str] = Counter()
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        outer = self

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer._serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that hung up is no news."""

        self._server = Server(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ScoringServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, to: BaseHTTPRequestHandler) -> None:
        body = json.loads(to.rfile.read(int(to.headers["Content-Length"])))
        text = body.get("text_2", body.get("input", body.get("messages", [{}])[0].get("content", "")))
        with self.lock:
            attempt = self.attempts[text]
            self.attempts[text] += 1
            self.bodies.append((to.path, body))
            self.headers.append(dict(to.headers))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        fault = self._fault(text, attempt)
        if fault == "slow":
            self.stopping.wait(self._slow_s)
        elif fault == "hang":
            self.stopping.wait()
        status, reply, headers = (500, b"out of memory", {}) if fault == "error" else self._right(to.path, text)
        with self.lock:
            self.in_flight -= 1
        to.send_response(status)
        for name, value in headers.items():
            to.send_header(name, value)
        to.send_header("Content-Length", str(len(reply)))
        to.end_headers()
        to.wfile.write(reply)

    def _right(self, path: str, text: str) -> tuple[int, bytes, dict[str, str]]:
        if self._answer is not None:
            return self._answer(path, text)
        score = true_score(text)
        reply: dict[str, Any] = {
            "/score": {"data": [{"index": 0, "object": "score", "score": score}]},
            "/classify": {"data": [{"index": 0, "label": "a", "probs": [0.25, score, 0.5], "num_classes": 3}]},
            "/pooling": {"data": [{"index": 0, "object": "pooling", "data": [score]}]},
            "/v1/chat/completions": {"choices": [{"message": {"role": "assistant", "content": f" {score:.3f}\n"}}]},
        }.get(path, {"error": "no such path"})
        return (404 if "error" in reply else 200), json.dumps(reply).encode(), {}
