"""A vLLM server that is up already, here or elsewhere, as a searcher's engine."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tba import lora
from tba.calls import CallFailed, Calls
from tba.engine_settings import EngineSettings
from tba.engines.foreign import ForeignEngine, Request, save_base
from tba.policy import Policy

COMPLETIONS, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RPC, RESET = "/collective_rpc", "/reset_prefix_cache"
"""Paths on the server."""
NEEDS: dict[str, str] = {
    **dict.fromkeys((LOAD, UNLOAD), "; it needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    **dict.fromkeys((RPC, RESET), "; whole weights need VLLM_SERVER_DEV_MODE=1 there"),
}
"""What a path is there with."""


class ServerFailedError(RuntimeError):
    """The server did not do what it was asked, as often as the settings allow."""


class VllmServerEngine(ForeignEngine):
    """See `ForeignEngine`. The server runs with `--logprobs-mode processed_logprobs`, which the canary cannot tell
    from others at temperature 1."""

    def __init__(self, policy: Policy, *, options: EngineSettings) -> None:
        """Samples with `policy`, which `load` overwrites: give the engine a copy of its own.

        Raises:
            ServerFailedError: the server does not answer, or refuses.
            WrongCanaryError: it has another model than the policy's.
        """
        self._server = Server(policy.model, options)
        super().__init__(policy, self._server, options.dtype)

    def close(self) -> None:
        """Takes the adapter off the server."""
        self._server.close()


class Server:
    """What the server is asked, and its replies, which are untrusted."""

    def __init__(self, model: Any, options: EngineSettings) -> None:
        """`model` may have an adapter, which is then all that changes."""
        chosen = options.server
        self._calls, self._endpoint = Calls(chosen), str(chosen.endpoint)
        self._base = str(chosen.served_model)
        self._own = f"tba-{secrets.token_hex(4)}"
        self._folder = Path(str(chosen.folder)) / self._own
        self._served = self._base
        self._is_adapted = lora.has_adapter(model)
        if self._is_adapted:
            self.adopt(model, 0)

    def sample(self, requests: Sequence[Request], stop_ids: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """See `Backend.sample`."""
        return self._ask(COMPLETIONS, [{
            "model": self._served, "prompt": request.ids, "max_tokens": request.length, "min_tokens": request.least,
            "temperature": request.sampling.temperature, "top_p": request.sampling.top_p, "seed": request.seed,
            "stop_token_ids": list(stop_ids), "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
        } for request in requests], sampled_in)

    def prompt_logps(self, ids: Sequence[int]) -> list[float]:
        """See `Backend.prompt_logps`."""
        body = {"model": self._served, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        (found,) = self._ask(COMPLETIONS, [body], lambda reply: prompt_logps_in(reply, ids))
        return found

    def adopt(self, model: Any, version: int) -> None:
        """See `Backend.adopt`. An adapter gets a name of its own for each version: what the server has cached of
        prompts is then never of another."""
        folder = self._folder / f"{version}-{secrets.token_hex(4)}"
        if not self._is_adapted:
            save_base(model, folder)
            self._do(RPC, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            self._do(RESET, {})
        else:
            model.save_pretrained(folder, safe_serialization=True)
            before, self._served = self._served, f"{self._own}-{folder.name}"
            self._do(LOAD, {"lora_name": self._served, "lora_path": str(folder)})
            if before != self._base:
                self._do(UNLOAD, {"lora_name": before})
        shutil.rmtree(folder)

    def close(self) -> None:
        """Takes the adapter off the server, and ends the calls."""
        if self._served != self._base:
            self._calls.do(UNLOAD, {"lora_name": self._served})
        self._calls.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, path: str, bodies: Sequence[dict[str, Any]], read: Callable[[Any], Any]) -> list[Any]:
        found = self._calls.each(lambda body: self._calls.ask(path, body, read), bodies)
        lost = [one for one in found if isinstance(one, CallFailed)]
        if lost:
            raise self._failed(path, lost[0], f" for {len(lost)} of {len(bodies)} calls")
        return found

    def _do(self, path: str, body: dict[str, Any]) -> None:
        if isinstance(lost := self._calls.do(path, body), CallFailed):
            raise self._failed(path, lost)

    def _failed(self, path: str, lost: CallFailed, share: str = "") -> ServerFailedError:
        return ServerFailedError(
            f"{self._endpoint}{path} failed{share}: {lost.reason}, {lost.detail}{NEEDS.get(path, '')}."
        )


def sampled_in(reply: Any) -> tuple[list[int], list[float]]:
    """Ids and their log-probs in a reply.

    Raises:
        ValueError, KeyError, IndexError, TypeError: it is no such reply.
    """
    (choice,) = reply["choices"]
    return [_id(one) for one in choice["token_ids"]], [_logp(one) for one in choice["logprobs"]["token_logprobs"]]


def prompt_logps_in(reply: Any, ids: Sequence[int]) -> list[float]:
    """Log-probs of all ids of the prompt but the first, in a reply; raises as `sampled_in`."""
    listed = reply["choices"][0]["prompt_logprobs"]
    if len(listed) != len(ids):
        raise ValueError(f"{len(listed)} log-probs for the {len(ids)} ids of the prompt")
    return [_logp(at[str(id)]["logprob"]) for at, id in zip(listed[1:], ids[1:], strict=True)]


def _id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no token id")
    return value


def _logp(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-4:
        raise ValueError(f"{value!r} is no log-prob")
    return float(value)
