"""Mathematical problems: GSM8K, MATH, files like them, families of reasoning-gym."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tba.records import Completion, Prompt
from tba.rewards.words import found_word, same_word
from tba.settings import SettingsError, TaskSettings
from tba.tasks.families import CHUNK, family_problems, generated, pool_of, split_pools
from tba.tasks.lines import MAX_PROBLEMS, refuse
from tba.tasks.maths_prompts import Asker, as_text
from tba.tasks.maths_rows import Problem, dataset_problems, distinct, file_problems, key_of, last_boxed
from tba.tasks.protocol import Encode

VARIANT_CHUNKS = 40
"""Times `tasks.families.CHUNK` problems of a family that are drawn in search of variants."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The problems of both sides, none on both, and what was left out."""

    training: Sequence[Problem]
    held_out: Sequence[Problem]
    shots: Sequence[Problem]
    """Training problems that are shown solved, and not trained on."""
    solutions: Mapping[str, str]
    """Of every problem, by its prompt's id."""
    notes: Sequence[str]


class Maths:
    """Reward 1 if the completion gives the gold answer by the rule of `task.style`, else 0.

    A completion that the limit cut is judged like any other, as in the paper. Of `task.families` those with an
    answer in words are compared as words. Nothing that a model wrote is ever evaluated.
    """

    characters = ""

    def __init__(self, settings: TaskSettings, *, max_new_tokens: int, score_limit_s: float) -> None:
        """Reads no data yet: a searcher needs none.

        Raises:
            SettingsError: a family does not exist or is refused, or the template is wrong.
        """
        del max_new_tokens, score_limit_s
        refuse(family_problems(settings.families) if settings.families else [])
        self._settings, self._asker = settings, Asker(settings)
        self._loaded: Loaded | None = None
        self._too_long: dict[str, int] = {}

    # ---- data -----------------------------------------------------------------------------------

    def examine(self) -> str:
        """Reads the data and checks every gold answer against itself, which needs no model; says what there is.

        Raises:
            SettingsError: with file and line of everything that is wrong.
        """
        data = self._data()
        return f"{len(data.training)} training and {len(data.held_out)} held-out problems, their gold answers right"

    @property
    def notes(self) -> Sequence[str]:
        """What was left out, in words."""
        limit = self._settings.max_prompt_tokens
        dropped = [f"{n} {side} problems left out: over task.max_prompt_tokens = {limit}"
                   for side, n in self._too_long.items() if n]
        return [*(self._loaded.notes if self._loaded else ()), *dropped]

    def _data(self) -> Loaded:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> Loaded:
        settings = self._settings
        training, held_out = _generate(settings) if settings.families else _read(settings)
        notes: list[str] = []
        sides = []
        for side, problems in (("training", training), ("held-out", held_out)):
            right, bad = _split_by_gold(problems, settings.style)
            if bad and settings.bad_gold == "refuse":
                many = f"{len(bad)} {side} problems have such answers; correct them, or set task.bad_gold=drop."
                refuse([*bad[:MAX_PROBLEMS], many])
            notes += [f"{len(bad)} {side} problems left out: their gold answer is not found right"] * bool(bad)
            sides.append(right)
        training, held_out = sides
        held = distinct(held_out)
        kept = distinct(training, held)
        notes += [f"{n} {what}" for n, what in (
            (len(held_out) - len(held), "held-out problems left out: their question came before"),
            (len(training) - len(kept), "training problems left out: their question came before or is held out"),
        ) if n]
        shown = random.Random(f"shots {settings.seed}").sample(kept, min(settings.shots, len(kept)))
        kept = [problem for problem in kept if problem not in shown]
        if not kept or not held:
            raise SettingsError([
                f"task.held_out = {settings.held_out} and task.shots = {settings.shots} leave {len(kept)} training and "
                f"{len(held)} held-out problems of {len(training) + len(held_out)}; both need one."
            ])
        solutions = {p.place: p.solution for p in (*kept, *held)}
        return Loaded(training=kept, held_out=held, shots=shown, solutions=solutions, notes=notes)

    # ---- prompts --------------------------------------------------------------------------------

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """Training problems, in their source's order; families take turns."""
        return self._prompts("training", self._data().training, encode)

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """Held-out problems, in their source's order; families take turns."""
        return self._prompts("held-out", self._data().held_out, encode)

    def _prompts(self, side: str, problems: Sequence[Problem], encode: Encode) -> list[Prompt]:
        limit, found, wrong = self._settings.max_prompt_tokens, [], []
        for problem in problems:
            prompt = self._prompt(problem, encode)
            if len(prompt.tokens) <= limit:
                found.append(prompt)
            else:
                wrong.append(
                    f"{problem.place}: the prompt has {len(prompt.tokens)} tokens, more than task.max_prompt_tokens = "
                    f"{limit}; raise it, or set task.too_long=drop."
                )
        if self._settings.too_long == "refuse":
            refuse(wrong)
        self._too_long[side] = len(wrong)
        if not found:
            raise SettingsError([*wrong[:5], f"no {side} problem has at most task.max_prompt_tokens = {limit} tokens."])
        return found

    def _prompt(self, problem: Problem, encode: Encode) -> Prompt:
        asked = self._asker.ask(problem, self._data().shots)
        try:
            tokens = encode(asked)
        except ValueError as error:  # how the library says that there is no chat template
            raise SettingsError([
                f"task.format = {self._settings.format!r}: the model cannot take {problem.place} as a prompt: {error}"
            ]) from error
        columns: dict[str, object] = {"gold": problem.gold, "kind": problem.kind}
        if problem.level is not None:
            columns["level"] = problem.level
        return Prompt(id=problem.place, tokens=tokens, text=as_text(asked), columns=columns)

    # ---- scores ---------------------------------------------------------------------------------

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        """1 for the gold answer, 0 for any other or none."""
        return [float(self._is_right(prompt, c.text)) for c in completions]

    def _is_right(self, prompt: Prompt, text: str) -> bool:
        gold = str(prompt.columns["gold"])
        return _checker(str(prompt.columns["kind"]), self._settings.style)(text, gold)

    def gold(self, prompt: Prompt) -> str:
        """The gold answer, marked as the style asks for."""
        return gold_text(str(prompt.columns["gold"]), str(prompt.columns["kind"]), self._settings.style)

    def demonstration(self, prompt: Prompt, rng: random.Random, wrong_share: float) -> str:
        """The solution, without the calculator's marks, as the completion that the format trains for."""
        assert not wrong_share, "settings refuse wrong solutions of the maths task"
        del rng
        return self._asker.answer(self._data().solutions[prompt.id])

    def answer_of(self, prompt: Prompt, completion: Completion) -> str | None:
        """The answer that a completion gives, for votes; None if it gives none."""
        if prompt.columns["kind"] == "text":
            return found_word(completion.text).casefold() or None
        if self._settings.style == "math":
            return "".join((last_boxed(completion.text) or "").split()) or None
        marked = completion.text.rpartition("####")[2] if self._settings.style == "gsm8k" else completion.text
        numbers = _NUMBER.findall(marked[-4000:])
        return _plain(numbers[-1]) if numbers else None

    def same_answer(self, prompt: Prompt, one: str, other: str) -> bool:
        """Whether two answers of `answer_of` are one, by the checker that scores."""
        kind, style = str(prompt.columns["kind"]), self._settings.style
        return one == other or _checker(kind, style)(gold_text(one, kind, style), other)

    # ---- variants -------------------------------------------------------------------------------

    @property
    def varies(self) -> bool:
        """Only problems that were generated have templates."""
        return bool(self._settings.families)

    def variants(self, prompts: Sequence[Prompt], number: int, encode: Encode) -> list[list[Prompt]]:
        """`number` problems of each prompt's template with numbers of their own, none of them trained on.

        A prompt whose template has fewer gets none.
        """
        data = self._data()
        of_id = {p.place: p for p in (*data.training, *data.held_out)}
        originals = [of_id[prompt.id] for prompt in prompts]
        taken = {key_of(p) for p in data.training}
        fresh = self._fresh(originals, number, taken)
        limit = self._settings.max_prompt_tokens
        found: list[list[Prompt]] = []
        for original in originals:
            others = [p for p in fresh[original.template] if key_of(p) != key_of(original)]
            named = [replace(p, place=f"{original.place} variant {n}") for n, p in enumerate(others, 1)]
            short = [p for p in (self._prompt(p, encode) for p in named) if len(p.tokens) <= limit]
            found.append(short[:number] if len(short) >= number else [])
        return found

    def _fresh(self, originals: Sequence[Problem], number: int, taken: set[str]) -> dict[str, list[Problem]]:
        """Problems by template, none of `taken`: twice as many as are asked for, or all that were found."""
        found: dict[str, dict[str, Problem]] = {p.template: {} for p in originals}
        for name, options in self._settings.families.items():
            mine = {p.template for p in originals if p.level == name}
            stream = generated(name, options, self._settings.seed + 1)
            for problem in islice(stream, VARIANT_CHUNKS * CHUNK if mine else 0):
                key = key_of(problem)
                if problem.template in mine and key not in taken:
                    found[problem.template].setdefault(key, problem)
                    mine -= {problem.template} if len(found[problem.template]) >= 2 * number + 1 else set()
                if not mine:
                    break
        return {template: list(problems.values()) for template, problems in found.items()}


# ---- sources and golds ------------------------------------------------------------------------------


def _generate(settings: TaskSettings) -> tuple[list[Problem], list[Problem]]:
    most = settings.problems + settings.held_out + settings.shots
    pools: dict[str, list[Problem]] = {}
    for name, options in settings.families.items():
        earlier = [problem for pool in pools.values() for problem in pool]
        pools[name] = distinct(pool_of(name, options, settings.seed, most), earlier)
    return split_pools(pools, training=settings.problems + settings.shots, held_out=settings.held_out)


def _read(settings: TaskSettings) -> tuple[list[Problem], list[Problem]]:
    """Problems of files and data sets; the mistakes of both sides at once."""
    columns, style = settings.columns, settings.style
    wrong: list[str] = []

    def side(path: str | None, dataset: str | None) -> list[Problem]:
        try:
            if path is not None:
                return file_problems(Path(path), columns, style)
            return [] if dataset is None else dataset_problems(dataset, columns, style)
        except SettingsError as error:
            wrong.extend(error.problems)
            return []

    training = side(settings.path, settings.dataset)
    held_out = side(settings.held_out_path, settings.held_out_dataset)
    if wrong:
        raise SettingsError(wrong)
    if settings.held_out_path is None and settings.held_out_dataset is None:
        different = distinct(training)
        cut = max(0, len(different) - settings.held_out)
        held_out = different[cut:]
        places = {problem.place for problem in held_out}
        training = [problem for problem in training if problem.place not in places]
    return training, held_out


def _checker(kind: str, style: str) -> Callable[[str, str], bool]:
    """(completion, gold) -> whether it is right."""
    if kind == "text":
        return same_word
    from tba.rewards.answers import correct

    return lambda text, gold: correct(style, text, gold)


def gold_text(gold: str, kind: str, style: str) -> str:
    """A gold answer as a completion that gives it."""
    if kind == "text":
        return gold
    return rf"\boxed{{{gold}}}" if style == "math" else f"#### {gold}"


def _split_by_gold(problems: Sequence[Problem], style: str) -> tuple[list[Problem], list[str]]:
    """Problems whose gold answer the checker finds right, and a line about each other one."""
    right, bad = [], []
    for problem in problems:
        text = gold_text(problem.gold, problem.kind, style)
        if problem.gold and _checker(problem.kind, style)(text, problem.gold):
            right.append(problem)
        else:
            bad.append(
                f"{problem.place}: the gold answer {problem.gold[:80]!r} is not found right by task.style = {style!r} "
                f"when a completion says {text[:80]!r}."
            )
    return right, bad


def _plain(number: str) -> str:
    """A number in one spelling: no commas, no zeros at the end of a fraction."""
    whole, _, part = number.replace(",", "").partition(".")
    return whole + (f".{part.rstrip('0')}" if part.rstrip("0") else "")
