"""The charts of the page, declared once: what each shows, in which unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tba import metrics

Table = Literal["train", "eval", "chunk", "k"]
"""Training steps, evaluations, chunks of consecutive steps, or numbers of completions per prompt."""

TRAIN_RATE = "train tokens/s"
SEARCH_RATE = "search tokens/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    table: Table
    column: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A chart of lines before it meets a run."""

    id: str
    title: str
    unit: str
    about: str
    lines: tuple[Line, ...]
    x: Literal["step", "wall_s", "k"] = "step"
    """`k`: completions per prompt, of the table of that name."""
    is_share: bool = False
    """Drawn from 0 to 1."""
    is_from_zero: bool = False
    """Drawn from 0 upwards."""
    is_optional: bool = False
    """Left out, rather than shown empty, where the run has no such numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of a run, as the page needs it."""

    id: str
    title: str
    about: str
    """What it shows, one sentence."""
    caption: str
    """What it shows of this run, in words and numbers."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """For `page.js`; empty where there is nothing to draw."""


EACH_K = ("start", "final")
"""Columns of the table `k`: pass@k for each k, at the first and at the last evaluation of several completions."""

PASS_OVER_K = Plan(
    id="pass_k",
    title="Full marks within k completions",
    unit="share",
    x="k",
    is_share=True,
    is_optional=True,
    about="pass@k over k: share of held-out prompts with full marks among k sampled completions, unbiased.",
    lines=tuple(Line(table="k", column=name, name=name) for name in EACH_K),
)


def pass_each(ks: Sequence[int]) -> Plan:
    """pass@k of each k over the run; evaluations of one completion have none."""
    return Plan(
        id="pass_each",
        title="Full marks within k completions, over the run",
        unit="share",
        is_share=True,
        is_optional=True,
        about="pass@k for several k, in evaluations of several completions per prompt.",
        lines=tuple(Line(table="eval", column=f"{metrics.PASS_EACH}:{k}", name=f"k = {k}") for k in ks),
    )


PLANS = (
    Plan(
        id="reward",
        title="Reward",
        unit="reward units",
        about="Mean reward of what the trainer consumed, of what searchers delivered, and of the evaluation.",
        lines=(
            Line(table="train", column=metrics.REWARD, name="consumed"),
            Line(table="chunk", column=metrics.SEARCH_REWARD, name="delivered"),
            Line(table="eval", column=metrics.EVAL_REWARD, name="evaluation"),
        ),
    ),
    Plan(
        id="pass",
        title="Full marks",
        unit="share",
        is_share=True,
        about="pass@1 and pass@k: share of sampled completions, and of prompts, with full marks on "
        "held-out prompts; greedy takes the most likely ids.",
        lines=(
            Line(table="eval", column=metrics.PASS_1, name="pass@1"),
            Line(table="eval", column=metrics.PASS_1_GREEDY, name="pass@1 greedy"),
            Line(table="eval", column=metrics.PASS_K, name="pass@k"),
        ),
    ),
    Plan(
        id="kl",
        title="KL to the reference",
        unit="nats per completion",
        about="Mean log-prob under the policy minus log-prob under the reference.",
        lines=(
            Line(table="train", column=metrics.KL, name="consumed"),
            Line(table="eval", column=metrics.EVAL_KL, name="evaluation"),
        ),
    ),
    Plan(
        id="entropy",
        title="Entropy per token",
        unit="nats per token",
        is_from_zero=True,
        about="Mean minus log-prob of the tokens consumed, under the policy.",
        lines=(Line(table="train", column=metrics.ENTROPY, name="consumed"),),
    ),
    Plan(
        id="entropy_completion",
        title="Entropy per completion",
        unit="nats per completion",
        is_optional=True,
        is_from_zero=True,
        about="Mean minus log-prob of the completions of the evaluation.",
        lines=(Line(table="eval", column=metrics.EVAL_ENTROPY, name="evaluation"),),
    ),
    Plan(
        id="diversity",
        title="Diversity",
        unit="share",
        is_share=True,
        is_optional=True,
        about="How unlike the completions of a prompt are, in evaluations of several: distinct ones, distinct ids and "
        "pairs of them, distance of wording; BLEU against each other is high where they are alike.",
        lines=(
            Line(table="eval", column=metrics.DISTINCT, name="distinct"),
            Line(table="eval", column=metrics.DISTINCT_1, name="distinct-1"),
            Line(table="eval", column=metrics.DISTINCT_2, name="distinct-2"),
            Line(table="eval", column=metrics.EMBEDDING_DISTANCE, name="embedding distance"),
            Line(table="eval", column=metrics.SELF_BLEU, name="self-BLEU"),
            Line(table="eval", column=metrics.ATTACK_DIVERSITY, name="attack diversity"),
        ),
    ),
    Plan(
        id="effective",
        title="Effective answers",
        unit="answers per prompt",
        is_optional=True,
        is_from_zero=True,
        about="Equally frequent answers that would be as uncertain as those to a prompt, mean over prompts.",
        lines=(Line(table="eval", column=metrics.EFFECTIVE, name="effective answers"),),
    ),
    Plan(
        id="target",
        title="Distance to the exact target",
        unit="total variation; nats",
        is_optional=True,
        about="The policy against the posterior that can be enumerated: total variation, and KL in nats.",
        lines=(
            Line(table="eval", column=metrics.TV, name="total variation"),
            Line(table="eval", column=metrics.TARGET_KL, name="KL, nats"),
        ),
    ),
    Plan(
        id="throughput",
        title="Throughput of both sides",
        unit="tokens/s",
        x="wall_s",
        is_from_zero=True,
        about="Trainer: prompt and completion tokens consumed. Searchers: completion tokens delivered.",
        lines=(
            Line(table="chunk", column=TRAIN_RATE, name="trainer"),
            Line(table="chunk", column=SEARCH_RATE, name="searchers"),
        ),
    ),
    Plan(
        id="trainer_time",
        title="The trainer's time",
        unit="s per step",
        is_optional=True,
        is_from_zero=True,
        about="Forward, backward and optimizer of a step, and idle time before it.",
        lines=(
            Line(table="chunk", column=metrics.STEP_SECONDS, name="at work"),
            Line(table="chunk", column=metrics.WAIT_SECONDS, name="waiting"),
        ),
    ),
    Plan(
        id="buffer",
        title="Buffer size",
        unit="trajectories",
        is_from_zero=True,
        about="Trajectories in the buffer.",
        lines=(Line(table="train", column=metrics.BUFFER_SIZE, name="in the buffer"),),
    ),
    Plan(
        id="reuse",
        title="Reuse",
        unit="consumed per inserted",
        is_from_zero=True,
        about="Trajectories consumed per trajectory inserted, so far.",
        lines=(Line(table="train", column=metrics.REUSE, name="reuse"),),
    ),
)
