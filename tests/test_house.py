"""The house rules of the package, put to every room; each check is shown to fail on a seeded fault.

A check takes a `House` and yields one line per violation, so that the self-test at the end can point it at
a tiny house.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# ---- thresholds and words -----------------------------------------------------------------------

MAX_FUNCTION_LINES = 60  # without the docstring: what a screen holds
MAX_ARGUMENTS = 9
MAX_FILE_LINES = 450  # beyond, a room becomes a folder of the same name
MAX_README_LINES = 150
SIGN = range(10, 101)  # characters of a module docstring's first line
MIN_MESSAGE = 20  # characters of an error message

NOT_ROOMS = {"recipes", "assets", "__pycache__"}

FORBIDDEN = {"rollout", "episode", "response", "query", "iteration", "actor", "learner", "worker", "comment"}
"""Words for which the house has another; see the README's words."""
FORBIDDEN_BUT = {"actor": ("cluster/*",), "iteration": ("trainer_api/*",), "worker": ("trainer_api/*",),
                 "response": ("watch/server.py",), "query": ("watch/server.py",)}
"""`actor` is Ray's own word for a process that holds state; the others stand in names of TRL's fields, and of what a
web server's library calls its parts."""

PATTERN_NAMES = {"manager", "handler", "factory", "helper", "wrapper", "base"}

TASK_WORDS = "arithmetic enumerable gsm8k maths redteam toxicity"
FOREIGN = {
    "records": f"torch numpy loss settings {TASK_WORDS}",
    "settings": "torch cuda",
    "rewards": "torch loss buffer searcher trainer",
    "tasks": "torch loss buffer searcher trainer",
    "policy": f"reward buffer searcher {TASK_WORDS}",
    "engines": "reward loss buffer trainer",
    "searcher": f"torch loss grad gradient optimizer {TASK_WORDS}",
    "buffer": f"torch loss grad gradient optimizer engine {TASK_WORDS}",
    "batch": f"optimizer engine settings {TASK_WORDS}",
    "objectives": f"cuda device settings config logger item self buffer engine searcher {TASK_WORDS}",
    "trainer": f"engine lease {TASK_WORDS}",
    "weights": f"reward loss buffer {TASK_WORDS}",
    "loop": TASK_WORDS,
    "cluster": TASK_WORDS,
    "report": "torch",
    "watch": "torch",
    "cli": "torch loss",
}
"""Words that a room's code may not use; docstrings, comments and texts may."""
FOREIGN_BUT = {"torch": ("rewards/models.py", "rewards/guards.py", "rewards/classifiers.py")}
"""Files that may use a word foreign to their room: reward models are models."""

OWNERS = {
    "transformers": ("policy*", "tokenizers*", "table_model*", "sft*", "smollm*", "engines/transformers.py",
                     "engines/cache.py", "trainer_api*", "rewards/models*", "rewards/guards*", "rewards/classifiers*",
                     "reward_model*", "embeddings*"),
    "gguf": ("smollm*",),
    "peft": ("lora*",),
    "vllm": ("engines/vllm.py",),
    "ray": ("cluster/*", "rewards/carried.py"),
    "datasets": ("tasks*", "trainer_api*"),
    "reasoning_gym": ("tasks*",),
    "pyarrow": ("buffer*", "storage*", "recorder*", "tasks*"),
    "plotly": ("report*",),
    "jinja2": ("report*", "tasks*"),
    "starlette": ("watch/server.py",),
    "uvicorn": ("watch/server.py",),
    "typer": ("cli*",),
    "rich": ("cli*", "progress*", "watch/terminal.py"),
    "math_verify": ("rewards/answers/symbolic.py",),
    "latex2sympy2_extended": ("rewards/answers/symbolic.py",),
    "sympy": ("rewards/answers/symbolic.py",),
    "mpmath": ("rewards/answers/values.py",),
    "wandb": ("loggers*",),
    "trackio": ("loggers*",),
    "tensorboard": ("loggers*",),
    "mlflow": ("loggers*",),
}
"""Heavy or wide imports and the rooms that own them, lazy imports included."""

MUTABLE_DATACLASSES = {
    "trainer_api/config.py:TBAConfig": "scripts set fields of the config that they know after it is made",
    "buffer/entries.py:Entry": "storage inside the buffer, which counts its uses; draws hand out the trajectory",
    "cluster/searchers.py:SearcherState": "what the driver knows of a searcher, from its birth to its deaths",
    "cluster/depot.py:Holder": "what the depot knows of one life of a searcher, from its first lease to its end",
    "searcher.py:SearchTimes": "a stopwatch",
}
"""`file:Class` -> why it may change after it is made."""

BROAD_HANDLERS = {
    "rewards/*": (99, "the scoring boundary: whatever a scorer does becomes a recorded outcome"),
    "cli*": (1, "the top boundary: any failure becomes exit code 1 and a message"),
    "loggers.py": (1, "a logger is others' code and network: whatever it fails with becomes one note"),
    "evaluations.py": (1, "the end of a thread: whatever an evaluation fails with is raised by who takes it"),
    "run.py": (1, "the end of a run: any failure becomes its summary, status failed, and the exit code"),
}
"""Files that may catch everything, how often each, and why."""

MACHINE = re.compile(
    r"(?<![\w.])/(?:work|root)/|/tmp/[w]\b|py[p]i\.org|files\.pytho[n]hosted|registry\.np[m]js"
)
"""Folders of a machine and hosts of registries; the brackets keep these patterns from matching themselves."""
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".html", ".json", ".css", ".js", ".j2", ""}

RUN_FILES = {"config.yaml", "metrics.jsonl", "ledger.json", "report.html", "final/", "steps/", "COMPLETE",
             "newest.json", "completions.jsonl"}
"""Files of a run directory: named in prose, absent from the repository."""
HEADER_WORDS = ("shows", "command", "hardware", "minutes", "expected")


# ---- the house ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class House:
    """A repository to inspect, and the names that its prose may use."""

    root: Path
    names: Callable[[str], Iterable[str]]
    """Gives the "settings", "metrics" or "commands" that exist."""

    @property
    def settings(self) -> frozenset[str]:
        return frozenset(self.names("settings"))

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset(self.names("metrics"))

    @property
    def commands(self) -> frozenset[str]:
        return frozenset(self.names("commands"))

    @property
    def package(self) -> Path:
        return self.root / "src" / "tba"

    def files(self) -> Iterator[File]:
        for path in sorted(self.package.rglob("*.py")):
            yield File(path.relative_to(self.package).as_posix(), path.read_text("utf-8"))

    def rooms(self) -> set[str]:
        folders = {p.name for p in self.package.iterdir() if p.is_dir() and any(p.glob("*.py"))}
        files = {p.stem for p in self.package.glob("*.py") if not p.stem.startswith("__")}
        return (folders | files) - NOT_ROOMS

    def tour(self) -> list[str]:
        """Rooms in the order in which the README visits them."""
        section = re.search(r"^## The tour$(.*?)(?=^## |\Z)", self.readme(), re.M | re.S)
        lines = re.findall(r"^\s*- ((?:`[^`]+`[, ]*)+)", section[1] if section else "", re.M)
        names = [name for line in lines for name in re.findall(r"`([^`]+)`", line)]
        names = [name.removeprefix("src/tba/").removesuffix("/").removesuffix(".py") for name in names]
        return [name for name in names if name not in NOT_ROOMS]

    def readme(self) -> str:
        path = self.root / "README.md"
        return path.read_text("utf-8") if path.exists() else ""

    def documents(self) -> Iterator[tuple[str, Prose]]:
        for path in [self.root / "README.md", *sorted((self.root / "docs").rglob("*.md"))]:
            if path.exists():
                yield path.relative_to(self.root).as_posix(), Prose(path.read_text("utf-8"))
        for path in self.recipes():
            yield f"recipes/{path.name}", Prose(f"```\n{header(path)}\n```")

    def recipes(self) -> list[Path]:
        return sorted((self.package / "recipes").glob("*.yaml"))

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every text file that travels with the repository."""
        single = ["README.md", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run", ".gitignore"]
        paths = [self.root / name for name in single]
        for folder in ("src", "tests", "docs", "benchmarks"):
            paths += sorted(p for p in (self.root / folder).rglob("*") if p.suffix in TEXT_SUFFIXES)
        for path in paths:
            made = any(part in ("__pycache__", ".hypothesis") or "egg-info" in part for part in path.parts)
            made |= path.name == "report.html"  # of a run that is kept: it carries a library
            if path.is_file() and not made:
                yield path.relative_to(self.root).as_posix(), path.read_text("utf-8", errors="replace")


@dataclass(frozen=True)
class File:
    """A module of the package."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return parse(self.text)

    @property
    def room(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")

    def at(self, node: ast.AST, message: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {message}"

    def owned(self, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch(self.path, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Prose:
    """The code that a text quotes: inline spans, and lines of fenced blocks."""

    text: str

    @property
    def fenced(self) -> list[str]:
        return "\n".join(re.findall(r"^```.*?\n(.*?)^```", self.text, re.M | re.S)).splitlines()

    @property
    def inline(self) -> list[str]:
        return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", self.text, flags=re.M | re.S))

    def arguments(self, program: str) -> Iterator[str]:
        """What follows each call of `program`."""
        for line in self.inline + self.fenced:
            call = rf"(?:^|(?<!from)[\s/])(?:python -m )?{program} ([^#]*)"
            yield from (match[1].strip() for match in re.finditer(call, line.lstrip("#$ ")))


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


def header(path: Path) -> str:
    """The comment at the top of a recipe."""
    lines: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return "\n".join(lines)


def imports(file: File) -> Iterator[tuple[ast.AST, str, tuple[str, ...]]]:
    """(node, absolute module, names) of every import of a file, lazy ones included."""
    package = ["tba", *file.path.split("/")[:-1]]
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield node, module, tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func) in {"import_module", "__import__"}:
            yield from ((node, str(a.value), ()) for a in node.args[:1] if isinstance(a, ast.Constant))


def name_of(node: ast.AST) -> str:
    """Last part of a name or of a dotted name, of what is called if it is a call."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def identifiers(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str) and not hasattr(builtins, name):
                yield node, name


def words(identifier: str) -> set[str]:
    """`numRolloutSteps` and `num_rollout_steps` -> {num, rollout, steps}, and singulars."""
    parts = {w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+[0-9]*[a-z]*", identifier)}
    singulars = {w.removesuffix("s") for w in parts} | {w.removesuffix("es") for w in parts}
    return parts | singulars | {w.removesuffix("ies") + "y" for w in parts if w.endswith("ies")}


def functions(file: File) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (n for n in ast.walk(file.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def classes(file: File) -> Iterator[ast.ClassDef]:
    yield from (n for n in ast.walk(file.tree) if isinstance(n, ast.ClassDef))


# ---- checks of rooms ----------------------------------------------------------------------------


def every_room_is_on_the_tour_once(house: House) -> Iterator[str]:
    tour, rooms = Counter(house.tour()), house.rooms()
    yield from (f"{room} is not on the README's tour" for room in sorted(rooms - set(tour)))
    yield from (f"the tour visits {room}, which does not exist" for room in sorted(set(tour) - rooms))
    yield from (f"the tour visits {room} {times} times" for room, times in tour.items() if times > 1)


def imports_look_back(house: House) -> Iterator[str]:
    order = {room: place for place, room in enumerate(house.tour())}
    if not order:
        yield "README.md has no section `## The tour` with a list of rooms"
        return
    for file in house.files():
        if file.path in ("__init__.py", "__main__.py"):
            continue
        for node, module, names in imports(file):
            parts = module.split(".")
            if parts[0] != "tba":
                continue
            for room in {parts[1]} if len(parts) > 1 else {*names} - {"__version__"} or {"tba"} - {*names}:
                if room not in house.rooms():
                    yield file.at(node, f"imports {room} from the façade tba; name its room")
                elif room != file.room and order.get(room, 999) >= order.get(file.room, -1):
                    yield file.at(node, f"{file.room} imports {room}, which the tour visits later")
            inside = house.package / file.room
            if parts[1:] == [file.room] and not all(
                (inside / f"{n}.py").exists() or (inside / n).is_dir() for n in names
            ):
                yield file.at(node, f"imports from its own façade {module}; name the file")


def every_module_has_a_sign(house: House) -> Iterator[str]:
    for file in house.files():
        sign = (ast.get_docstring(file.tree) or "").split("\n")[0]
        if len(sign) not in SIGN:
            yield file.at(file.tree, f"the sign has {len(sign)} characters: {sign!r}")


def no_foreign_words(house: House) -> Iterator[str]:
    for file in house.files():
        foreign = set(FOREIGN.get(file.room, "").split())
        for node, name in identifiers(file.tree):
            yield from (file.at(node, f"{word!r} in {name!r}: not a word of {file.room}")
                        for word in words(name) & foreign
                        if not file.owned(FOREIGN_BUT.get(word, ())))  # fmt: skip
            for word in words(name) & FORBIDDEN:
                if not file.owned(FORBIDDEN_BUT.get(word, ())):
                    yield file.at(node, f"{word!r} in {name!r}: the house has another word")


def heavy_imports_have_owners(house: House) -> Iterator[str]:
    for file in house.files():
        for node, module, _ in imports(file):
            library = module.split(".")[0]
            if library in OWNERS and not file.owned(OWNERS[library]):
                owners = ", ".join(OWNERS[library]) or "no room yet"
                yield file.at(node, f"imports {library}, owned by {owners}")


def everything_fits_in_one_look(house: House) -> Iterator[str]:
    for file in house.files():
        if (lines := file.text.count("\n")) > MAX_FILE_LINES:
            yield f"{file.path}: {lines} lines; a room beyond {MAX_FILE_LINES} becomes a folder"
        for node in functions(file):
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            if (lines := (node.end_lineno or 0) - node.lineno + 1 - docstring) > MAX_FUNCTION_LINES:
                yield file.at(node, f"{node.name} has {lines} lines")
            names = [n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)]
            if (count := len(names) - (names[:1] in (["self"], ["cls"]))) > MAX_ARGUMENTS:
                yield file.at(node, f"{node.name} takes {count} arguments")


def classes_are_named_for_their_role(house: House) -> Iterator[str]:
    for file in house.files():
        for node in classes(file):
            yield from (file.at(node, f"{node.name} names the pattern {word!r}")
                        for word in words(node.name) & PATTERN_NAMES)  # fmt: skip


def dataclasses_are_frozen(house: House) -> Iterator[str]:
    for file in house.files():
        for node in classes(file):
            for decorator in node.decorator_list:
                keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
                frozen = any(k.arg == "frozen" and getattr(k.value, "value", None) is True for k in keywords)
                listed = f"{file.path}:{node.name}" in MUTABLE_DATACLASSES
                if name_of(decorator) == "dataclass" and not (frozen or listed):
                    yield file.at(node, f"dataclass {node.name} is not frozen")


def nothing_happens_on_import(house: House) -> Iterator[str]:
    definitions = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.ClassDef, ast.FunctionDef,
                   ast.AsyncFunctionDef)  # fmt: skip
    for file in house.files():
        for node in file.tree.body:
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            guard = isinstance(node, ast.If) and ast.unparse(node.test) in (
                ["TYPE_CHECKING"] if file.path != "__main__.py" else ["__name__ == '__main__'"]
            )
            targets = node.targets if isinstance(node, ast.Assign) else []
            foreign = any(isinstance(n, ast.Attribute | ast.Subscript) for t in targets for n in ast.walk(t))
            alias = type(node).__name__ == "TypeAlias"
            if foreign or not (isinstance(node, definitions) or text or guard or alias):
                yield file.at(node, f"on import: {ast.unparse(node).splitlines()[0][:70]}")
        stateful = [node for node in ast.walk(file.tree) if isinstance(node, ast.Global)]
        yield from (file.at(node, "`global`: pass the state in") for node in stateful)


def nothing_is_swallowed(house: House) -> Iterator[str]:
    broad = {"Exception", "BaseException"}
    for file in house.files():
        found: list[ast.AST] = []
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                everything = node.type is None or any(c is not None and name_of(c) in broad for c in caught)
                if everything and not isinstance(node.body[-1], ast.Raise):
                    found.append(node)
            elif isinstance(node, ast.Call) and name_of(node) == "suppress":
                found += [node] * any(name_of(a) in broad for a in node.args)
        allowed = max((n for pattern, (n, _) in BROAD_HANDLERS.items() if file.owned((pattern,))), default=0)
        if len(found) > allowed:
            yield from (file.at(node, f"catches everything; this file may {allowed} times") for node in found)


def errors_say_what_to_do(house: House) -> Iterator[str]:
    silent = {"SystemExit", "Exit", "Abort", "KeyboardInterrupt", "StopIteration", "AssertionError"}
    for file in house.files():
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.Raise) or node.exc is None or name_of(node.exc) in silent:
                continue
            if not isinstance(node.exc, ast.Call):
                if name_of(node.exc)[:1].isupper():
                    yield file.at(node, f"{ast.unparse(node)} has no message")
                continue
            parts = [n for a in [*node.exc.args, *(k.value for k in node.exc.keywords)] for n in ast.walk(a)]
            constants = [n.value for n in parts if isinstance(n, ast.Constant)]
            texts = [value.strip() for value in constants if isinstance(value, str)]
            shown = 8 * sum(isinstance(n, ast.FormattedValue) for n in parts)
            if not parts or (any(texts) and len("".join(texts)) + shown < MIN_MESSAGE):
                yield file.at(node, f"terse: {ast.unparse(node)[:70]}")


# ---- checks of texts ----------------------------------------------------------------------------


def every_todo_names_an_issue(house: House) -> Iterator[str]:
    for name, text in house.texts():
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"\b(TO[D]O|FIXM[E])\b(?!\s*\(?#\d+)", line):
                yield f"{name}:{number}: {line.strip()[:70]}"


def no_machine_is_named(house: House) -> Iterator[str]:
    for name, text in house.texts():
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE.search(line):
                yield f"{name}:{number}: {line.strip()[:70]}"


def readme_is_short(house: House) -> Iterator[str]:
    if (lines := house.readme().count("\n")) > MAX_README_LINES:
        yield f"README.md has {lines} lines, more than {MAX_README_LINES}"


def paths_exist(house: House) -> Iterator[str]:
    folders = {"src", "tests", "docs", "benchmarks", ".ci"}
    for name, prose in house.documents():
        links = re.findall(r"\]\(([^)#:\s]+)[^):]*\)", prose.text)
        for span in prose.inline:
            pathlike = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) and (
                (span.split("/")[0] in folders and "/" in span)
                or span.endswith((".py", ".md", ".yaml", ".toml", ".html", ".txt", ".jsonl", ".json", "/"))
            )
            if pathlike and span not in RUN_FILES and not span.startswith(("runs/", "my_", "checkpoints/")):
                links.append(span)
        places = [house.root, (house.root / name).parent, house.package, house.package / "recipes"]
        yield from (f"{name} names {link}, which does not exist"
                    for link in links if not any((place / link).exists() for place in places))  # fmt: skip


def make_targets_exist(house: House) -> Iterator[str]:
    makefile = (house.root / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.M))
    for name, prose in house.documents():
        for call in prose.arguments("make"):
            named = [w for w in call.split() if re.fullmatch(r"[a-z][\w-]*", w)][:1]
            yield from (f"{name}: make {target} is no target" for target in named if target not in targets)


def commands_exist(house: House) -> Iterator[str]:
    recipes = {path.stem for path in house.recipes()}
    for name, prose in house.documents():
        for call in prose.arguments("tba"):
            said = re.findall(r"^[a-z][\w-]*(?= |$)|(?<= )[a-z][\w-]*(?= |$)", call)
            if not said or not call.startswith(said[0]):
                continue
            if said[0] not in house.commands:
                yield f"{name}: tba {said[0]} is no command"
            grouped = any(command.startswith(f"{said[0]} ") for command in house.commands)
            if grouped and len(said) > 1 and f"{said[0]} {said[1]}" not in house.commands:
                yield f"{name}: tba {said[0]} {said[1]} is no command"
            recipe = re.match(r"(?:train|check|sft) ([a-z][a-z0-9_-]*)(?= |$)", call)
            if recipe and recipe[1] not in recipes:
                yield f"{name}: {recipe[1]} is no built-in recipe"


def settings_exist(house: House) -> Iterator[str]:
    sections = {path.split(".")[0] for path in house.settings if "." in path}
    dotted = rf"(?<![\w.])((?:{'|'.join(sorted(sections)) or '-'})(?:\.[a-z_]+)+)"
    for name, prose in house.documents():
        named = [m[1] for span in prose.inline if (m := re.fullmatch(rf"{dotted}(?:=\S*)?", span))]
        named += [m for line in prose.fenced + prose.inline for m in re.findall(rf"{dotted}=(?!=)", line)]
        calls = " ".join(prose.arguments("tba"))
        named += re.findall(r"(?:^|(?<=[\s'\"]))([a-z_.]+)=", calls)
        yield from (f"{name} names the setting {path}, which does not exist"
                    for path in dict.fromkeys(named) if not known_setting(path, house))  # fmt: skip
    for file in house.files():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for path in re.findall(rf"{dotted}=(?!=)", node.value):
                    if not known_setting(path, house):
                        yield file.at(node, f"names the setting {path}, which does not exist")


def known_setting(path: str, house: House) -> bool:
    """Whether it is a leaf of the tree, a file, or a key of a leaf that holds a mapping."""
    above = [path, *accumulate(path.split("."), "{}.{}".format)]
    return path.endswith((".py", ".md")) or not house.settings.isdisjoint(above)


def metrics_exist(house: House) -> Iterator[str]:
    parts = {name.split("/")[0] for name in house.metrics if "/" in name}
    for name, prose in house.documents():
        for span in prose.inline:
            metric = re.fullmatch(rf"(?:{'|'.join(sorted(parts)) or '-'})/\w+|pass@\w+", span)
            if metric and span not in house.metrics:
                yield f"{name} names the metric {span}, which is not declared"


def recipes_have_headers(house: House) -> Iterator[str]:
    for path in house.recipes():
        missing = [word for word in HEADER_WORDS if word not in header(path).lower()]
        if missing:
            yield f"the header of {path.name} does not say: {', '.join(missing)}"


CHECKS: dict[str, Callable[[House], Iterator[str]]] = {
    check.__name__: check
    for check in (
        every_room_is_on_the_tour_once, imports_look_back, every_module_has_a_sign, no_foreign_words,
        heavy_imports_have_owners, everything_fits_in_one_look, classes_are_named_for_their_role,
        dataclasses_are_frozen, nothing_happens_on_import, nothing_is_swallowed, errors_say_what_to_do,
        every_todo_names_an_issue, no_machine_is_named, readme_is_short, paths_exist, make_targets_exist,
        commands_exist, settings_exist, metrics_exist, recipes_have_headers,
    )
}  # fmt: skip


# ---- the tests ----------------------------------------------------------------------------------


def settings_paths() -> list[str]:
    """Every leaf of the settings tree, as a user writes it."""
    from tba.settings import Section, Settings

    def leaves(section: type[Section], above: str) -> Iterator[str]:
        for name, info in section.model_fields.items():
            path = f"{above}{info.alias or name}"
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
                yield from leaves(info.annotation, f"{path}.")
            else:
                yield path

    return list(leaves(Settings, ""))


def metric_names() -> list[str]:
    from tba.metrics import METRICS

    return list(METRICS)


def registered_commands() -> list[str]:
    """Every command of the typer app; those of a group with its name before them."""
    import typer

    from tba.cli import app

    def walk(command: object, above: str) -> Iterator[str]:
        for name, child in getattr(command, "commands", {}).items():
            yield above + name
            yield from walk(child, f"{above}{name} ")

    return list(walk(typer.main.get_command(app), ""))


@cache
def names_of_the_package(kind: str) -> list[str]:
    """Looked up when a check asks, so that a room that does not load fails no other check."""
    return {"settings": settings_paths, "metrics": metric_names, "commands": registered_commands}[kind]()


@pytest.mark.parametrize("name", CHECKS)
def test_the_house(name: str) -> None:
    violations = list(CHECKS[name](House(ROOT, names_of_the_package)))
    assert not violations, "\n".join(["", *violations])


@pytest.mark.parametrize("module", ["tba", "tba.settings", "tba.records", "tba.cli"])
def test_a_fresh_import_is_light(module: str) -> None:
    heavy = {"torch", "ray", "transformers", "datasets", "pyarrow", "plotly", "peft", "vllm", "sympy",
             "starlette", "uvicorn"}
    code = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_set_of_settings_is_the_listed_one() -> None:
    listed = (ROOT / "tests" / "settings.txt").read_text("utf-8").split()
    assert settings_paths() == listed, "a new setting needs a line in tests/settings.txt, in the tree's order"


def test_the_page_of_metrics_is_generated() -> None:
    from tba.metrics import table

    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert page == table(), "write tba.metrics.table() to docs/metrics.md"


def test_every_built_in_recipe_passes_its_check() -> None:
    from tba.reading import read_settings

    recipes = House(ROOT, names_of_the_package).recipes()
    assert recipes
    for path in recipes:
        read_settings(path.stem)


def test_every_exemption_is_needed() -> None:
    files = House(ROOT, names_of_the_package).files()
    found = {f"{file.path}:{node.name}" for file in files for node in classes(file)}
    assert set(MUTABLE_DATACLASSES) <= found


def test_every_dependency_is_pinned_and_its_range_stays_open() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    for requirement in project["dependencies"] + project["optional-dependencies"]["test"]:
        match = re.fullmatch(r"([\w-]+)(\[\w+\])?>=[\d.]+", requirement)
        assert match, f"{requirement}: a lower bound only"
        assert match[1] in pinned


# ---- the checks, checked ------------------------------------------------------------------------

TINY = {
    "Makefile": "demo:\n\techo\n",
    "README.md": "`make demo`, `tba train tiny seed=3`, `buffer.mix`, `buffer/size`, `src/tba/records.py`\n\n"
                 "## The tour\n\n- `records.py` what travels\n- `rewards/` scores\n- `buffer.py` keeps\n",
    "src/tba/__init__.py": '"""The façade of the house."""\n',
    "src/tba/records.py": '"""What travels between rooms."""\nfrom dataclasses import dataclass\n\n'
                          '@dataclass(frozen=True)\nclass Prompt:\n    """A row."""\n',
    "src/tba/rewards/__init__.py": '"""Scores of completions."""\n',
    "src/tba/rewards/answers.py": '"""Equal or not."""\nfrom tba.records import Prompt\nSCORES = {}\n',
    "src/tba/buffer.py": '"""What was found."""\nimport pyarrow\nfrom tba.rewards.answers import SCORES\n',
    "src/tba/recipes/tiny.yaml": "# Shows much. Hardware: any. Minutes: 2. Expected: 0.7.\n"
                                 "# Command: tba train tiny\nseed: 3\n",
}  # fmt: skip

SEEDS = [
    ("every_room_is_on_the_tour_once", "src/tba/utils.py", '"""A stray room."""\n'),
    ("every_room_is_on_the_tour_once", "README.md", "- `records.py` again\n"),
    ("every_room_is_on_the_tour_once", "README.md", "- `src/tba/trainer` that is not there\n"),
    ("imports_look_back", "src/tba/records.py", "from tba.buffer import pyarrow\n"),
    ("imports_look_back", "src/tba/records.py", "def late():\n    from . import buffer\n    return buffer\n"),
    ("imports_look_back", "src/tba/rewards/answers.py", "B = import_module('tba.buffer')\n"),
    ("imports_look_back", "src/tba/buffer.py", "import tba\n"),
    ("imports_look_back", "src/tba/buffer.py", "from tba import Prompt\n"),
    ("imports_look_back", "src/tba/rewards/answers.py", "from tba.rewards import correct\n"),
    ("every_module_has_a_sign", "src/tba/rewards/sandbox.py", '"""Short."""\n'),
    ("no_foreign_words", "src/tba/records.py", "import torch\n"),
    ("no_foreign_words", "src/tba/buffer.py", "def f(meanLosses): return meanLosses\n"),
    ("no_foreign_words", "src/tba/buffer.py", "queries = 0\n"),
    ("no_foreign_words", "src/tba/buffer.py", "class RolloutStore:\n    pass\n"),
    ("heavy_imports_have_owners", "src/tba/records.py", "def f():\n    import pyarrow.parquet\n"),
    ("heavy_imports_have_owners", "src/tba/buffer.py", "from ray.util import state\n"),
    ("everything_fits_in_one_look", "src/tba/buffer.py", "def f():\n" + "    x = 1\n" * 60),
    ("everything_fits_in_one_look", "src/tba/buffer.py", "def f(a, b, c, d, e, /, g, h, *i, j, **k): ...\n"),
    ("everything_fits_in_one_look", "src/tba/buffer.py", "x = 1\n" * 450),
    ("classes_are_named_for_their_role", "src/tba/buffer.py", "class BufferManager: ...\n"),
    ("dataclasses_are_frozen", "src/tba/records.py", "@dataclass\nclass A: ...\n"),
    ("dataclasses_are_frozen", "src/tba/records.py", "@dataclass(slots=True, frozen=False)\nclass A: ...\n"),
    ("nothing_happens_on_import", "src/tba/buffer.py", "print(SCORES)\n"),
    ("nothing_happens_on_import", "src/tba/buffer.py", "SCORES['a'] = 0.3\n"),
    ("nothing_happens_on_import", "src/tba/buffer.py", "def f():\n    global SCORES\n"),
    ("nothing_is_swallowed", "src/tba/buffer.py", "def f():\n    try: f()\n    except: pass\n"),
    ("nothing_is_swallowed", "src/tba/buffer.py", "def f():\n    try: f()\n    except (A, Exception): ...\n"),
    ("nothing_is_swallowed", "src/tba/buffer.py", "def f():\n    with suppress(BaseException): f()\n"),
    ("errors_say_what_to_do", "src/tba/buffer.py", "def f(x):\n    raise ValueError('bad size')\n"),
    ("errors_say_what_to_do", "src/tba/buffer.py", "def f(x):\n    raise KeyError(f'no {x}')\n"),
    ("errors_say_what_to_do", "src/tba/buffer.py", "def f(x):\n    raise ValueError\n"),
    ("every_todo_names_an_issue", "src/tba/buffer.py", "# TO" + "DO: later\n"),
    ("no_machine_is_named", "Makefile", "# see /ro" + "ot/notes\n"),
    ("no_machine_is_named", "docs/a.md", "from pyp" + "i.org\n"),
    ("readme_is_short", "README.md", "\n" * 150),
    ("paths_exist", "README.md", "See `docs/missing.md`.\n"),
    ("paths_exist", "README.md", "See [it](docs/missing.md).\n"),
    ("paths_exist", "docs/a.md", "See `sampler.py`.\n"),
    ("make_targets_exist", "docs/a.md", "```sh\nmake bars  # slow\n```\n"),
    ("commands_exist", "docs/a.md", "`tba fly`\n"),
    ("commands_exist", "docs/a.md", "```sh\n$ python -m tba buffer shout runs/a\n```\n"),
    ("commands_exist", "docs/a.md", "`tba train giant`\n"),
    ("settings_exist", "docs/a.md", "`buffer.size`\n"),
    ("settings_exist", "docs/a.md", "```sh\ntba train tiny buffer.mix.recent=1 buffer.reuse=2\n```\n"),
    ("settings_exist", "docs/a.md", "`tba train tiny sed=3`\n"),
    ("settings_exist", "src/tba/buffer.py", "SAID = f'set buffer.size={SCORES}'\n"),
    ("settings_exist", "src/tba/recipes/tiny.yaml", "# buffer.size=3\n", ),
    ("metrics_exist", "docs/a.md", "`buffer/sizes`\n"),
    ("metrics_exist", "docs/a.md", "`pass@one`\n"),
    ("recipes_have_headers", "src/tba/recipes/b.yaml", "# Shows, command, hardware, minutes.\nseed: 1\n"),
]  # fmt: skip


def tiny_house(root: Path) -> House:
    for name, text in TINY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    names = {"settings": {"seed", "buffer.mix"}, "metrics": {"buffer/size", "pass@1"},
             "commands": {"train", "buffer", "buffer stats"}}  # fmt: skip
    return House(root, names.__getitem__)


def test_a_clean_house_passes(tmp_path: Path) -> None:
    house = tiny_house(tmp_path)
    assert {name: list(check(house)) for name, check in CHECKS.items() if list(check(house))} == {}


@pytest.mark.parametrize(("name", "file", "text"), SEEDS)
def test_a_seeded_fault_is_caught(name: str, file: str, text: str, tmp_path: Path) -> None:
    house = tiny_house(tmp_path)
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    before = path.read_text("utf-8") if path.exists() else ""
    path.write_text(text + before if file.endswith(".yaml") else before + text, "utf-8")
    assert list(CHECKS[name](house))


def test_every_check_has_a_seeded_fault() -> None:
    assert {name for name, *_ in SEEDS} == set(CHECKS)
