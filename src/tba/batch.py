"""Groups to tensors and masks, in micro-batches by token budget; the shift by one happens here, once."""

# Shape legend: N trajectories (in `Rows`: distinct ones), T positions that predict (prompt and completion
# tokens less one), right-padded.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.buffer.entries import Draw

Ids = tuple[int, ...]

PAD = 0
"""Fills places beyond a row's length. Any id would do: every mask comes from lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Trajectories padded to one length."""

    input_NT: Int[Tensor, "N T"]
    """Ids that the model reads."""
    target_NT: Int[Tensor, "N T"]
    """Ids that it is to predict: `input_NT` moved by one."""
    attention_NT: Bool[Tensor, "N T"]
    """Places of `input_NT` that hold an id."""
    completion_NT: Bool[Tensor, "N T"]
    """Places whose target is a completion token, stop token included."""
    prompt_N: Int[Tensor, " N"]
    """Number of the row's prompt: equal for equal prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole groups that go through the model together, in one piece or, if too large, in several."""

    rows: tuple[Rows, ...]
    """Distinct (prompt, completion) pairs, in pieces; one unless a single group exceeds the token budget."""
    row_N: Int[Tensor, " N"]
    """Which of the distinct pairs each trajectory is: equal ones go through the model once."""
    group_N: Int[Tensor, " N"]
    """Number of the draw that each row belongs to."""
    reward_N: Float[Tensor, " N"]
    """Reward units."""
    ref_logp_N: Float[Tensor, " N"]
    """Nats."""
    ref_version_N: Int[Tensor, " N"]
    """Version of the reference that gave `ref_logp_N`."""
    behaviour_logps_NT: Float[Tensor, "N T"]
    """Log-prob of each target under the distribution that it was drawn from, nats, zero outside completions."""
    ref_logps_NT: Float[Tensor, "N T"] | None
    """Reference log-prob of each target, nats, zero outside completions; None unless every trajectory has it."""
    searcher_logp_N: Float[Tensor, " N"]
    """Nats, under the weights that sampled."""
    version_N: Int[Tensor, " N"]
    """Version of the weights that sampled, in steps; the oldest of a completion that straddles an update."""
    length_N: Int[Tensor, " N"]
    """Completion tokens."""
    prompt_ids: tuple[str, ...]
    """[N] id of each row's prompt."""
    num_groups: int
    """Groups with at least two trajectories in this micro-batch."""
    num_counted_tokens: int
    """Completion tokens of those groups."""
    rank: int = 0
    """Which of the trainer's ranks it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step's groups."""

    micro_batches: tuple[MicroBatch, ...]
    num_groups: int
    """Groups with at least two trajectories: the denominator of the loss."""
    num_tokens: int
    """Prompt and completion tokens, without padding."""
    num_counted_tokens: int
    """Completion tokens of groups with at least two trajectories: the denominator of means over tokens."""


def collate(draws: Sequence[Draw], *, max_tokens: int, ranks: int = 1) -> Batch:
    """Draws as one batch; each draw is a group of its own, also when two are of one prompt.

    Groups are dealt to micro-batches whole, longest first, so that no micro-batch exceeds `max_tokens`
    padded tokens; a group that does so alone is cut into pieces that the trainer joins again. Each of the trainer's
    `ranks` has micro-batches of its own, one rank's after another's; see `dealt`.
    """
    if not draws:
        raise ValueError("a batch of 0 groups has no gradient; draw at least 1 group.")
    micro = tuple(
        _micro_batch([(i, draws[i]) for i in sorted(numbers)], max_tokens, rank)
        for rank, own in enumerate(dealt(draws, ranks)) for numbers in _plan(draws, own, max_tokens)
    )
    return Batch(
        micro_batches=micro, num_groups=sum(m.num_groups for m in micro),
        num_tokens=sum(len(d.prompt.tokens) + len(t.completion.tokens) for d in draws for t in d.trajectories),
        num_counted_tokens=sum(m.num_counted_tokens for m in micro),
    )


def dealt(draws: Sequence[Draw], ranks: int) -> list[list[int]]:
    """Numbers of the draws of each rank: whole groups, those of most tokens first, each to who has fewest so far.

    No rank has more tokens than another by more than those of one group. Equal completions of a prompt count once, as
    they go through the model.
    """
    tokens = [
        sum(len(draw.prompt.tokens) + len(ids) for ids in {t.completion.tokens for t in draw.trajectories})
        for draw in draws
    ]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(draws)), key=lambda i: (-tokens[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += tokens[number]
    return shares


def _plan(draws: Sequence[Draw], own: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Numbers of the draws of each micro-batch, out of those in `own`."""
    longest = {
        i: len(draws[i].prompt.tokens) + max(len(t.completion.tokens) for t in draws[i].trajectories) for i in own
    }
    plan: list[list[int]] = []
    width, rows = 0, set[tuple[Ids, Ids]]()
    for number in sorted(own, key=lambda i: (-longest[i], i)):
        pairs = {(draws[number].prompt.tokens, t.completion.tokens) for t in draws[number].trajectories}
        if plan and width * len(rows | pairs) <= max_tokens:
            plan[-1].append(number)
            rows |= pairs
        else:
            plan.append([number])
            width, rows = longest[number], pairs
    return plan


def _micro_batch(numbered: Sequence[tuple[int, Draw]], max_tokens: int, rank: int) -> MicroBatch:
    flat = [(number, draw, k) for number, draw in numbered for k in range(len(draw.trajectories))]
    pairs = [(draw.prompt.tokens, draw.trajectories[k].completion.tokens) for _, draw, k in flat]
    distinct = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
    longest = max(len(p) + len(c) for p, c in distinct)
    per_piece = max(1, max_tokens // longest)
    unique = list(distinct)
    trajectories = [draw.trajectories[k] for _, draw, k in flat]
    starts = [len(prompt) - 1 for prompt, _ in pairs]
    has_ref = all(t.ref_logps for t in trajectories)
    return MicroBatch(
        rows=tuple(make_rows(unique[at : at + per_piece]) for at in range(0, len(unique), per_piece)),
        row_N=_numbers([distinct[pair] for pair in pairs], np.int64),
        group_N=_numbers([number for number, _, _ in flat], np.int64),
        reward_N=_numbers([t.reward for t in trajectories], np.float32),
        ref_logp_N=_numbers([t.ref_logp for t in trajectories], np.float32),
        ref_version_N=_numbers([t.ref_version for t in trajectories], np.int64),
        behaviour_logps_NT=_placed(
            starts, [t.completion.behaviour_logps or t.completion.logps for t in trajectories], longest - 1
        ),
        ref_logps_NT=_placed(starts, [t.ref_logps for t in trajectories], longest - 1) if has_ref else None,
        searcher_logp_N=_numbers([t.completion.logp for t in trajectories], np.float32),
        version_N=_numbers([t.completion.version for t in trajectories], np.int64),
        length_N=_numbers([len(t.completion.tokens) for t in trajectories], np.int64),
        prompt_ids=tuple(draw.prompt.id for _, draw, _ in flat),
        num_groups=sum(len(draw.trajectories) >= 2 for _, draw in numbered),
        num_counted_tokens=sum(
            len(t.completion.tokens) for _, draw in numbered if len(draw.trajectories) >= 2 for t in draw.trajectories
        ),
        rank=rank,
    )


def _numbers(values: Sequence[int] | Sequence[float], kind: type[np.generic]) -> Tensor:
    """A tensor of numbers; by way of an array, which reads a list several times faster than a tensor does."""
    with np.errstate(over="ignore"):  # a number too large for a float32 is infinite there, and its step is skipped
        return torch.from_numpy(np.array(values, kind))


def _placed(starts: Sequence[int], values: Sequence[Sequence[float]], width: int) -> Float[Tensor, "N T"]:
    """Each row's values from its start on, zero elsewhere."""
    start_N1 = _numbers(starts, np.int64)[:, None]
    length_N1 = _numbers([len(v) for v in values], np.int64)[:, None]
    place_T = torch.arange(width)
    found_NT = torch.zeros(len(values), width)
    found_NT[(place_T >= start_N1) & (place_T < start_N1 + length_N1)] = _numbers(
        list(chain.from_iterable(values)), np.float32
    )
    return found_NT


def make_rows(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rows:
    """(prompt ids, completion ids) pairs, right-padded, with inputs and targets one place apart."""
    start_N1 = _numbers([len(p) for p, _ in pairs], np.int64)[:, None]
    length_N1 = start_N1 + _numbers([len(c) for _, c in pairs], np.int64)[:, None]
    width = int(length_N1.max()) - 1
    ids = torch.full((len(pairs), width + 1), PAD, dtype=torch.long)
    ids[torch.arange(width + 1) < length_N1] = _numbers(
        list(chain.from_iterable(chain.from_iterable(pairs))), np.int64
    )
    place_T = torch.arange(width)
    numbers: dict[Sequence[int], int] = {}
    return Rows(
        input_NT=ids[:, :-1],
        target_NT=ids[:, 1:],
        attention_NT=place_T < length_N1,
        completion_NT=(place_T >= start_N1 - 1) & (place_T < length_N1 - 1),
        prompt_N=_numbers([numbers.setdefault(tuple(p), len(numbers)) for p, _ in pairs], np.int64),
    )
