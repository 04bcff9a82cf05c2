"""The endpoint scorer against a server that errs, hangs and dawdles: every failure counted, no wrong score."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from typing import Any

import pytest

from scoring_server import Fault, ScoringServer, fault_of, true_score
from support import make_completion
from tba.calls import MAX_BACKOFF_S
from tba.preference_settings import RewardSettings, rewards_problems
from tba.records import Completion, Prompt
from tba.rewards.endpoint import EndpointScorer, request_of, score_in
from tba.rewards.functions import Failure
from tba.rewards.parts import Part, WeightedSum
from tba.sections import SettingsError

PROMPT = Prompt(id="p", tokens=(1, 3), text="why? ")
TEXTS = [f"{'ab' * (n % 11)}{'z' * (n % 3)} {n}" for n in range(160)]


def answers(texts: list[str]) -> list[Completion]:
    return [make_completion(text=text) for text in texts]


def scorer(url: str, **settings: Any) -> EndpointScorer:
    """One that waits for nothing between calls, unless told to."""
    wait = settings.pop("wait", lambda seconds: None)
    environment = settings.pop("environment", {})
    return EndpointScorer(RewardSettings(endpoint=url, **settings), wait=wait, environment=environment)


REASONS: dict[Fault, str] = {"error": "refused", "hang": "timeout"}


@pytest.mark.parametrize("retries", [0, 2])
def test_every_failure_is_counted_and_no_score_is_wrong(retries: int) -> None:
    """20 % errors, 5 % hangs, 30 % slow; what must come of each call follows from the seed alone."""
    expected: list[float | str] = []
    calls: Counter[str] = Counter()
    for text in TEXTS:
        faults = [fault_of(7, text, attempt) for attempt in range(retries + 1)]
        tried = next((n for n, fault in enumerate(faults) if fault in ("none", "slow")), retries + 1)
        calls.update(REASONS[fault] for fault in faults[:tried])
        expected.append(true_score(text) if tried <= retries else REASONS[faults[-1]])
    assert {type(e) for e in expected} == {float, str}
    with ScoringServer(fault=lambda text, attempt: fault_of(7, text, attempt)) as server:
        made = scorer(server.url, retries=retries, limit_s=2.0, concurrency=12)
        found = made(PROMPT, answers(TEXTS))
        made.close()
    assert [f.reason if isinstance(f, Failure) else f for f in found] == expected
    assert made.failures == Counter(e for e in expected if isinstance(e, str))
    assert made.failed_calls == calls
    assert made.calls == sum(server.attempts.values()) == sum(calls.values()) + sum(
        isinstance(e, float) for e in expected
    )
    assert calls["refused"] > 20
    assert calls["timeout"] > 3


def test_at_most_so_many_calls_are_in_flight() -> None:
    with ScoringServer(fault=lambda text, attempt: "slow", slow_s=0.02) as server:
        made = scorer(server.url, concurrency=3)
        assert made(PROMPT, answers(TEXTS[:30])) == [true_score(t) for t in TEXTS[:30]]
        made.close()
    assert server.most_in_flight == 3


def test_waits_double_and_a_server_that_names_a_time_is_waited_for() -> None:
    waits: list[float] = []
    with ScoringServer(fault=lambda text, attempt: "error" if attempt < 3 else "none") as server:
        made = scorer(server.url, retries=4, backoff_s=0.3, wait=waits.append)
        assert made(PROMPT, answers(["abc"])) == [true_score("abc")]
        made.close()
    assert waits == pytest.approx([0.3, 0.6, 1.2])
    waits.clear()
    with ScoringServer(answer=lambda path, text: (429, b"busy", {"Retry-After": "7"})) as server:
        made = scorer(server.url, retries=1, backoff_s=0.3, wait=waits.append)
        (found,) = made(PROMPT, answers(["abc"]))
        made.close()
    assert waits == [7.0]
    assert found == Failure(reason="overloaded", detail="status 429: busy (call 2 of 2)")
    with ScoringServer(answer=lambda path, text: (503, b"busy", {"Retry-After": "99999"})) as server:
        made = scorer(server.url, retries=1, wait=waits.append)
        made(PROMPT, answers(["abc"]))
        made.close()
    assert waits[1:] == [MAX_BACKOFF_S]


def test_a_call_that_is_wrong_is_not_repeated() -> None:
    with ScoringServer(answer=lambda path, text: (404, b"no such model", {})) as server:
        made = scorer(server.url, retries=3)
        (found,) = made(PROMPT, answers(["abc"]))
        made.close()
    assert found == Failure(reason="refused", detail="status 404: no such model (call 1 of 4)")
    assert made.calls == 1


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"null", b"<html>", b'{"data": []}', b'{"data": [{"index": 0}]}', b'{"data": [1]}',
        b'{"data": [{"score": 1.0}, {"score": 2.0}]}', b'{"data": [{"index": 1, "score": 1.0}]}',
        b'{"data": [{"index": 0, "score": "1.0"}]}', b'{"data": [{"index": 0, "score": true}]}',
        b'{"data": [{"index": 0, "score": NaN}]}', b'{"data": [{"index": 0, "score": null}]}',
        b'{"data": [{"index": 0, "score": 1e999}]}', b'{"data": [{"index": 0, "score": 1.', b"\xff\xfe",
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_reply_that_is_no_score_is_no_score(body: bytes) -> None:
    with ScoringServer(answer=lambda path, text: (200, body, {})) as server:
        made = scorer(server.url, retries=1)
        (found,) = made(PROMPT, answers(["abc"]))
        made.close()
    assert isinstance(found, Failure)
    assert found.reason == "bad_reply"
    assert made.failures == {"bad_reply": 1}
    assert made.failed_calls == {"bad_reply": 2}


def test_nobody_there_is_recorded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        made = scorer(f"http://127.0.0.1:{taken.getsockname()[1]}", retries=1)
        (found,) = made(PROMPT, answers(["abc"]))
        made.close()
    assert isinstance(found, Failure)
    assert found.reason == "unreachable"


@pytest.mark.parametrize("dripped", ["headers", "body"])
def test_a_server_that_drips_is_ended_at_the_limit(dripped: str) -> None:
    """Each read succeeds in time; the call as a whole does not."""
    stop = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        peer, _ = listening.accept()
        with peer:
            peer.recv(65536)
            if dripped == "body":
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\nConnection: close\r\n\r\n")
            else:
                peer.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            gives_up = time.monotonic() + 20  # so that a scorer that waits on is seen to do so
            while not stop.wait(0.05) and time.monotonic() < gives_up:
                try:
                    peer.sendall(b" ")
                except OSError:
                    return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    made = scorer(f"http://127.0.0.1:{listening.getsockname()[1]}", retries=0, limit_s=2.0)
    started = time.monotonic()
    (found,) = made(PROMPT, answers(["abc"]))
    took = time.monotonic() - started
    stop.set()
    thread.join()
    listening.close()
    made.close()
    assert isinstance(found, Failure)
    assert found.reason == "timeout"
    assert took < 15


# ---- what is asked and what is read -------------------------------------------------------------

JUDGED = {"protocol": "chat", "served_model": "judge"}


@pytest.mark.parametrize(
    ("settings", "path", "body", "score"),
    [
        ({}, "/score", {"text_1": "why? ", "text_2": "abz"}, true_score("abz")),
        ({"protocol": "classify", "index": 1, "served_model": "m"}, "/classify", {"model": "m", "input": "why? abz"},
         true_score("why? abz")),
        ({"protocol": "pooling", "reads": "completion"}, "/pooling", {"input": "abz"}, true_score("abz")),
        ({"protocol": "pooling"}, "/pooling", {"input": "why? abz"}, true_score("why? abz")),
    ],
)
def test_what_is_asked_of_vllm(settings: dict[str, Any], path: str, body: dict[str, Any], score: float) -> None:
    with ScoringServer() as server:
        made = scorer(server.url, **settings)
        assert made(PROMPT, answers(["abz"])) == [pytest.approx(score)]
        made.close()
    assert server.bodies == [(path, body)]


def test_what_is_asked_of_a_judge_and_with_which_key() -> None:
    judge = "{low}-{high}: {prompt}|{completion}"
    with ScoringServer() as server:
        made = scorer(server.url, **JUDGED, judge=judge, key_env="KEY", environment={"KEY": "s3cret"})
        assert made(PROMPT, answers(["{prompt}"])) == [pytest.approx(true_score("0-10: why? |{prompt}"), abs=1e-3)]
        made.close()
    assert server.bodies == [("/v1/chat/completions", {
        "model": "judge", "messages": [{"role": "user", "content": "0-10: why? |{prompt}"}], "temperature": 0,
        "max_tokens": 16,
    })]  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    with pytest.raises(SettingsError, match=r"key_env = 'KEY' .* is not set"):
        scorer(server.url, key_env="KEY")


@pytest.mark.parametrize(
    ("said", "score"),
    [("7", 7.0), (" 7.5.\n", 7.5), ("+.5", 0.5), ("10", 10.0), ("-1", None), ("11", None), ("7/10", None),
     ("Score: 7", None), ("", None), ("nan", None), ("7 or 8", None)],
)  # fmt: skip
def test_a_judgement_is_a_number_alone_and_within_its_range(said: str, score: float | None) -> None:
    reward = RewardSettings(endpoint="http://h:1", protocol="chat", served_model="m")
    reply = {"choices": [{"message": {"content": said}}]}
    if score is None:
        with pytest.raises(ValueError, match="the judge said"):
            score_in(reply, reward)
    else:
        assert score_in(reply, reward) == score


def test_which_of_several_numbers_counts() -> None:
    def read(values: Any, **settings: Any) -> float:
        reward = RewardSettings(endpoint="http://h:1", protocol="pooling", **settings)
        return score_in({"data": [{"index": 0, "data": values}]}, reward)

    assert read([0.5, 2.0], index=1) == 2.0
    assert read([0.5, 2.0]) == 1.25
    assert read([[0.5], [0.25], [-3.0]]) == -3.0  # token by token: the last one
    assert read(0.75) == 0.75
    with pytest.raises(IndexError):
        read([0.5], index=1)
    reward = RewardSettings(endpoint="http://h:1", protocol="classify")
    with pytest.raises(ValueError, match="2 probabilities, which sum to 1"):
        score_in({"data": [{"probs": [0.5, 0.5]}]}, reward)
    assert score_in({"data": [{"probs": [0.7]}]}, reward) == 0.7


def test_what_the_length_cut_is_not_asked_about() -> None:
    made = scorer("http://127.0.0.1:9", without_eos=-1.0)
    assert made(PROMPT, [make_completion(text="a", finish="length")]) == [-1.0]
    made.close()
    assert made.calls == 0


def test_half_a_character_is_asked_about_as_a_question_mark() -> None:
    body = request_of(RewardSettings(endpoint="http://h:1"), PROMPT, make_completion(text="a\ud800b"))
    assert json.loads(json.dumps(body).encode("utf-8"))["text_2"] == "a?b"


def test_an_endpoint_is_a_part_like_any_other() -> None:
    with ScoringServer(fault=lambda text, attempt: "error" if "x" in text else "none") as server:
        made = scorer(server.url, retries=0)
        reward = WeightedSum(lambda: [Part(name="judge", weight=0.5, function=made)])
        scored, failed = reward(PROMPT, answers(["abz", "x"]))
        reward.close()
    assert scored.reward == pytest.approx(0.5 * true_score("abz"))  # type: ignore[union-attr]
    assert failed == Failure(reason="refused", detail="judge: status 500: out of memory (call 1 of 1)")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "give exactly one of the three"),
        ({"model": "a/b", "endpoint": "http://h:1"}, "give exactly one of the three"),
        ({"endpoint": "localhost:8000"}, "is no address of the form http://host:port"),
        ({"endpoint": "http://h:1", "protocol": "chat"}, "served_model is missing"),
        ({"endpoint": "http://h:1", **JUDGED, "judge": "rate it"}, "shows the judge no completion"),
        ({"endpoint": "http://h:1", **JUDGED, "judge_range": (5, 1)}, "judge_range = [5, 1] holds no number"),
        ({"endpoint": "http://h:1", "activation": "sigmoid"}, "is of a model"),
        ({"model": "a/b", "activation": "softmax"}, "give task.rewards.0.index"),
        ({"model": "nowhere"}, "is no model folder"),
        ({"model": "./nowhere"}, "is no model folder"),
        ({"model": "a/b", "weight": 0.0}, "every weight is 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], said: str) -> None:
    assert said in "\n".join(rewards_problems([RewardSettings(**settings)]))


def test_two_scorers_of_one_name_are_refused() -> None:
    twice = [RewardSettings(model="a/b"), RewardSettings(model="c/b"), RewardSettings(model="c/d")]
    assert list(rewards_problems(twice)) == ["task.rewards: 2 scorers are named 'b'; give each a name of its own."]
