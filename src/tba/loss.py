"""A micro-batch's share of the batch loss, and log Z where it is learned."""

# Shape legend: N trajectories of a micro-batch, U distinct ones among them, T positions.

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.batch import Batch, MicroBatch
from tba.catalog import reads
from tba.objectives import OBJECTIVES, Objective, token_weight
from tba.settings import Settings


class LearnedZ:
    """One learned log Z for each prompt, or one for all.

    Each moves by `rate` times its mean residual after a step: gradient descent on half the mean squared residual,
    whatever beta, scale and the number of groups. A new prompt starts at 0.
    """

    def __init__(self, *, per: str, rate: float) -> None:
        """`per` is `prompt` or `model`; `rate` is the share of the mean residual, above 0 and at most 1."""
        self._per, self._rate = per, rate
        self.values: dict[str, float] = {}
        """Nats, by prompt id; by '' if there is one for all."""

    def of(self, prompt_ids: Sequence[str]) -> Float[Tensor, " N"]:
        """log Z of each row."""
        return torch.tensor([self.values.get(self._key(prompt), 0.0) for prompt in prompt_ids])

    def put(self, prompt_ids: Sequence[str], log_z: Sequence[float]) -> None:
        """Sets what `of` gives for these rows, as it was at another time."""
        self.values |= {self._key(prompt): value for prompt, value in zip(prompt_ids, log_z, strict=True)}

    def learn(self, prompt_ids: Sequence[str], group: Sequence[int], residual: Sequence[float]) -> None:
        """Moves log Z by the residuals of one batch's rows: the mean over its groups of two or more of their means."""
        rows: dict[tuple[str, int], list[float]] = {}
        for prompt, number, value in zip(prompt_ids, group, residual, strict=True):
            rows.setdefault((self._key(prompt), number), []).append(value)
        means: dict[str, list[float]] = {}
        for (key, _), values in rows.items():
            if len(values) >= 2:
                means.setdefault(key, []).append(math.fsum(values) / len(values))
        for key, of_groups in means.items():
            self.values[key] = self.values.get(key, 0.0) - self._rate * math.fsum(of_groups) / len(of_groups)

    def _key(self, prompt: str) -> str:
        return prompt if self._per == "prompt" else ""


class Loss:
    """The settings' objective, fed with the tensors that the names of its arguments ask for."""

    def __init__(self, settings: Settings) -> None:
        """Takes `objective.name` and what it is set by."""
        knobs = settings.objective_knobs
        self._function = OBJECTIVES[settings.objective.name]
        self._takes = inspect.signature(self._function).parameters.keys()
        self._normalise = knobs.get("normalise", "sequence")
        self._knobs = {key: tuple(v) if isinstance(v, list) else v for key, v in knobs.items() if key in self._takes}
        self._reads = reads(settings.objective)
        self.learned_z: LearnedZ | None = None
        if "log_z" in self._takes:
            self.learned_z = LearnedZ(per=knobs["log_z_per"], rate=knobs["log_z_rate"])

    def of(
        self, micro: MicroBatch, batch: Batch, logps_NT: Tensor, beta: float, prior: float = 1.0
    ) -> tuple[Objective, Tensor]:
        """What the objective makes of a micro-batch, and the share of the batch loss that is its own.

        `prior` is the weight of the reference's log-prob in the log-reward.

        The shares of all micro-batches of `batch` add up to the loss of the batch, however it is cut.

        Raises:
            ValueError: the objective reads reference log-probs of tokens, and a trajectory has none.
        """
        found = self._function(**self._tensors(micro, batch, logps_NT, beta, prior), beta=beta, **self._knobs)
        # weights of tokens are shares of the whole batch; other losses are means over the micro-batch's own groups
        share = 1.0 if "weight" in self._takes else micro.num_groups / max(1, batch.num_groups)
        return found, found.loss * share

    def _tensors(
        self, micro: MicroBatch, batch: Batch, logps_NT: Tensor, beta: float, prior: float
    ) -> dict[str, Tensor | None]:
        place, takes = logps_NT.device, self._takes
        found: dict[str, Tensor | None] = {
            "ref_logp": prior * micro.ref_logp_N.to(place), "reward": micro.reward_N.to(place),
            "group": micro.group_N.to(place),
        }
        if "logps" in takes:
            found["logps"] = logps_NT
        else:
            found["logp"] = logps_NT.sum(-1)
        if "behaviour_logps" in takes:
            found["behaviour_logps"] = micro.behaviour_logps_NT.to(place) if "behaviour_logps" in self._reads else None
        if "ref_logps" in takes:
            if "ref_logps" in self._reads and micro.ref_logps_NT is None:
                raise ValueError(
                    f"objective.beta = {beta} needs the reference log-prob of each token, which some trajectories "
                    f"lack; start a new run, since those of this one were kept without."
                )
            found["ref_logps"] = None if micro.ref_logps_NT is None else micro.ref_logps_NT.to(place)
        if "weight" in takes:
            found["weight"] = token_weight(
                completion_mask(micro).to(place), micro.group_N.to(place), self._normalise,
                num_groups=batch.num_groups, num_tokens=batch.num_counted_tokens,
            ).to(logps_NT.dtype)
        if self.learned_z is not None:
            found["log_z"] = self.learned_z.of(micro.prompt_ids).to(place)
        return {name: value for name, value in found.items() if name in takes}

    def learn(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Moves log Z by what a step found, where it is learned."""
        if self.learned_z is not None:
            self.learned_z.learn(
                [prompt for part in parts for prompt in part["micro"].prompt_ids],
                [number for part in parts for number in part["micro"].group_N.tolist()],
                [value for part in parts for value in part["residual_N"].tolist()],
            )


def completion_mask(micro: MicroBatch) -> Bool[Tensor, "N T"]:
    """Completion tokens of each trajectory."""
    return widened([rows.completion_NT for rows in micro.rows])[micro.row_N]


def widened(pieces: Sequence[Tensor]) -> Tensor:
    """[U T] rows of all pieces under one another, zero beyond a piece's width."""
    width = max(piece.shape[1] for piece in pieces)
    return torch.cat([torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces])
