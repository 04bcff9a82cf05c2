"""TBAConfig to a settings tree: what a script's fields mean as settings of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.loggers import LOGGERS
from tba.trainer_api.config import TBAConfig

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
LOSSES = ("trajectory_balance", "grpo", "dr_grpo", "cispo")
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
NO_PROJECT = "huggingface"
"""What `project` is where a script says nothing."""
MAX_PROMPT_TOKENS = 1 << 20
"""TRL bounds no prompt; the model's own limit remains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How completions are counted: of a step, of a prompt, between two publications of the weights."""

    groups: int
    """Groups in one step."""
    size: int
    """Completions in one group."""
    sync: int
    """Steps between two publications."""
    reuse: float
    """Times that a completion is trained on."""
    prompts: int
    """Prompts between two publications."""

    @staticmethod
    def of(args: TBAConfig) -> tuple[Batch | None, list[str]]:
        """The batch of `args`, or everything that is wrong with it."""
        samples, accumulated = args.num_generations, args.gradient_accumulation_steps
        step = args.per_device_train_batch_size * accumulated
        between = args.per_device_train_batch_size * (args.steps_per_generation or accumulated)
        problems = []
        if args.generation_batch_size is not None:
            if args.steps_per_generation is not None:
                problems.append(
                    f"generation_batch_size = {args.generation_batch_size} and steps_per_generation = "
                    f"{args.steps_per_generation} say the same; give one of them."
                )
            between = args.generation_batch_size
        size = samples if step >= samples else step
        if min(samples, step) < 2:
            problems.append(
                f"num_generations = {samples} with {step} completions a step: a group needs at least 2; raise "
                f"num_generations, per_device_train_batch_size or gradient_accumulation_steps."
            )
        elif step % size or samples % size:
            problems.append(
                f"per_device_train_batch_size x gradient_accumulation_steps = {step} completions a step and "
                f"num_generations = {samples}: one must be a multiple of the other."
            )
        if between % samples:
            problems.append(
                f"{between} completions between two publications (generation_batch_size, or "
                f"per_device_train_batch_size x steps_per_generation) are no multiple of num_generations = {samples}; "
                f"the nearest is {max(1, round(between / samples)) * samples}."
            )
        steps = between * args.num_iterations
        if steps % step:
            problems.append(
                f"{between} completions between two publications, each used {args.num_iterations} times "
                f"(num_iterations), make no whole number of steps of {step} completions; change one of them."
            )
        elif args.max_steps > 0 and args.max_steps % (steps // step):
            nearest = max(1, round(args.max_steps * step / steps)) * (steps // step)
            problems.append(
                f"max_steps = {args.max_steps} is not a multiple of {steps // step} steps between two publications; "
                f"the nearest is {nearest}."
            )
        if problems:
            return None, problems
        return Batch(groups=step // size, size=size, sync=steps // step,
                     reuse=args.num_iterations * samples / size, prompts=between // samples), []


def steps_of(args: TBAConfig, batch: Batch, rows: int) -> int:
    """Optimizer steps of the run: `max_steps`, or those of `num_train_epochs` passes, in whole rounds."""
    if args.max_steps > 0:
        return args.max_steps
    return math.ceil(args.num_train_epochs * rows / batch.prompts) * batch.sync


def problems_of(args: TBAConfig) -> Iterator[str]:
    """What is wrong with values of fields that take part."""
    for name, known in (("lr_scheduler_type", tuple(SCHEDULES)), ("optim", OPTIMIZERS), ("loss_type", LOSSES)):
        value = str(getattr(getattr(args, name), "value", getattr(args, name)))
        if value not in known:
            yield f"{name} = {value!r} has no meaning for TBA; instead: {', '.join(known)}."
    if args.importance_sampling_level not in ("token", "sequence"):
        yield f"importance_sampling_level = {args.importance_sampling_level!r}: should be token, or sequence (gspo)."
    if args.importance_sampling_level == "sequence" and args.loss_type != "grpo":
        yield (f"importance_sampling_level = 'sequence' goes with loss_type = 'grpo', not {args.loss_type!r}, whose "
               f"loss has no such ratio; leave it out.")
    if args.beta <= 0 and args.loss_type == "trajectory_balance":
        yield (f"beta = {args.beta}: the target of trajectory balance, pi_ref exp(reward / beta), needs beta > 0; "
               f"leave it out (0.02), or set loss_type='grpo', which can do without KL.")
    clipped = args.loss_type in ("grpo", "dr_grpo")
    if not clipped and args.epsilon != 0.2:
        yield f"epsilon = {args.epsilon} is not used by loss_type = {args.loss_type!r}; leave it out."
    if not clipped and args.loss_type != "cispo" and args.epsilon_high is not None:
        yield f"epsilon_high = {args.epsilon_high} is not used by loss_type = {args.loss_type!r}; leave it out."
    given = dict(args.model_init_kwargs or {}) if isinstance(args.model_init_kwargs, Mapping | None) else {}
    for name in ("dtype", "torch_dtype"):
        value = str(given.pop(name, "float32")).removeprefix("torch.")
        if value not in ("float32", "auto"):
            yield (f"model_init_kwargs[{name!r}] = {value!r}: master weights are float32; leave it out, and compute in "
                   f"bfloat16 with bf16=True.")
    given.pop("trust_remote_code", None)
    for name, value in given.items():
        yield f"model_init_kwargs[{name!r}] = {value!r} is not passed on; leave it out, or save such a model."
    if args.max_completion_length is None:
        yield "max_completion_length = None: completions need a longest length, in tokens; give it."


def tree_of(
    args: TBAConfig, batch: Batch, *, steps: int, held_out: int, model: str, tokenizer: str | None,
    rewards: Sequence[Mapping[str, Any]], lora: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings tree of a script."""
    schedule = SCHEDULES[str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))]
    warmup = args.warmup_steps if args.warmup_steps >= 1 else math.ceil(args.warmup_steps * steps)
    given = args.model_init_kwargs
    trusted = args.trust_remote_code or (isinstance(given, Mapping) and bool(given.get("trust_remote_code")))
    tree: dict[str, Any] = {
        "seed": args.seed, "mode": args.mode, "model": model,
        "task": {"name": "script", "rewards": [dict(reward) for reward in rewards], "held_out": max(1, held_out),
                 "max_prompt_tokens": MAX_PROMPT_TOKENS},
        "policy": {"temperature": float(args.temperature), "autocast": "bfloat16" if args.bf16 else "none",
                   "trust_remote_code": trusted, "lora": dict(lora), "tokenizer": tokenizer},
        "search": {"searchers": args.searchers, "num_samples": args.num_generations,
                   "max_new_tokens": args.max_completion_length, "top_p": float(args.top_p),
                   "batch_prompts": max(1, min(32, batch.prompts))},
        "buffer": {"reuse": float(batch.reuse), "capacity_per_prompt": max(100, 4 * args.num_generations)},
        "objective": _objective_of(args),
        "trainer": {
            "steps": steps, "learning_rate": float(args.learning_rate), "schedule": schedule,
            "warmup_steps": int(warmup), "adam_betas": [args.adam_beta1, args.adam_beta2],
            "weight_decay": float(args.weight_decay), "clip_norm": float(args.max_grad_norm) or None,
            "groups_per_step": batch.groups, "group_size": batch.size, "sync_every": batch.sync,
        },
        "evaluation": {"every": 0, "prompts": max(1, held_out), "during_prompts": max(1, held_out),
                       "samples": args.num_generations_eval or args.num_generations},
        "checkpoint": {"every": 0, "keep": args.save_total_limit or 2},
        "logging": {"report_to": loggers_of(args), "name": args.run_name or None,
                    "project": None if args.project in (None, "", NO_PROJECT) else args.project,
                    "space": args.trackio_space_id or None},
    }
    if args.sync_ref_model:
        tree["reference"] = {"kind": "ema", "every": args.ref_model_sync_steps,
                             "decay": 1.0 - args.ref_model_mixup_alpha}
    for path, value in args.settings.items():
        *branches, name = path.split(".")
        branch = tree
        for key in branches:
            branch = branch.setdefault(key, {})
        branch[name] = value
    return tree


def loggers_of(args: TBAConfig) -> list[str]:
    """What `report_to` names of `tba.loggers`."""
    return [name for name in args.report_to or () if name in LOGGERS]


def _objective_of(args: TBAConfig) -> dict[str, Any]:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    found: dict[str, Any] = {"name": args.loss_type, "beta": float(args.beta)}
    if args.loss_type == "grpo" and args.importance_sampling_level == "sequence":
        return {**found, "name": "gspo", "clip": [args.epsilon, high]}
    if args.loss_type in ("grpo", "dr_grpo"):
        return {**found, "clip": [args.epsilon, high]}
    if args.loss_type == "cispo" and args.epsilon_high is not None:
        return {**found, "ratio_max": 1.0 + args.epsilon_high}
    return found
