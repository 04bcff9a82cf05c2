"""The jobs besides training: warm start, evaluation, checking, trying out, looking into a buffer."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tba import catalog, checkpoint, loggers, smollm
from tba.leases import Pace
from tba.metrics import finite
from tba.preference_settings import imitation_problems, reward_model_problems, scorer_problems
from tba.reading import check_settings, read_settings
from tba.records import visible
from tba.settings import Settings, SettingsError


def settings_of(run: Path) -> Settings:
    """The settings that a run was started with.

    Raises:
        SettingsError: `run` is no run directory.
    """
    config = run / "config.yaml"
    if not config.is_file():
        raise SettingsError([f"{str(run)!r} is no run directory: it has no config.yaml."])
    return read_settings(str(config))


def subject_of(where: str, recipe: str | None) -> tuple[Settings, Settings]:
    """Settings whose model is what `where` names, and those of its reference.

    Of a run: its `final` model, measured against the model it began with. Of a model: itself, with the task
    of a recipe (default arithmetic), measured against itself.

    Raises:
        SettingsError: `where` is neither a finished run nor a model.
    """
    run = Path(where)
    if not (run / "config.yaml").is_file():
        subject = check_settings({**_plain(read_settings(recipe or "arithmetic")), "model": where})
        return subject, subject
    settings = settings_of(run) if recipe is None else read_settings(recipe)
    if not (run / "final" / "config.json").is_file():
        raise SettingsError([f"run {where!r} has no final model yet; finish it with: tba resume {where}"])
    start = check_settings(_plain(settings))
    return check_settings({**_plain(settings), "model": str(run / "final")}), start


def _plain(settings: Settings) -> dict[str, Any]:
    """The resolved tree without adapter: a final model has it merged in, and a start policy's changes nothing."""
    tree = settings.resolved()
    tree["policy"]["lora"] = {}
    return tree


def evaluate(settings: Settings, reference: Settings, *, variants: int = 0) -> Mapping[str, Any]:
    """Held-out metrics of the settings' model, measured against the model of `reference`.

    With `variants`, also of that many problems with other numbers beside each problem, held-out and training ones.

    Raises:
        SettingsError: the problems have no templates to vary, or what making the parts raises.
    """
    from tba import assembly
    from tba.policy import copy_out
    from tba.tasks.protocol import Varies

    task = assembly.examined_task_of(settings)
    if variants and not (isinstance(task, Varies) and task.varies):
        raise SettingsError([
            f"--variants {variants}: the problems of task.name = {settings.task.name!r} have no templates to vary as "
            f"it is set; the arithmetic task's do, and those of task.families."
        ])
    policy = assembly.make_policy(settings, task)
    questions = assembly.make_questions(settings, task, policy)
    start = assembly.make_policy(reference, task)
    chosen, tensors = settings.evaluation, copy_out(policy.model)
    evaluator = assembly.make_evaluator(settings, questions, start)
    found = evaluator.evaluate(
        tensors, 0, prompts=chosen.prompts, samples=chosen.samples, beta=settings.final_beta
    )
    if not (variants and isinstance(task, Varies)):
        return found.metrics
    sides = {
        side: (prompts[: chosen.prompts], task.variants(prompts[: chosen.prompts], variants, policy.encode))
        for side, prompts in (("held_out", questions.held_out), ("training", questions.training))
    }
    return {**found.metrics, **evaluator.vary(tensors, 0, sides)}


def warm_start(settings: Settings, folder: Path, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Trains the settings' model on its task's demonstrations, and writes it to `folder`; returns its metrics."""
    from tba import assembly
    from tba.policy import copy_out
    from tba.sft import demonstrations_of, sft

    problems = list(imitation_problems(settings.task))
    if problems:
        raise SettingsError(problems)
    task = assembly.examined_task_of(settings)
    demonstrations_of(task)
    policy = assembly.make_policy(settings, task).trainable_copy()
    questions = assembly.make_questions(settings, task, policy)
    for note in assembly.notes_of(task):
        say(note)
    evaluator = assembly.make_evaluator(settings, questions, policy)
    for step in sft(policy.without_limits(), task, questions.training, settings):
        if step["step"] % 100 == 0 or step["step"] == settings.sft.steps:
            say(f"step {step['step']}/{settings.sft.steps}  loss {step['loss']:.4f} nats per token")
    chosen = settings.evaluation
    found = evaluator.evaluate(
        copy_out(policy.model), 0, prompts=chosen.prompts, samples=chosen.samples, beta=settings.final_beta
    )
    policy.save(folder)
    return found.metrics


def train_reward_model(settings: Settings, folder: Path, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Trains the recipe's reward model from preference pairs into `folder`; returns its report.

    Raises:
        SettingsError: the settings of `reward_model`, its pairs or its model cannot be used.
    """
    problems = list(reward_model_problems(settings.reward_model))
    if problems:
        raise SettingsError(problems)
    from tba import reward_model

    return reward_model.train_reward_model(settings, folder, say)


def talk(settings: Settings, prompts: Iterator[str]) -> Iterator[str]:
    """One completion per prompt text, sampled at `policy.temperature`; different each time it is asked."""
    import secrets

    from tba import assembly
    from tba.engines.protocol import Sampling
    from tba.records import Prompt

    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    engine = assembly.make_evaluating_engine(settings, policy)
    sampling = Sampling(max_new_tokens=settings.search.max_new_tokens, temperature=policy.temperature)
    for text in prompts:
        if text.encode("utf-8", "replace").decode("utf-8") != text:
            raise SettingsError([f"prompt {visible(text)[:80]!r} holds half of a surrogate pair, which is no text."])
        prompt = Prompt(id=text, tokens=policy.encode(text), text=text)
        seed = secrets.randbits(64)
        yield engine.generate([prompt], num_samples=1, sampling=sampling, seeds=[seed])[0][0].text


def lacking(settings: Settings, *, scores: bool = True, fetches: bool = True, logs: bool = False) -> list[str]:
    """What the settings need and this machine has not, each with the way to get it; no weights are loaded for it.

    `scores`: completions will be scored, so that reward models are looked at too; those that are no folder only if
    `fetches`, since their config and tokenizer may have to be fetched. `logs`: numbers will go to loggers.
    """
    task = settings.task
    victims = (task.redteam.victim, task.redteam.second_victim) if task.name == "redteam" else ()
    models = {settings.model, *(victim.model for victim in victims if victim is not None)}
    found = smollm.lacking(smollm.cache_root(os.environ)) if models & {*catalog.PACKAGED} else []
    if logs:
        found += loggers.missing(settings.logging.report_to)
    if task.name == "maths" and task.families:
        from tba.tasks.families import family_problems

        found += family_problems(task.families)
    if task.name == "preference" and scores:
        found += scorer_problems(task)
        if any(reward.model is not None for reward in task.rewards):
            from tba.rewards.models import unloadable

            found += unloadable(task.rewards, fetches=fetches)
    if task.name == "redteam" and scores:
        guards = {"model": None}  # causal LMs, which are no classifiers
        judges = [judge if judge.first_token is None else judge.model_copy(update=guards)
                  for judge in task.redteam.judges]
        if any(judge.model is not None for judge in judges):
            from tba.rewards.models import unloadable

            found += unloadable(judges, fetches=fetches, place="task.redteam.judges")
    return found


def data_of(settings: Settings) -> dict[str, str]:
    """What the task's data are, read and checked; nothing is fetched for it.

    Raises:
        SettingsError: with everything that is wrong with them.
    """
    named = [name for name in (settings.task.dataset, settings.task.held_out_dataset) if name]
    if named:
        return {"data": f"{' and '.join(named)}: fetched when training starts, not looked at here"}
    from tba.tasks.protocol import Examines, make_task

    search = settings.search
    task = make_task(settings.task, max_new_tokens=search.max_new_tokens, score_limit_s=search.score_limit_s)
    if not isinstance(task, Examines):
        return {}
    said = task.examine()
    return {"data": "; ".join([said, *task.notes])}


def arithmetic_of(settings: Settings) -> dict[str, str]:
    """What the settings amount to: batch, round, ages and memory, each as a line with its unit."""
    trainer, search = settings.trainer, settings.search
    batch = settings.groups_per_step * trainer.group_size
    found = {
        "batch": f"{settings.groups_per_step} groups x {trainer.group_size} trajectories = {batch} trajectories a step",
        "round": f"{settings.prompts_per_round} prompts x {search.num_samples} completions for "
                 f"{trainer.sync_every} steps (reuse {settings.buffer.reuse:g})",
        "run": f"{trainer.steps} steps, {trainer.steps * batch} trajectories consumed, at least "
               f"{(settings.initial_prompts + (trainer.steps // trainer.sync_every - 1) * settings.prompts_per_round)} "
               f"prompts searched",
        "reuse": _reuse_of(settings),
        "recent": f"age at most {settings.recent_age} steps",
    }
    if trainer.processes > 1:
        found["ranks"] = (
            f"{trainer.processes}: about {settings.groups_per_step / trainer.processes:.3g} groups of a batch each, by "
            f"tokens, and 1/{trainer.processes} of the trainer's memory; at the start each loads the whole model"
        )
    parameters = parameters_of(settings)
    if parameters is not None:
        mib = 4 * parameters / 2**20
        moving = settings.reference.kind != "fixed"
        found["model"] = f"{parameters / 1e6:.2f}M parameters"
        found["memory"] = (
            f"trainer {(4 + moving) * mib:.0f} MiB (weights, gradients, two moments{', reference' * moving}), each "
            f"searcher {2 * mib:.0f} MiB (weights, reference), activations and libraries besides"
        )
        if settings.policy.lora.rank:
            own = settings.engine.dtype != "float32"
            found["memory"] = (
                f"trainer and each searcher {mib:.0f} MiB (one base, which policy and reference share), "
                f"{f'a searcher {mib / 2:.0f} MiB more (to sample in bfloat16), ' * own}adapters, activations and "
                f"libraries besides"
            )
    return found


def _reuse_of(settings: Settings) -> str:
    """Groups consumed per prompt delivered when the run is over: the most and the least."""
    trainer = settings.trainer
    rounds = trainer.steps // trainer.sync_every
    lead = 0 if settings.mode == "lockstep" else settings.lead
    pace = Pace(first=settings.initial_prompts, per_round=settings.prompts_per_round, lead=lead)
    consumed = trainer.steps * settings.groups_per_step
    most = f"at most {consumed / pace.before(rounds):.3g} groups consumed per prompt: then the trainer waits"
    prompts = pace.most_delivered(rounds - 1)
    if prompts is None:
        return f"{most}; no least, since searchers never wait (async.lead is null)"
    return f"{most}; at least {consumed / prompts:.3g}: searchers wait when {lead} rounds ahead"


def parameters_of(settings: Settings) -> int | None:
    """Number of parameters, read from the files' headers; None if the model is not on this machine."""
    shape = settings.architecture
    if settings.model == "new-llama":
        layer = 4 * shape.width**2 + 3 * shape.width * (8 * shape.width // 3) + 2 * shape.width
        return shape.layers * layer + (shape.vocabulary or 0) * shape.width
    if settings.model in catalog.MODELS:
        folder = Path(str(resources.files("tba").joinpath("assets", settings.model)))
    elif settings.model in catalog.PACKAGED:
        return smollm.PARAMETERS
    else:
        folder = Path(settings.model)
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_parameters_in, files)) if files else catalog.PARAMETERS.get(settings.model)


def _parameters_in(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total


def buffer_of(run: Path) -> Any:
    """The buffer in a run's newest complete checkpoint.

    Raises:
        SettingsError: there is no run, or no complete checkpoint in it.
    """
    from tba.depot import make_buffer

    settings = settings_of(run)
    found = checkpoint.complete(run)
    if not found:
        raise SettingsError([f"{str(run)!r} holds no complete checkpoint, so no buffer to look into."])
    return make_buffer(settings).load(found[-1][1])


def stats_of(buffer: Any) -> dict[str, str]:
    """What a buffer holds, where the rest went, and who is served how: name to figure."""
    rows = {
        "trajectories": str(len(buffer)), "prompts": str(buffer.num_prompts),
        "counted bytes": str(buffer.counted_bytes), "consumed": str(buffer.consumed),
    }
    for unit, account in buffer.ledger().items():
        for name, value in account.items():
            rows[f"{unit} {name}"] = json.dumps(value)
    served = buffer.fairness()
    for name, first in (("lengths", "tokens_to"), ("prompts", "prompts")):
        for place, part in enumerate(served[name], 1):
            what = f"up to {part[first]} tokens" if name == "lengths" else f"{part[first]} prompts"
            rows[f"{name} decile {place}"] = (
                f"{what}: delivered {part['delivered']}, accepted {part['accepted_share']:.3f}, consumed per delivered "
                f"{part['consumed_per_delivered']:.3f}, reward {part['reward']:.3f}, age {part['age']:.2f}"
            )
    return {**rows, **{f"warning {n}": text for n, text in enumerate(served["warnings"], 1)}}


def export(buffer: Any, file: Path) -> None:
    """Writes every trajectory of a buffer, oldest first, into a new .jsonl or .parquet file.

    Raises:
        SettingsError: the file exists, its folder does not, or its name ends otherwise.
    """
    from tba.buffer.export import rows_of, write_parquet

    _check_new(file)
    if file.suffix == ".parquet":
        write_parquet(buffer, file)
        return
    _write_lines(file, rows_of(buffer))


def export_attacks(run: Path, file: Path, *, most: int, answers: bool) -> str:
    """Writes the attacks of a run's newest checkpoint that work into a new .jsonl or .parquet file; says how many.

    Raises:
        SettingsError: the run is of another task, kept no texts, or found nothing; or the file cannot be made.
    """
    from tba import assembly
    from tba.audit import Audits, found_rows
    from tba.buffer.export import write_rows

    _check_new(file)
    settings = settings_of(run)
    task = assembly.make_task_of(settings)
    if not isinstance(task, Audits):
        raise SettingsError([f"run {str(run)!r} has task.name = {settings.task.name!r}, and only redteam has attacks."])
    if not settings.buffer.keep_text:
        raise SettingsError([f"run {str(run)!r} has buffer.keep_text = false, so that its attacks have no text left."])
    rows = list(found_rows(buffer_of(run).entries(), task, most=most, answers=answers))
    if file.suffix == ".parquet":
        write_rows(rows, file)
    else:
        _write_lines(file, iter(rows))
    return f"{len(rows)} attacks in {len({row['cluster'] for row in rows})} clusters written to {file}"


def _check_new(file: Path) -> None:
    if file.exists() or file.suffix not in (".jsonl", ".parquet") or not file.parent.is_dir():
        raise SettingsError([
            f"{str(file)!r} must be the name of a new .jsonl or .parquet file, in a folder that there is."
        ])


def _write_lines(file: Path, rows: Iterator[Mapping[str, Any]]) -> None:
    with file.open("x", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(finite(row), allow_nan=False) + "\n")
