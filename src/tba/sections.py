"""Branches of the settings tree about objective, adapter, reference, evaluation, loggers, exploration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from tba import catalog


class SettingsError(ValueError):
    """Every mistake found in the user's settings, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class Section(BaseModel):
    """A branch of the tree: strict types, no unknown keys, frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Normalise = Annotated[str | float, BeforeValidator(catalog.normalisation)]


class Line(Section):
    """A number that moves in a line over the first steps, then stays."""

    from_: PositiveFloat = Field(alias="from")
    """At step 1."""
    to: PositiveFloat
    """From step `steps` + 1 on."""
    steps: PositiveInt
    """Optimizer steps."""


class RangeSettings(Section):
    """A number drawn anew for every engine batch."""

    low: PositiveFloat
    """Smallest value."""
    high: PositiveFloat
    """Largest value."""
    share: Probability = 1.0
    """Share of the engine batches that draw from the range; the others sample as the policy would."""


def _kind_of(value: Any) -> str:
    return "[range]" if isinstance(value, (dict, RangeSettings)) else "[number]"


def _is_line(value: Any) -> str:
    return "[line]" if isinstance(value, (dict, Line)) else "[number]"


Moving = Annotated[
    Annotated[PositiveFloat, Tag("[number]")] | Annotated[Line, Tag("[line]")], Discriminator(_is_line)
]
"""A number, or one that moves in a line."""


def at_end(value: float | Line | None) -> float:
    """What a setting that may move ends at; 1 if it is None."""
    return value.to if isinstance(value, Line) else 1.0 if value is None else value


class ObjectiveSettings(Section):
    """The loss and its strength of KL."""

    name: str = "trajectory_balance"
    """A key of OBJECTIVES."""
    beta: NonNegativeFloat = 0.02
    """Reward units per nat of KL at step 1; 0 leaves KL out where the objective can do without."""
    beta_final: PositiveFloat | None = None
    """Beta from step `beta_steps` on; constant if left out."""
    beta_steps: NonNegativeInt = 0
    """Steps over which beta moves linearly to `beta_final`."""
    beta_stop: PositiveInt | None = None
    """Step from which beta is `beta_final` wherever the line is (the paper's early stop)."""
    target_kl: PositiveFloat | None = None
    """Nats of KL per completion that beta is steered to; `beta` is then its value at step 1."""
    target_kl_gain: PositiveFloat = 0.1
    """Largest relative change of beta in one step is a fifth of this."""
    prior_temperature: Moving | None = None
    """trajectory_balance*: divides the reference's log-prob in the log-reward, the red-teaming papers' gamma: a number,
    or {from, to, steps}. 1 if null."""
    target_temperature: Moving | None = None
    """trajectory_balance*: divides the whole log-reward, their T: a number, or {from, to, steps}. 1 if null."""
    scale: Literal["advantage", "paper"] | None = None
    """trajectory_balance*: beta/2 x mean squared residual (advantage, the default), or without that factor (paper)."""
    log_z_per: Literal["prompt", "model"] | None = None
    """trajectory_balance_learned_z: one log Z for each prompt (default), or one for all."""
    log_z_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """trajectory_balance_learned_z: share of its mean residual that log Z moves by in a step (0.1)."""
    ratio: Literal["off", "clamp", "cispo"] | None = None
    """tba_prime: importance ratio of a token: none (default), truncated, or truncated and detached."""
    ratio_max: PositiveFloat | None = None
    """tba_prime, cispo: largest importance ratio of a token (8)."""
    clip: Annotated[tuple[OpenFraction, PositiveFloat], Field(strict=False)] | None = None
    """grpo, dr_grpo, ppo_clip (0.2, 0.2), gspo (3e-4, 4e-4): how far a ratio may be below and above 1."""
    normalise: Normalise | None = None
    """tba_prime, grpo (sequence), cispo, ppo_clip (token), dr_grpo (1.0): mean over each sequence's tokens, mean over
    the batch's tokens, or sum over tokens divided by this number of them."""


class LoraSettings(Section):
    """Low-rank adapter: what is trained, published and saved instead of all weights."""

    rank: NonNegativeInt = 0
    """Rank of the update of each target; 0: no adapter, all weights are trained."""
    alpha: PositiveFloat | None = None
    """The update is scaled by alpha / rank; 2 x rank if left out."""
    targets: tuple[str, ...] | None = Field(default=None, min_length=1, strict=False)
    """Ends of the names of the linear layers adapted; all but the output layer if null."""


class ReferenceSettings(Section):
    """The policy that KL is measured against."""

    kind: Literal["fixed", "reset", "ema"] = "fixed"
    """fixed: the start policy; reset: a copy of the policy every so often; ema: a moving average of its weights."""
    every: PositiveInt | None = None
    """reset and ema: optimizer steps between two changes of the reference; ema: 1 if left out."""
    decay: Fraction | None = None
    """ema: share of the old average kept at each change."""
    reset_optimizer: bool = False
    """reset: forget the optimizer's moments together with the reference."""

    def problems(self) -> Iterator[str]:
        """What each key allows but all together do not."""
        if self.kind == "reset" and self.every is None:
            yield "reference.kind = 'reset' needs the steps between two resets; set reference.every."
        if self.kind == "fixed" and self.every is not None:
            yield (f"reference.every = {self.every} moves nothing while reference.kind = 'fixed'; set "
                   f"reference.kind to reset or ema, or drop it.")
        if self.kind == "ema" and self.decay is None:
            yield "reference.kind = 'ema' needs the share of the old average that is kept; set reference.decay."
        if self.kind != "ema" and self.decay is not None:
            yield f"reference.decay = {self.decay:g} is of reference.kind = 'ema', not {self.kind!r}; drop one of them."
        if self.kind != "reset" and self.reset_optimizer:
            yield f"reference.reset_optimizer = True goes with reference.kind = 'reset', not {self.kind!r}."


class EvaluationSettings(Section):
    """Held-out evaluation."""

    every: NonNegativeInt = 0
    """Steps between evaluations during training; 0: only before and after."""
    prompts: PositiveInt = 500
    """Held-out prompts used before and after training, at most."""
    samples: PositiveInt = 4
    """Completions per prompt at `policy.temperature`."""
    during_prompts: PositiveInt = 100
    """Held-out prompts used during training."""
    during_samples: PositiveInt = 1
    """Completions of each of these; two or more show diversity over time."""
    embedder: str | None = None
    """Folder or Hugging Face id of an encoder that `embedding_distance` is measured by; character 3-grams if null."""
    limit_s: PositiveFloat = 600.0
    """Seconds that an evaluation may take in async mode; one during training is then given up."""


def _names(value: Any) -> Any:
    """A list of names, however few were written: one alone, or none."""
    if value is None or value == "none":
        return ()
    return (value,) if isinstance(value, str) else value


class LoggingSettings(Section):
    """Where the numbers of a run go besides its directory."""

    report_to: Annotated[
        tuple[Literal["trackio", "wandb", "tensorboard", "mlflow"], ...], BeforeValidator(_names)
    ] = Field(default=(), strict=False)
    """Loggers: any of trackio, wandb, tensorboard, mlflow (docs/own_tasks.md)."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """Project, or experiment, of the run in them; the recipe's name if null."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run in them; that of its directory if null."""
    space: Annotated[str, Field(min_length=1)] | None = None
    """trackio: Hugging Face Space that the numbers go to as well."""


Temperature = Annotated[
    Annotated[PositiveFloat, Tag("[number]")] | Annotated[RangeSettings, Tag("[range]")], Discriminator(_kind_of)
]
"""A number, or a range of numbers."""
TopP = Annotated[
    Annotated[Probability, Tag("[number]")] | Annotated[RangeSettings, Tag("[range]")], Discriminator(_kind_of)
]
"""A probability, or a range of them."""


def range_problems(key: str, value: float | RangeSettings | None, most: float | None = None) -> Iterator[str]:
    """What is wrong with a number or a range of `key`, of which none may exceed `most`."""
    if not isinstance(value, RangeSettings):
        return
    if value.low >= value.high:
        yield (f"{key} = {{low: {value.low:g}, high: {value.high:g}}} is no range; low must be below high, "
               f"or give one number.")
    if most is not None and value.high > most:
        yield f"{key}.high = {value.high:g} is more than {most:g}; lower it."


def beta_problems(
    *, beta: float, beta_final: float | None, beta_steps: int, beta_stop: int | None, target_kl: float | None
) -> Iterator[str]:
    """What is wrong with a combination of the ways in which beta may move."""
    if target_kl is not None and beta_final is not None:
        yield (f"objective.target_kl = {target_kl:g} and objective.beta_final = {beta_final:g} both move beta; "
               f"give one of them.")
    if target_kl is not None and beta == 0:
        yield (f"objective.target_kl = {target_kl:g} steers beta by factors, and objective.beta = 0 stays 0; "
               f"set objective.beta above 0.")
    if beta_final is None and beta_steps:
        yield f"objective.beta_steps = {beta_steps} has nowhere to go; give objective.beta_final, or drop it."
    if beta_final is None and beta_stop is not None:
        yield f"objective.beta_stop = {beta_stop} has nowhere to jump to; give objective.beta_final, or drop it."
    elif beta_stop is not None and beta_stop > beta_steps:
        yield (f"objective.beta_stop = {beta_stop} is after the line's end at objective.beta_steps = {beta_steps}, "
               f"so it stops nothing; lower it, or drop it.")
