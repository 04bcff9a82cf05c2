"""Makes each part of a run from the settings, the same way in one process and in many."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.catalog import ENGINES, FOREIGN, OBJECTIVES, make, reads
from tba.comparison import Compares
from tba.devices import device_of
from tba.embeddings import Embedder
from tba.engines.protocol import Engine, Sampling
from tba.evaluate import Evaluator
from tba.exploration import Exploration
from tba.limits import Limits
from tba.newest import Newest
from tba.policy import Policy, load_policy
from tba.recorder import FOLDER, Recorder
from tba.records import Completion, Prompt
from tba.scoring import Scoring
from tba.searcher import Searcher
from tba.sections import RangeSettings
from tba.settings import Settings, SettingsError
from tba.tasks.protocol import Examines, Task, Texts, check_gold, check_ids_unique, make_task

MAX_GOLD_CHECKS = 1000
"""Prompts whose gold answer is scored before a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The task with its prompts as token ids."""

    task: Task
    training: Sequence[Prompt]
    held_out: Sequence[Prompt]


def make_policy(settings: Settings, task: Task, device: str | None = None) -> Policy:
    """The start policy, which is also the reference, on `device`, or that of the settings.

    Raises:
        SettingsError: the model cannot be loaded, or the device is not here.
    """
    where = device_of(device or settings.policy.device, "policy.device")
    start = load_policy(
        settings.model, architecture=settings.architecture, seed=settings.seed,
        characters=task.texts() if settings.architecture.vocabulary and isinstance(task, Texts) else task.characters,
        temperature=settings.policy.temperature, autocast=settings.policy.autocast == "bfloat16",
        trust_remote_code=settings.policy.trust_remote_code, adapter=settings.policy.lora,
        tokenizer=settings.policy.tokenizer,
    )
    if settings.policy.attention != "sdpa":
        start.model.set_attn_implementation(settings.policy.attention)
    start.model.to(where)
    return dataclasses.replace(start, limits=limits_of(settings))


def limits_of(settings: Settings) -> Limits:
    """Where completions of the policy may not stop and where they must."""
    policy, longest = settings.policy, settings.search.max_new_tokens
    return Limits(first=policy.min_new_tokens, last=longest - 1 if policy.forced_stop else None)


def make_task_of(settings: Settings, brought: object = None) -> Task:
    """The task of `task.name`; `brought` is what a script hands over, for the task of that name."""
    return make_task(
        settings.task, max_new_tokens=settings.search.max_new_tokens, score_limit_s=settings.search.score_limit_s,
        brought=brought,
    )


def examined_task_of(settings: Settings, brought: object = None) -> Task:
    """The task of `task.name`, its data read and checked.

    Raises:
        SettingsError: with everything that is wrong with the data.
    """
    task = make_task_of(settings, brought)
    if isinstance(task, Examines):
        task.examine()
    return task


def notes_of(task: Task) -> Sequence[str]:
    """What the task left out of its data, in words."""
    return task.notes if isinstance(task, Examines) else ()


def make_questions(settings: Settings, task: Task, policy: Policy) -> Questions:
    """Training and held-out prompts, checked.

    Raises:
        SettingsError: an id occurs twice or on both sides, a prompt is too long, or a gold answer is not right.
    """
    training, held_out = task.prompts(policy.encode), task.held_out(policy.encode)
    problems: list[str] = []
    for prompts in (training, held_out):
        try:
            check_ids_unique(prompts)
        except ValueError as error:
            problems.append(str(error))
    limit = settings.task.max_prompt_tokens
    for prompt in (*training, *held_out):
        if len(prompt.tokens) > limit:
            problems.append(
                f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens, more than task.max_prompt_tokens = {limit}; "
                f"shorten it or raise the limit."
            )
    if not training:
        problems.append("the task has 0 training prompts; it needs at least 1.")
    if problems:
        raise SettingsError(problems[:20])
    check_gold(task, training[:MAX_GOLD_CHECKS], lambda text: as_completion(policy, text))
    return Questions(task=task, training=training, held_out=held_out)


def as_completion(policy: Policy, text: str) -> Completion:
    """`text` as if the policy had sampled it: ids with the stop token, log-probs zero."""
    ids = (*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id)
    return Completion(tokens=ids, text=policy.decode(ids), logps=(0.0,) * len(ids), version=0, finish="stop")


def make_engine(settings: Settings, policy: Policy) -> Engine:
    """The engine of `engine.name`, sampling with `policy`.

    Raises:
        SettingsError: the objective reads behaviour log-probs, and the engine gives none.
    """
    chosen = settings.engine
    more: dict[str, Any] = {} if chosen.rows is None else {"rows": chosen.rows}
    if chosen.name in FOREIGN:
        more["options"] = chosen
    engine: Engine = make(ENGINES[chosen.name], policy, **more)
    if "behaviour_logps" in reads(settings.objective) and not engine.gives_logps:
        free = ", ".join(name for name, knobs in OBJECTIVES.items() if "behaviour_logps" not in knobs.needs)
        raise SettingsError([
            f"objective.name = {settings.objective.name!r} reads behaviour log-probs, and engine.name = "
            f"{settings.engine.name!r} gives none; use another engine, or an objective without: {free}."
        ])
    return engine


def sampling_copy(settings: Settings, policy: Policy) -> Policy:
    """What a searcher's engine is made of; foreign ones cast by themselves."""
    return policy.sampling_copy("float32" if settings.engine.name in FOREIGN else settings.engine.dtype)


def make_evaluating_engine(settings: Settings, policy: Policy) -> Engine:
    """What evaluations sample with: the searchers' engine, or transformers where that is one for each process."""
    if settings.engine.name not in FOREIGN:
        return make_engine(settings, policy)
    return make(ENGINES["transformers"], policy)


def make_searcher(settings: Settings, task: Task, policy: Policy, name: str) -> Searcher:
    """A searcher with its own copies of policy and reference; `policy` is the start policy."""
    search = settings.search
    is_fixed = settings.reference.kind == "fixed"
    searcher = Searcher(
        engine=make_engine(settings, sampling_copy(settings, policy)), task=task,
        exploration=make_exploration(settings),
        reference=policy.without_adapter() if is_fixed else policy.frozen_copy().without_limits(),
        num_samples=search.num_samples, batch_prompts=search.batch_prompts, seed=settings.seed, name=name,
        keeps_ref_logps="ref_logps" in reads(settings.objective),
    )
    searcher.scoring = Scoring(task, search.scorers)
    return searcher


def make_recorder(settings: Settings, run_dir: Path | None) -> Recorder | None:
    """What the trainer tells of its steps; None if that is switched off, or there is no run directory."""
    trainer = settings.trainer
    if run_dir is None or not trainer.record_every:
        return None
    return Recorder(
        run_dir / FOLDER, every=trainer.record_every, max_mib=trainer.record_mib,
        keeps_logps=settings.keeps_logps,
    )


def make_newest(policy: Policy, run_dir: Path | None) -> Newest | None:
    """What shows a few completions of each batch to who watches; None if there is no run directory."""
    return None if run_dir is None else Newest(run_dir, policy.decode)


def make_exploration(settings: Settings) -> Exploration:
    """How searchers sample; where a range is not drawn from, they sample as the policy would."""
    temperature, top_p = settings.sampling_temperature, settings.search.top_p
    varied = [value if isinstance(value, RangeSettings) else None for value in (temperature, top_p)]
    sampling = Sampling(
        max_new_tokens=settings.search.max_new_tokens,
        temperature=settings.policy.temperature if isinstance(temperature, RangeSettings) else temperature,
        top_p=1.0 if isinstance(top_p, RangeSettings) else top_p,
    )
    return Exploration(sampling, temperature=varied[0], top_p=varied[1], seed=settings.seed)


def make_evaluator(settings: Settings, questions: Questions, policy: Policy) -> Evaluator:
    """An evaluator with its own copies of policy and reference; `policy` is the start policy."""
    own, reference = policy.frozen_copy(), policy.without_adapter()
    evaluator = Evaluator(
        policy=own, engine=make_evaluating_engine(settings, own), reference=reference, task=questions.task,
        prompts=questions.held_out, max_new_tokens=settings.search.max_new_tokens, seed=settings.seed,
        prior=settings.final_prior,
        reference_engine=make_evaluating_engine(settings, reference) if isinstance(questions.task, Compares) else None,
    )
    evaluator.scoring = Scoring(questions.task, settings.search.scorers)
    if settings.evaluation.embedder is not None:
        evaluator.embed = Embedder(settings.evaluation.embedder)
    return evaluator
