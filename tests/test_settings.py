"""Recipes and overrides: every mistake is refused with its value, its place and the way out, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from makers import settings_with
from tba.reading import built_in_recipes, check_settings, read_settings
from tba.settings import Settings, SettingsError


def problems(*overrides: str, recipe: str = "enumerable") -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        read_settings(recipe, overrides)
    return caught.value.problems


def problem(*overrides: str, recipe: str = "enumerable") -> str:
    (only,) = problems(*overrides, recipe=recipe)
    return only


def recipe_file(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# ---- unknown keys and wrong values -----------------------------------------------------------------


def test_misspelt_and_misplaced_keys_are_named_all_at_once(tmp_path: Path):  # case j01
    text = "buffer: {capcity_per_prompt: 4}\nlearning_rate: 1e-6\ntrainer: {sync-every: 2}\n"
    found = problems(recipe=recipe_file(tmp_path, text))
    assert len(found) == 3
    assert any("buffer.capcity_per_prompt" in p and "did you mean capacity_per_prompt" in p for p in found)
    assert any(p.startswith("learning_rate") and "belongs under trainer" in p for p in found)
    assert any("trainer.sync-every" in p and "did you mean sync_every" in p for p in found)


@pytest.mark.parametrize(
    ("size", "batch", "words"),
    [(1, 4, ["trainer.group_size = 1", "at least 2"]),
     (8, 7, ["trainer.batch_size = 7", "trainer.group_size = 8", "nearest valid trainer.batch_size is 8"]),
     (8, 1, ["trainer.batch_size = 1", "trainer.group_size = 8", "nearest valid trainer.batch_size is 8"]),
     (0, 4, ["trainer.group_size = 0", "at least 2"]),
     (4, 8, None)],
)
def test_group_size_and_batch_size(size, batch, words):  # cases j02 and d05
    tree = {"trainer": {"group_size": size, "batch_size": batch}}
    if words is None:
        assert check_settings(tree).groups_per_step == 2
        return
    with pytest.raises(SettingsError) as caught:
        check_settings(tree)
    (only,) = caught.value.problems
    assert all(word in only for word in words), only


@pytest.mark.parametrize(
    ("override", "value"),
    [("trainer.steps=true", "True"), ("seed=false", "False"), ("objective.beta=true", "True"),
     ("trainer.steps=16.0", "16.0"), ("trainer.steps=lots", "'lots'"), ("trainer.steps=", "None"),
     ("trainer.steps=0", "0"), ("trainer.steps=-16", "-16"), ("objective.beta=0", "0"), ("objective.beta=.nan", "nan"),
     ("objective.beta=.inf", "inf"), ("search.top_p=1.5", "1.5"), ("search.top_p=.nan", "nan"),
     ("mode=sync", "'sync'"), ("model=on", "True"), ("trainer.clip_norm=-1", "-1"), ("buffer=3", "3"),
     ("async.wait_limit_s=1e999", "inf"), ("sft.wrong_share=1", "1"), ("seed.deeper=3", "{'deeper': 3}")],
)
def test_a_wrong_value_is_shown_with_its_place(override, value):
    key = override.partition("=")[0]
    found = problem(override)
    assert f"= {value}: should be" in found
    assert found.startswith(key if key != "seed.deeper" else "seed")


def test_a_whole_number_is_a_float_but_a_float_is_no_whole_number():
    assert read_settings("enumerable", ["objective.beta=2"]).objective.beta == 2.0


@pytest.mark.parametrize("word", ["mean", "reccent"])
def test_a_sampler_that_is_none_is_refused_by_name(word):
    assert f"buffer.mix.{word}" in problem(f"buffer.mix={{{word}: 1.0}}")


def test_a_mixture_given_in_an_override_replaces_the_recipes():
    assert read_settings("enumerable", ["buffer.mix={reward: 2}"]).buffer.mix == {"reward": 2.0}


# ---- contradictions: value, place, way out ---------------------------------------------------------

CONTRADICTIONS: list[tuple[list[str], list[str]]] = [
    (["trainer.group_size=1"], ["trainer.group_size = 1", "set trainer.group_size=2"]),
    (["trainer.batch_size=100"], ["trainer.batch_size = 100", "trainer.group_size = 16", "nearest", "is 96"]),
    (["trainer.batch_size=64", "trainer.groups_per_step=3"],
     ["trainer.batch_size = 64", "trainer.groups_per_step = 3", "give one of the two"]),
    (["buffer.reuse=3"], ["buffer.reuse = 8 x 16 / 3 = 42.6667", "whole number"]),
    (["buffer.reuse=256"], ["8 x 16 / 256 = 0.5", "at least 1"]),
    (["trainer.steps=635"], ["trainer.steps = 635", "trainer.sync_every = 16", "nearest valid trainer.steps is 640"]),
    (["trainer.steps=3"], ["trainer.steps = 3", "nearest valid trainer.steps is 16"]),
    (["search.num_samples=15"], ["search.num_samples = 15", "trainer.group_size = 16", "search.num_samples=16"]),
    (["buffer.capacity_per_prompt=9"], ["buffer.capacity_per_prompt = 9", "group_size = 16", "raise it to 16"]),
    (["buffer.capacity=127"], ["buffer.capacity = 127", "(128)", "raise it, or lower trainer.groups_per_step"]),
    (["buffer.initial=20001"], ["buffer.initial = 20001", "buffer.capacity = 20000", "lower buffer.initial"]),
    (["buffer.keep_logps=false", "objective.name=grpo"], ["buffer.keep_logps = false", "'grpo'", "leave it out"]),
    (["buffer.reuse=4", "buffer.max_uses=3"], ["buffer.reuse = 4", "buffer.max_uses = 3", "raise buffer.max_uses"]),
    (["buffer.max_age=14"], ["buffer.max_age = 14", "trainer.sync_every - 1 = 15", "lower trainer.sync_every"]),
    (["buffer.mix={recent: 0, uniform: 0}"], ["buffer.mix = {'recent': 0.0, 'uniform': 0.0}", "give one of recent"]),
    (["model=./nowhere"], ["model = './nowhere' is no folder", "new-table"]),
    (["model=arithmetik"], ["model = 'arithmetik'", "did you mean arithmetic?"]),
    (["task.name=enumerabl"], ["task.name = 'enumerabl'", "did you mean enumerable?", "arithmetic"]),
    (["engine.name=tabel", "model=arithmetic"], ["engine.name = 'tabel'", "did you mean table?", "transformers"]),
    (["objective.name=grpo2"], ["objective.name = 'grpo2'", "known: trajectory_balance"]),
    (["engine.name=transformers"], ["model = new-table", "engine.name = 'transformers'", "set engine.name=table"]),
    (["architecture.width=30"], ["architecture.width = 30", "architecture.heads = 4", "heads divide"]),
    (["task.name=custom", "task.reward=m:f"], ["task.path is missing", "set task.path=FILE"]),
    (["task.name=custom", "task.reward=m:f", "task.path=nowhere.jsonl"], ["task.path = 'nowhere.jsonl'", "JSONL file"]),
    (["task.name=custom", "task.path={file}"], ["task.reward is missing", "module:function"]),
    (["task.name=custom", "task.path={file}", "task.reward=score"], ["task.reward = 'score'", "module:function"]),
    (["task.name=custom", "task.path={file}", "task.reward=m:f", "task.held_out_path=gone"],
     ["task.held_out_path = 'gone' is not a file"]),
    (["task.kind=sparse"], ["task.kind = 'sparse'", "task.symbols = 3", "search.max_new_tokens = 3", "has 125 comp"]),
    (["evaluation.embedder=./gone"], ["evaluation.embedder = './gone' is no model folder", "owner/name"]),
    (["engine.dtype=bfloat16"], ["engine.dtype = bfloat16", "set policy.lora.rank"]),
    (["engine.adopt_every=2"], ["engine.adopt_every = 2", "mode = lockstep", "or mode=async"]),
    (["mode=async", "engine.adopt_every=3"], ["engine.adopt_every = 3", "the 3 tokens of search.max_new_tokens"]),
    (["mode=async", "engine.adopt_every=2", "buffer.capacity_bytes=25087"],
     ["buffer.capacity_bytes = 25087", "128 trajectories take up to 25088 bytes"]),  # 128 x (160 + 12 x 3)
    (["task.kind=many_modes", "task.modes=28"], ["task.modes = 28", "the 27 completions", "lower it"]),
]


@pytest.mark.parametrize(("overrides", "words"), CONTRADICTIONS, ids=lambda value: str(value[0])[:30])
def test_a_contradiction_is_one_line_with_values_places_and_way_out(overrides, words, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    only = problem(*(text.replace("{file}", str(tmp_path / "rows.jsonl")) for text in overrides))
    assert all(word in only for word in words), only


@pytest.mark.parametrize(
    "overrides",
    [["search.num_samples=16"], ["buffer.capacity_per_prompt=16"], ["buffer.capacity=128", "buffer.initial=128"],
     ["buffer.reuse=2", "buffer.max_uses=2"], ["buffer.max_age=15"], ["buffer.reuse=128"], ["trainer.steps=16"],
     ["model=owner/name", "engine.name=transformers"], ["trainer.batch_size=64", "trainer.groups_per_step=4"],
     ["task.kind=many_modes", "task.modes=27"], ["task.kind=sparse", "task.symbols=8", "search.max_new_tokens=4"],
     ["mode=async", "engine.adopt_every=2", "buffer.capacity_bytes=25088"], ["buffer.capacity_bytes=23552"]],
)
def test_the_edge_of_each_contradiction_is_allowed(overrides):
    read_settings("enumerable", overrides)


def test_a_model_folder_must_hold_a_config_and_safetensors(tmp_path: Path):
    assert "without config.json" in problem(f"model={tmp_path}", "engine.name=table")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "no .safetensors file" in problem(f"model={tmp_path}", "engine.name=table")
    (tmp_path / "model.safetensors").write_bytes(b"")
    read_settings("enumerable", [f"model={tmp_path}", "engine.name=table"])


def test_unknown_keys_wrong_values_and_contradictions_come_together():
    found = problems("trainer.steps=635", "nonsense=1", "objective.beta=-2", "bad override", "buffer.capacity=9",
                     "task.name=no-such")
    said = "\n".join(found)
    for word in ("635", "nonsense", "-2", "'bad override'", "buffer.capacity = 9", "no-such"):
        assert word in said
    assert len(found) == 6


@pytest.mark.parametrize("word", [
    "buffer.preset=[1]", "buffer.preset={a: 1}", "seed=!!int ''", "seed=!!float ''", "seed=!!timestamp x",
    "seed=" + "[" * 3000,
])
def test_what_yaml_or_a_preset_cannot_be_is_one_problem(word: str):
    (only,) = problems(word)
    assert word.split("=")[0] in only


def test_problems_found_earlier_are_reported_too():
    with pytest.raises(SettingsError) as caught:
        read_settings("enumerable", ["seed=x"], ["run directory 'r' exists already"])
    assert [p.split()[0] for p in caught.value.problems] == ["run", "seed"]


@pytest.mark.parametrize("recipe", ["no-such-recipe", "listed.yaml"])
def test_a_recipe_that_cannot_be_read_does_not_hide_the_other_problems(recipe, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("listed.yaml").write_text("- 1\n")
    with pytest.raises(SettingsError) as caught:
        read_settings(recipe, ["bad override"], ["run directory 'r' exists already"])
    said = "\n".join(caught.value.problems)
    assert all(word in said for word in (recipe, "run directory 'r'", "'bad override'"))


@pytest.mark.parametrize("override", ["model=2026-13-45", "seed=0x_", "buffer.reuse=1e-320"])
def test_values_that_break_a_parser_are_still_the_users_mistake(override):
    assert override.partition("=")[0] in problem(override)


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_a_seed_that_no_generator_takes_is_refused(seed):
    assert f"seed = {seed}" in problem(f"seed={seed}")


# ---- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), ("3.5e-4", 3.5e-4), (".5e-3", 5e-4), ("2e+1", 20.0), ("1e2", 100.0),
     ("0.25", 0.25), ("3", 3.0)],
)
def test_numbers_as_people_write_them(tmp_path: Path, text, value):
    path = recipe_file(tmp_path, f"trainer: {{learning_rate: {text}}}\n")
    assert read_settings(path).trainer.learning_rate == value
    assert read_settings("enumerable", [f"trainer.learning_rate={text}"]).trainer.learning_rate == value


@pytest.mark.parametrize("text", ["e-4", "1e", "1e-4x", "model-1e3"])
def test_words_that_only_look_like_numbers_stay_words(text):
    assert f"= '{text}'" in problem(f"trainer.learning_rate={text}")


@pytest.mark.parametrize("text", ["seed: 1\nseed: 2\n", "trainer: {steps: 4, steps: 8}\n"])
def test_a_key_written_twice_is_refused_with_its_place(tmp_path: Path, text):
    found = problem(recipe=recipe_file(tmp_path, text))
    assert "is written twice" in found
    assert "line 1" in found


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path: Path):  # kind of case k01
    assert read_settings(recipe_file(tmp_path, b"\xef\xbb\xbfseed: 4\n")).seed == 4


@pytest.mark.parametrize("text", ["", "# only a remark\n", "{}\n", "---\n"])
def test_an_empty_recipe_is_the_defaults(tmp_path: Path, text):
    assert read_settings(recipe_file(tmp_path, text)) == Settings()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"- seed\n- 4\n", ["list", "must hold keys"]), (b"seed\n", ["str", "must hold keys"]),
     (b"seed: \xff\xfe\n", ["readable", "UnicodeDecodeError"]), (b"seed: [1,\n", ["not valid YAML"]),
     (b"seed: !!python/object/apply:os.getcwd []\n", ["not valid YAML"]), (b"1: 2\n", ["1"])],
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, content, words):
    path = recipe_file(tmp_path, content)
    found = problem(recipe=path)
    assert all(word in found for word in words), found


def test_a_recipe_that_is_nowhere_is_named_with_the_nearest():
    found = problem(recipe="enumerabel")
    assert "'enumerabel'" in found
    assert "did you mean enumerable?" in found
    assert "arithmetic" in found


@pytest.mark.parametrize("text", ["steps", "=4", "trainer.=4", ".steps=4", "trainer..steps=4"])
def test_an_override_has_a_path_and_a_value(text):
    assert f"override {text!r} is not of the form key.path=value" in problem(text)


def test_an_override_that_does_not_parse_is_named():
    assert "override 'trainer.steps=[[': the value does not parse" in problem("trainer.steps=[[")


def test_an_override_below_another_overrides_value_is_named():
    found = problems("trainer=5", "trainer.steps=3")
    assert any("'trainer.steps=3' goes below a value" in p for p in found)


def test_the_last_override_wins_and_siblings_stay():
    found = read_settings("enumerable", ["trainer.steps=32", "trainer.steps=48", "task.prompts=3"])
    assert (found.trainer.steps, found.trainer.group_size, found.task.prompts, found.task.symbols) == (48, 16, 3, 3)


@pytest.mark.parametrize(
    ("recipe", "overrides", "groups"),
    [("trainer: {groups_per_step: 3, group_size: 4}", ["trainer.batch_size=20"], 5),
     ("trainer: {batch_size: 20, group_size: 4}", ["trainer.groups_per_step=3"], 3),
     ("trainer: {batch_size: 20, groups_per_step: 5, group_size: 4}", ["trainer.group_size=2"], 5),
     ("trainer: {batch_size: 20, group_size: 4}", ["trainer.steps=7"], 5)],
)
def test_a_batch_given_in_an_override_replaces_the_recipes(tmp_path: Path, recipe, overrides, groups):
    assert read_settings(recipe_file(tmp_path, recipe), overrides).groups_per_step == groups


# ---- what follows from the settings ----------------------------------------------------------------


def test_derived_numbers_have_known_answers():
    found = settings_with(
        search={"num_samples": 20, "temperature": 1.3}, buffer={"reuse": 1.5, "initial": 1001},
        trainer={"groups_per_step": 9, "group_size": 4, "sync_every": 5, "steps": 10},
    )
    assert found.groups_per_step == 9
    assert found.prompts_per_round == 30  # 9 x 5 / 1.5
    assert found.initial_prompts == 51  # 1001 / 20, rounded up
    assert found.recent_age == 9  # 2 x 5 - 1
    assert found.sampling_temperature == 1.3
    assert settings_with(buffer={"initial": 9}).initial_prompts == 128  # the first round is more
    assert settings_with(buffer={"recent_age": 0}).recent_age == 0
    assert settings_with(policy={"temperature": 0.7}).sampling_temperature == 0.7
    assert check_settings({"trainer": {"group_size": 4, "batch_size": 12}, "search": {"num_samples": 4}}
                          ).groups_per_step == 3
    assert Settings().groups_per_step == 32


@pytest.mark.parametrize("recipe", built_in_recipes())
def test_a_resolved_tree_is_the_same_settings_through_yaml(recipe):
    found = read_settings(recipe, ["seed=7", "async.lead=2", "objective.beta=1e-4"])
    again = check_settings(yaml.safe_load(yaml.safe_dump(found.resolved())))
    assert again.resolved() == found.resolved()
    for name in ("groups_per_step", "prompts_per_round", "initial_prompts", "recent_age", "sampling_temperature"):
        assert getattr(again, name) == getattr(found, name)
    assert again.async_.lead == 2


def test_a_resolved_tree_holds_every_setting_under_its_public_name():
    tree: dict[str, Any] = Settings().resolved()
    assert "async" in tree
    assert (tree["trainer"]["batch_size"], tree["trainer"]["groups_per_step"]) == (256, 32)
    assert tree["buffer"]["recent_age"] == 1
    assert tree["search"]["temperature"] == 1.0
