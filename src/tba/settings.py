"""The settings tree: every knob of a run with its unit, and what each combination may be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tba import catalog
from tba.buffer_settings import BufferSettings, buffer_problems
from tba.cluster_settings import AsyncSettings, RaySettings, ResourceSettings, cluster_problems, rank_problems
from tba.engine_settings import EngineSettings, engine_problems
from tba.maths_settings import maths_problems
from tba.preference_settings import RewardModelSettings, classifier_problems, preference_problems
from tba.redteam_settings import redteam_problems
from tba.sections import (
    EvaluationSettings,
    Fraction,
    LoggingSettings,
    LoraSettings,
    NonNegativeFloat,
    NonNegativeInt,
    ObjectiveSettings,
    PositiveFloat,
    PositiveInt,
    RangeSettings,
    ReferenceSettings,
    Section,
    Temperature,
    TopP,
    at_end,
    beta_problems,
    range_problems,
)
from tba.sections import SettingsError as SettingsError  # other rooms know it as a word of the settings
from tba.task_settings import TaskSettings as TaskSettings
from tba.task_settings import custom_problems

DEBUG = "TBA_DEBUG"
"""Environment variable that lets tracebacks through."""

Mode = Literal["async", "lockstep"]


MAX_TABLE_POSITIONS = 8
"""Ids that a table model may tell apart."""


class PolicySettings(Section):
    """How the model turns ids into log-probs."""

    temperature: PositiveFloat = 1.0
    """Divides the logits of policy and reference alike."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Compute precision of the trainer's forward; master weights stay float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """How attention is computed. On a CPU in bfloat16 `eager` is faster backward; it holds a number for each pair of
    positions."""
    device: str = "auto"
    """Where the model computes: cpu, cuda, cuda:1; auto: cuda if there is one. In async mode each process sees the GPUs
    that its `resources` give it, and without any computes on the CPU."""
    tokenizer: str | None = None
    """Folder or Hugging Face id of the tokenizer; the model's own if null."""
    trust_remote_code: bool = False
    """Run code that a model folder carries. Off unless you trust the folder."""
    lora: LoraSettings = Field(default_factory=LoraSettings)
    min_new_tokens: NonNegativeInt = 0
    """Tokens of a completion before it may stop: the stop token has probability zero until then."""
    forced_stop: bool = False
    """Whether the last of `search.max_new_tokens` is the stop token for certain, so that no completion is cut."""


class ArchitectureSettings(Section):
    """Shape of a model made from scratch (`model: new-llama`)."""

    layers: PositiveInt = 2
    """Transformer blocks."""
    width: PositiveInt = 96
    """Hidden size."""
    heads: PositiveInt = 4
    """Attention heads; divides `width`."""
    positions: PositiveInt = 64
    """Longest sequence, in tokens."""
    vocabulary: PositiveInt | None = None
    """Tokens of a byte-level tokenizer that is trained on the task's texts; one token per character if null."""


class SearchSettings(Section):
    """Searchers: how many, and how they sample."""

    searchers: PositiveInt = 1
    """Processes that search side by side in async mode."""
    num_samples: PositiveInt = 8
    """Completions per prompt and visit (the paper's S)."""
    temperature: Temperature | None = None
    """Sampling temperature, or {low, high, share} to draw it from for each engine batch; `policy.temperature` if
    left out. Never enters the residual."""
    top_p: TopP = 1.0
    """Nucleus kept when sampling, or {low, high, share} to draw it from. Never enters the residual."""
    max_new_tokens: PositiveInt = 16
    """Longest completion, in tokens, stop token included."""
    batch_prompts: PositiveInt = 32
    """Prompts sampled together in one engine call."""
    scorers: PositiveInt = 1
    """Prompts whose completions a searcher has scored at the same time, beside sampling; each call of a reward
    function then has a process of its own."""
    scorer_processes: NonNegativeInt = 0
    """Processes that score for all searchers, each with reward models, judges and victims of its own and with what
    `resources.scorer` gives it; if 0, each searcher scores for itself. Async mode only."""
    score_limit_s: PositiveFloat = 10.0
    """Seconds that a user's reward function may take for one prompt's completions."""


class TrainerSettings(Section):
    """Optimizer steps: how many, how large, how often published."""

    steps: PositiveInt = 400
    """Optimizer steps of the run."""
    max_minutes: PositiveFloat | None = None
    """Minutes of training after which the run ends as if its steps were done."""
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up: constant, or down to zero at `steps`."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly."""
    stable_steps: NonNegativeInt = 0
    """Steps after warm-up before a linear or cosine course begins."""
    decay_steps: PositiveInt | None = None
    """Steps that such a course takes to zero; those that remain if null."""
    adam_betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """Decay rates of AdamW's moments."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; no clipping if null."""
    groups_per_step: PositiveInt | None = None
    """Groups in one batch; 32 if neither this nor batch_size is given."""
    group_size: NonNegativeInt = 8
    """Trajectories per group (the paper's K)."""
    batch_size: PositiveInt | None = None
    """Trajectories in one batch, another way to give groups_per_step x group_size."""
    sync_every: PositiveInt = 1
    """Steps between two publications of the weights (the paper's k)."""
    processes: PositiveInt = 1
    """Ranks that share the model and each batch (docs/scaling.md). Async mode only."""
    micro_batch_tokens: PositiveInt = 16_384
    """Padded tokens that one forward pass may hold."""
    max_bad_steps: PositiveInt = 5
    """Steps in a row with a non-finite loss or gradient after which the run stops."""
    record_every: NonNegativeInt = 10
    """Steps between two that `tba buffer replay` can compute again; those skipped always can be. 0: none."""
    record_mib: PositiveInt = 256
    """MiB of recorded steps kept; beyond, the oldest go."""


class CheckpointSettings(Section):
    """Saving the whole run."""

    every: NonNegativeInt = 0
    """Steps between checkpoints, at the next end of a round; 0: only at the end and on Ctrl-C."""
    keep: PositiveInt = 2
    """Complete checkpoints kept."""


class SftSettings(Section):
    """Supervised warm start (`tba sft`)."""

    steps: PositiveInt = 1000
    """Optimizer steps."""
    batch_size: PositiveInt = 256
    """Demonstrations per step."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW; linear warm-up over 5 % of the steps, cosine to zero."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's decoupled weight decay."""
    wrong_share: Fraction = 0.0
    """arithmetic: share of demonstrations whose result is wrong."""


class Settings(Section):
    """The whole tree. A run is a function of it."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of sampling, drawing and model initialisation."""
    mode: Mode = "async"
    """async: Ray processes side by side; lockstep: one deterministic process."""
    model: str = "arithmetic"
    """Built-in model (arithmetic), packaged one (smollm2-135m), new-llama, new-table, a folder, a Hugging Face id."""
    task: TaskSettings = Field(default_factory=TaskSettings)
    policy: PolicySettings = Field(default_factory=PolicySettings)
    reference: ReferenceSettings = Field(default_factory=ReferenceSettings)
    architecture: ArchitectureSettings = Field(default_factory=ArchitectureSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    search: SearchSettings = Field(default_factory=SearchSettings)
    buffer: BufferSettings = Field(default_factory=BufferSettings)
    objective: ObjectiveSettings = Field(default_factory=ObjectiveSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    async_: AsyncSettings = Field(default_factory=AsyncSettings, alias="async")
    ray: RaySettings = Field(default_factory=RaySettings)
    resources: ResourceSettings = Field(default_factory=ResourceSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    sft: SftSettings = Field(default_factory=SftSettings)
    reward_model: RewardModelSettings = Field(default_factory=RewardModelSettings)

    @model_validator(mode="after")
    def _holds_together(self) -> Settings:
        problems = list(_contradictions(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def groups_per_step(self) -> int:
        """Groups in one batch."""
        trainer = self.trainer
        if trainer.groups_per_step is not None:
            return trainer.groups_per_step
        return 32 if trainer.batch_size is None else max(1, trainer.batch_size // max(1, trainer.group_size))

    @property
    def prompts_per_round(self) -> int:
        """Prompts searched for one round: groups_per_step x sync_every / reuse."""
        return round(self.groups_per_step * self.trainer.sync_every / self.buffer.reuse)

    @property
    def initial_prompts(self) -> int:
        """Prompts searched for before the first step: the first round, or `buffer.initial` if more."""
        return max(self.prompts_per_round, math.ceil(self.buffer.initial / self.search.num_samples))

    @property
    def recent_age(self) -> int:
        """Largest age that counts as recent, in steps."""
        given = self.buffer.recent_age
        return 2 * self.trainer.sync_every - 1 if given is None else given

    @property
    def lead(self) -> int | None:
        """Rounds a searcher may start beyond the newest published version; None: any.

        With `buffer.max_age` alone it is the most at which all data of a round are young enough in every step of the
        round: (lead + 1) x sync_every - 1 <= max_age. See docs/asynchrony.md.
        """
        given, oldest = self.async_.lead, self.buffer.max_age
        return given if given is not None or oldest is None else (oldest + 1) // self.trainer.sync_every - 1

    @property
    def keeps_logps(self) -> bool:
        """Whether the buffer keeps the log-prob of every token, and not only their sum."""
        given = self.buffer.keep_logps
        return "behaviour_logps" in catalog.reads(self.objective) if given is None else given

    @property
    def final_beta(self) -> float:
        """Beta that training ends with, target temperature included; the exact target is that of this one."""
        objective = self.objective
        beta = objective.beta if objective.beta_final is None else objective.beta_final
        return beta * at_end(objective.target_temperature)

    @property
    def final_prior(self) -> float:
        """Weight of the reference's log-prob in the log-reward that training ends with."""
        objective = self.objective
        return 1.0 / (at_end(objective.prior_temperature) * at_end(objective.target_temperature))

    @property
    def objective_knobs(self) -> dict[str, Any]:
        """What the objective uses besides beta: what is set, else its defaults."""
        return catalog.knobs_in_use(self.objective)

    @property
    def sampling_temperature(self) -> float | RangeSettings:
        """Temperature that searchers sample at, or the range that they draw it from."""
        given = self.search.temperature
        return self.policy.temperature if given is None else given

    def resolved(self) -> dict[str, Any]:
        """The tree with everything that follows filled in, as plain data."""
        tree = self.model_dump(mode="json", by_alias=True)
        tree["trainer"]["groups_per_step"] = self.groups_per_step
        tree["trainer"]["batch_size"] = self.groups_per_step * self.trainer.group_size
        tree["buffer"]["recent_age"] = self.recent_age
        if self.search.temperature is None:
            tree["search"]["temperature"] = self.policy.temperature
        for key, value in self.objective_knobs.items():
            tree["objective"][key] = list(value) if isinstance(value, tuple) else value
        return tree


def _contradictions(s: Settings) -> Iterator[str]:
    """What each key allows but all together do not."""
    yield from _batch_problems(s)
    yield from _schedule_problems(s.trainer)
    yield from _pool_problems(s)
    yield from buffer_problems(s.buffer, s.trainer.sync_every)
    yield from _name_problems(s)
    yield from _engine_problems(s)
    yield from _limit_problems(s)
    yield from catalog.objective_problems(s.objective)
    if s.buffer.keep_logps is False and s.objective.name in catalog.OBJECTIVES and "behaviour_logps" in catalog.reads(
        s.objective
    ):
        yield (f"buffer.keep_logps = false leaves nothing of the tokens' log-probs that objective.name = "
               f"{s.objective.name!r} reads; leave it out.")
    yield from _task_problems(s)
    yield from s.reference.problems()
    yield from cluster_problems(mode=s.mode, ray=s.ray, resources=s.resources)
    yield from rank_problems(
        s.trainer.processes, s.mode, s.policy.device, groups=s.groups_per_step, gpus=s.resources.trainer.gpus
    )
    yield from range_problems("search.temperature", s.search.temperature)
    yield from range_problems("search.top_p", s.search.top_p, 1.0)
    yield from beta_problems(
        beta=s.objective.beta, beta_final=s.objective.beta_final, beta_steps=s.objective.beta_steps,
        beta_stop=s.objective.beta_stop, target_kl=s.objective.target_kl,
    )


def _batch_problems(s: Settings) -> Iterator[str]:
    trainer, buffer = s.trainer, s.buffer
    size = trainer.group_size
    if size < 2:
        yield (f"trainer.group_size = {size}: at least 2 completions per prompt are needed, "
               f"since a group of one has no mean to differ from; set trainer.group_size=2 or more.")
    elif trainer.batch_size is not None and trainer.batch_size % size:
        nearest = max(1, round(trainer.batch_size / size)) * size
        yield (f"trainer.batch_size = {trainer.batch_size} is not a multiple of trainer.group_size = {size}; "
               f"the nearest valid trainer.batch_size is {nearest}.")
    elif trainer.batch_size is not None and trainer.batch_size != s.groups_per_step * size:
        yield (f"trainer.batch_size = {trainer.batch_size} contradicts trainer.groups_per_step = "
               f"{trainer.groups_per_step} x trainer.group_size = {size}; give one of the two.")
    per_round = s.groups_per_step * trainer.sync_every / buffer.reuse
    if not 1 <= per_round < 2**53 or abs(per_round - round(per_round)) > 1e-9:
        yield (f"trainer.groups_per_step x trainer.sync_every / buffer.reuse = {s.groups_per_step} x "
               f"{trainer.sync_every} / {buffer.reuse:g} = {per_round:g} prompts per round; "
               f"choose them so that this is a whole number of at least 1.")
    if trainer.steps % trainer.sync_every:
        nearest = max(1, round(trainer.steps / trainer.sync_every)) * trainer.sync_every
        yield (f"trainer.steps = {trainer.steps} is not a multiple of trainer.sync_every = {trainer.sync_every}; "
               f"the nearest valid trainer.steps is {nearest}.")


def _schedule_problems(trainer: TrainerSettings) -> Iterator[str]:
    for key in ("stable_steps", "decay_steps"):
        if getattr(trainer, key) and trainer.schedule == "constant":
            yield (f"trainer.{key} = {getattr(trainer, key)} is not used by trainer.schedule = 'constant'; leave it "
                   f"out, or set trainer.schedule=linear or cosine.")


def _pool_problems(s: Settings) -> Iterator[str]:
    trainer, buffer, search = s.trainer, s.buffer, s.search
    size = trainer.group_size
    if search.num_samples < size:
        yield (f"search.num_samples = {search.num_samples} is below trainer.group_size = {size}, so one visit "
               f"fills no group; set search.num_samples={size} or more.")
    if buffer.capacity_per_prompt < size:
        yield (f"buffer.capacity_per_prompt = {buffer.capacity_per_prompt} holds less than one group of "
               f"trainer.group_size = {size}; raise it to {size} or more.")
    batch, shards = s.groups_per_step * size, buffer.shards
    split = "" if shards == 1 else f" / buffer.shards = {shards}"
    if buffer.capacity // shards < batch:
        yield (f"buffer.capacity = {buffer.capacity}{split} holds fewer trajectories than one batch needs ({batch}); "
               f"raise it, or lower trainer.groups_per_step.")
    longest = batch * search.max_new_tokens
    per_token = 8 if s.engine.adopt_every is None else 12  # with the version of each
    for name, need, unit in (("capacity_tokens", longest, "tokens"),
                             ("capacity_bytes", batch * (160 + per_token * search.max_new_tokens), "bytes")):
        bound = getattr(buffer, name)
        if bound is not None and bound // shards < need:
            yield (f"buffer.{name} = {bound}{split} may hold less than one batch, whose {batch} trajectories take up "
                   f"to {need} {unit}, so the trainer could wait for ever; raise it, or lower trainer.groups_per_step.")


def _name_problems(s: Settings) -> Iterator[str]:
    yield from catalog.model_problems(s.model)
    yield from catalog.name_problems("task.name", s.task.name, catalog.TASKS)
    yield from catalog.name_problems("engine.name", s.engine.name, catalog.ENGINES)
    yield from catalog.name_problems("objective.name", s.objective.name, catalog.OBJECTIVES)
    if s.model == "new-table" and s.architecture.positions > MAX_TABLE_POSITIONS:
        yield (f"architecture.positions = {s.architecture.positions} is more than a table can tell apart "
               f"({MAX_TABLE_POSITIONS}); lower it.")
    if s.model == "new-table" and s.engine.name != "table":
        yield (f"model = new-table has no KV cache for engine.name = {s.engine.name!r}; set engine.name=table.")
    if s.model == "new-table" and s.policy.lora.rank:
        yield (f"policy.lora.rank = {s.policy.lora.rank}: model = new-table has no linear layer to adapt; "
               f"set policy.lora.rank=0, or another model.")
    yield from catalog.vocabulary_problems(s.model, s.architecture.vocabulary)
    if s.architecture.width % s.architecture.heads:
        yield (f"architecture.width = {s.architecture.width} is not a multiple of architecture.heads = "
               f"{s.architecture.heads}; choose a width that the heads divide.")


def _limit_problems(s: Settings) -> Iterator[str]:
    policy, longest = s.policy, s.search.max_new_tokens
    if policy.min_new_tokens >= longest:
        yield (f"policy.min_new_tokens = {policy.min_new_tokens} leaves no room for a stop token within "
               f"search.max_new_tokens = {longest}; lower it.")


def _engine_problems(s: Settings) -> Iterator[str]:
    every, longest = s.engine.adopt_every, s.search.max_new_tokens
    yield from engine_problems(s.engine, s.search.num_samples)
    if s.engine.dtype != "float32" and not s.policy.lora.rank and s.engine.name not in catalog.FOREIGN:
        yield f"engine.dtype = {s.engine.dtype} is for a base under an adapter; set policy.lora.rank, or leave it out."
    if every is None:
        return
    if s.mode == "lockstep":
        yield (f"engine.adopt_every = {every} adopts weights that are published while a batch is sampled, and "
               f"mode = lockstep publishes none meanwhile; set engine.adopt_every=null, or mode=async.")
    if every >= longest:
        yield (f"engine.adopt_every = {every} is no fewer than the {longest} tokens of search.max_new_tokens, so no "
               f"look would fall inside a batch; lower it, or set engine.adopt_every=null.")


def _task_problems(s: Settings) -> Iterator[str]:
    search = s.search
    if s.evaluation.embedder is not None:
        yield from classifier_problems("evaluation.embedder", s.evaluation.embedder)
    if search.scorer_processes and s.mode == "lockstep":
        yield (f"search.scorer_processes = {search.scorer_processes} has no use in mode = lockstep, which is one "
               f"process; set mode=async, or leave it out.")
    bears_it = s.task.name in ("custom", "script") and all(reward.function for reward in s.task.rewards)
    if search.scorers > 1 and not bears_it:
        yield (f"search.scorers = {search.scorers} is for reward functions of task.name=custom or a script; leave it "
               f"out: endpoints have `concurrency`, and other scorers use the cores there are.")
    if s.task.held_out == 0 and s.task.name != "enumerable":
        yield "task.held_out = 0 leaves no prompts to evaluate on; set task.held_out=1 or more."
    if s.task.name == "enumerable":
        yield from catalog.enumerable_problems(s.task, search.max_new_tokens)
    if s.task.name == "custom":
        yield from custom_problems(s.task)
    if s.task.name == "preference":
        yield from preference_problems(s.task)
        if s.sft.wrong_share:
            yield (f"sft.wrong_share = {s.sft.wrong_share:g}: task.name = 'preference' imitates humans' completions as "
                   f"they are; set it to 0.")
    if s.task.name == "redteam":
        yield from redteam_problems(s.task)
    if s.task.name == "maths":
        yield from maths_problems(s.task)
        if s.sft.wrong_share:
            yield f"sft.wrong_share = {s.sft.wrong_share:g}: task.name = 'maths' has right solutions only; set it to 0."
