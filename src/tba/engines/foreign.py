"""What engines share that compute elsewhere; the policy's model holds them to their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from tba import lora
from tba.engines.pieces import Piece, Pieces
from tba.engines.protocol import Pause, Sampling
from tba.policy import Policy, copy_in, copy_out
from tba.records import Completion, Prompt

CANARY_TOKENS = 16
"""Ids of the prompt that each adopted version is tried on."""
CANARY_GAP = {"float32": 1e-3, "bfloat16": 0.3}
"""Nats, by precision, that the log-prob of one of them may differ from the trainer's arithmetic."""


class WrongCanaryError(RuntimeError):
    """The engine computes something else than the weights that it was given."""


class Request:
    """One completion to go on with."""

    def __init__(self, piece: Piece, *, length: int, least: int, seed: int, sampling: Sampling) -> None:
        """At most `length` ids, no stop among the first `least`; `seed` has 63 bits."""
        self.ids = [*piece.prompt.tokens, *piece.ids]
        self.length, self.least, self.seed, self.sampling = length, least, seed, sampling


class Backend(Protocol):
    """What computes elsewhere."""

    def sample(self, requests: Sequence[Request], stop_ids: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """Further ids of each request, in order, and the log-prob that each was drawn with."""
        ...

    def prompt_logps(self, ids: Sequence[int]) -> list[float]:
        """Log-prob of each id but the first, given those before it, at temperature 1."""
        ...

    def adopt(self, model: Any, version: int) -> None:
        """Computes with the weights of `model` from now on: with its adapter alone if it has one."""
        ...


class ForeignEngine:
    """Samples with a backend, whose random numbers are its own: a completion is a function of its seed alone.

    The policy's model is what is loaded into, shown by `tensors`, and what the backend is held to on a fixed prompt
    after each load, since tensors that are fused, packed or on another machine cannot be read back.
    """

    def __init__(self, policy: Policy, backend: Backend, dtype: str) -> None:
        """`backend` has the weights of `policy`, which `load` overwrites: give the engine a copy of its own.

        Raises:
            WrongCanaryError: it has not.
        """
        self._policy, self._backend, self._dtype = policy, backend, dtype
        self.version = 0
        self.gives_logps = True
        self.gap = 0.0
        """Nats: greatest difference of log-probs between backend and model on the canary, at the last load."""
        self._try_canary()

    def generate(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, seeds: Sequence[int],
        pause: Pause | None = None,
    ) -> list[list[Completion]]:
        """See `Engine.generate`. A stop ends all requests and asks them again with what they have so far.

        Raises:
            ValueError: a prompt and its completion may not fit into the model's context.
        """
        self._check_room(prompts, sampling.max_new_tokens)
        pieces = Pieces(prompts, num_samples, self._policy.limits, self._policy.stop_ids, sampling.max_new_tokens)
        stop_ids, number = sorted(self._policy.stop_ids), 0
        while asked := pieces.open():
            requests = [self._request(piece, sampling, seeds, number, pause) for piece in asked]
            for piece, (ids, logps) in zip(asked, self._backend.sample(requests, stop_ids), strict=True):
                piece.add(ids, logps, self.version)
            self._tell_behaviour(asked, sampling)
            number += 1
            if pause is not None and pieces.open():
                pause.do()
        return pieces.completions(self._policy.decode, self._policy.tokenizer.eos_token_id)

    def _request(
        self, piece: Piece, sampling: Sampling, seeds: Sequence[int], number: int, pause: Pause | None
    ) -> Request:
        length = piece.room if pause is None else min(pause.every, piece.room)
        return Request(
            piece, length=length, least=min(length, max(0, self._policy.limits.first - len(piece.ids))),
            seed=seed_of(seeds[piece.of_prompt], piece.sample, number), sampling=sampling,
        )

    def _check_room(self, prompts: Sequence[Prompt], new: int) -> None:
        longest = longest_of(self._policy.model)
        for prompt in prompts:
            if len(prompt.tokens) + new > longest:
                raise ValueError(
                    f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens, with {new} new ones more than the "
                    f"{longest} of the model's context; lower search.max_new_tokens or shorten the prompt."
                )

    def _tell_behaviour(self, asked: Sequence[Piece], sampling: Sampling) -> None:
        """Where another distribution than the policy was drawn from, the backend's log-probs are of that one, and the
        policy's own are computed here, with the weights that drew."""
        if sampling.temperature == self._policy.temperature and sampling.top_p >= 1:
            return
        pairs = [(piece.prompt.tokens, tuple(piece.ids)) for piece in asked]
        for piece, logps in zip(asked, self._policy.completion_logps(pairs), strict=True):
            piece.behave(logps, is_greedy=sampling.temperature == 0)

    def load(self, tensors: Mapping[str, np.ndarray[Any, Any]], version: int) -> None:
        """See `Engine.load`.

        Raises:
            WrongCanaryError: log-probs of the canary are not those of these weights.
        """
        copy_in(self._policy.model, tensors)
        self._backend.adopt(self._policy.model, version)
        self._try_canary()
        self.version = version

    def tensors(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """See `Engine.tensors`: what the backend was given, and was found on the canary to compute with."""
        return copy_out(self._policy.model)

    @torch.inference_mode()
    def _try_canary(self) -> None:
        model = self._policy.model
        ids = canary(int(model.config.vocab_size), longest_of(model))
        theirs = torch.tensor(self._backend.prompt_logps(ids))
        device = next(model.parameters()).device
        logits_TV = model(input_ids=torch.tensor([ids], device=device)).logits[0, :-1].float().cpu()
        ours = logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        self.gap = float((ours - theirs).abs().max())
        if not self.gap <= CANARY_GAP[self._dtype]:
            raise WrongCanaryError(
                f"log-probs of a fixed prompt differ from those of the weights that the engine was given by up to "
                f"{self.gap:g} nats (allowed {CANARY_GAP[self._dtype]:g} in {self._dtype}): it computes with other "
                f"weights or in another precision (engine.dtype), or its build is wrong for this model; use "
                f"engine.name=transformers."
            )


def canary(vocabulary: int, longest: int) -> list[int]:
    """Ids of the prompt that weights are tried on."""
    return [(7919 * place + 11) % vocabulary for place in range(min(CANARY_TOKENS, longest - 1))]


def longest_of(model: Any) -> int:
    """Tokens of the model's context."""
    return int(model.config.max_position_embeddings)


def seed_of(seed: int, sample: int, number: int) -> int:
    """Of one request: its prompt's seed, which sample of it, and how many stops there were before; 63 bits."""
    digest = hashlib.blake2b(f"{seed} {sample} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def save_base(model: Any, folder: Any) -> None:
    """Writes a model, or the base under its adapter, as a plain model folder."""
    if not lora.has_adapter(model):
        model.save_pretrained(folder, safe_serialization=True)
        return
    base = model.get_base_model()
    plain = {
        name.replace(".base_layer.", "."): tensor.contiguous()
        for name, tensor in base.state_dict().items() if not lora.is_adapter_name(name)
    }
    base.save_pretrained(folder, state_dict=plain, safe_serialization=True)
