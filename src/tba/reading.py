"""Recipes and `key.path=value` overrides to a checked settings tree, with all mistakes at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from pydantic import ValidationError

from tba.sections import RangeSettings, Section
from tba.settings import Settings, SettingsError

_SCIENTIFIC = re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two repairs: 1e-4 is a number, and a key written twice is an error."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [*yaml.SafeLoader.yaml_implicit_resolvers.get(first, []),
                *([("tag:yaml.org,2002:float", _SCIENTIFIC)] if first in "-+.0123456789" else [])]
        for first in {*yaml.SafeLoader.yaml_implicit_resolvers, *"-+.0123456789"}
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, unless a key occurs twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]!r} is written twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _load(text: str) -> Any:
    """The YAML of `text`; what it cannot build (a 13th month, digits without any) is a YAML error too."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, IndexError, AttributeError, TypeError, RecursionError) as error:
        raise yaml.YAMLError(str(error)) from error


def built_in_recipes() -> dict[str, str]:
    """Name and first header line of every recipe that ships in the package."""
    found = {}
    for entry in sorted(resources.files("tba").joinpath("recipes").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".yaml"):
            found[entry.name.removesuffix(".yaml")] = entry.read_text("utf-8").split("\n", 1)[0].lstrip("# ")
    return found


def recipe_text(recipe: str) -> str:
    """Text of a built-in recipe or of a recipe file.

    Raises:
        SettingsError: `recipe` is neither.
    """
    if recipe in built_in_recipes():
        return resources.files("tba").joinpath("recipes", f"{recipe}.yaml").read_text("utf-8")
    path = Path(recipe)
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        close = difflib.get_close_matches(recipe, built_in_recipes(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise SettingsError([
            f"recipe {recipe!r} is neither a built-in recipe ({', '.join(built_in_recipes())}) nor a readable "
            f"file ({type(error).__name__}){hint}"
        ]) from error


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for text in overrides:
        path, equals, raw = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            problems.append(f"override {text!r} is not of the form key.path=value.")
            continue
        try:
            value = _load(raw)
        except yaml.YAMLError as error:
            problems.append(f"override {text!r}: the value does not parse: {str(error).splitlines()[0]}.")
            continue
        branch: Any = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {}) if isinstance(branch, dict) else None
        if isinstance(branch, dict):
            branch[keys[-1]] = value
        else:
            problems.append(f"override {text!r} goes below a value that another override has set.")
    return tree


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        nested = isinstance(old, dict) and isinstance(value, dict) and key != "mix"
        merged[key] = _merge(old, value) if nested else value  # type: ignore[arg-type]
    return merged


def _batch_given_one_way(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A batch given in an override replaces the recipe's, whichever of the two ways either used."""
    given, old = over.get("trainer"), base.get("trainer")
    if not (isinstance(given, dict) and isinstance(old, dict)):
        return base
    if not {"batch_size", "groups_per_step", "group_size"} & set(given):
        return base
    stale = "groups_per_step" if "batch_size" in given else "batch_size"
    return {**base, "trainer": {key: value for key, value in old.items() if key != stale}}


def read_settings(recipe: str, overrides: Sequence[str] = (), problems: Sequence[str] = ()) -> Settings:
    """The checked tree of a recipe with `key.path=value` overrides; `problems` found earlier are reported too.

    Raises:
        SettingsError: with every mistake found, each with the value, the place and the way out.
    """
    problems = list(problems)
    over = _parse_overrides(overrides, problems)
    try:
        base = _load(recipe_text(recipe))
    except SettingsError as error:
        raise SettingsError([*problems, *error.problems]) from error
    except yaml.YAMLError as error:
        wrong = f"recipe {recipe!r} is not valid YAML: {' '.join(str(error).split())}"
        raise SettingsError([*problems, wrong]) from error
    if base is None:
        base = {}
    if not isinstance(base, dict):
        wrong = f"recipe {recipe!r} holds a {type(base).__name__}; it must hold keys and values."
        raise SettingsError([*problems, wrong])
    return check_settings(_merge(_batch_given_one_way(base, over), over), problems)


def check_settings(tree: Mapping[str, Any], problems: Sequence[str] = ()) -> Settings:
    """The checked tree of plain data, with `problems` found earlier among those reported.

    Raises:
        SettingsError: with every mistake found.
    """
    found = list(problems)
    for _ in range(2):  # the second pass, without what the first refused, finds contradictions among the rest
        try:
            settings = Settings.model_validate(tree)
            break
        except ValidationError as error:
            wrong = error.errors(include_url=False)
            found += [line for item in wrong for line in _explain(item)]
            tree = _without(tree, [item["loc"] for item in wrong])
    if found:
        raise SettingsError(list(dict.fromkeys(found)))
    return settings


def _without(tree: Mapping[str, Any], locations: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    copy = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for section, *below in (location for location in locations if location):
        if below and isinstance(copy.get(section), dict):
            copy[section].pop(below[0], None)
        else:
            copy.pop(section, None)
    return copy


def _sections(tree: type[Section] = Settings, above: str = "") -> dict[str, type[Section]]:
    """Every branch below `tree`, under its dotted name."""
    found: dict[str, type[Section]] = {}
    for name, info in tree.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            place = f"{above}{info.alias or name}"
            found |= {place: info.annotation, **_sections(info.annotation, f"{place}.")}
        for item in get_args(info.annotation):  # the branches of a list
            if isinstance(item, type) and issubclass(item, Section):
                found[f"{above}{info.alias or name}"] = item
    return found


def _explain(item: Any) -> list[str]:
    """One pydantic error as lines with the value, the place and the way out."""
    location = [str(part) for part in item["loc"] if not str(part).startswith("[")]
    place = ".".join(location)
    if item["type"] == "value_error" and not place:
        return str(item["ctx"]["error"]).splitlines()
    if item["type"] == "extra_forbidden":
        return [_explain_unknown(place)]
    message = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return [f"{place} = {item['input']!r}: should be {message}."]


def _explain_unknown(place: str) -> str:
    *parents, key = place.split(".")
    sections = _sections()
    names = [i.alias or n for n, i in Settings.model_fields.items()]
    branch = sections.get(".".join(p for p in parents if not p.isdigit()), RangeSettings)
    here = list(branch.model_fields) if parents else names
    close = difflib.get_close_matches(key.replace("-", "_"), here, n=1, cutoff=0.6)
    if close:
        return f"{place} is no setting (did you mean {close[0]}?)"
    homes = [name for name, section in sections.items() if key in section.model_fields]
    if homes:
        return f"{place} is no setting; {key} belongs under {' or '.join(homes)}: {homes[0]}.{key}."
    return f"{place} is no setting; known here: {', '.join(here)}."
