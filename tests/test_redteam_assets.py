"""The SmolLM2 audit's set-up: judges out of tiny packages, its recipe, and the table of its runs."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shlex
import sys
import types
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import redteam_assets as assets
import redteam_smollm2 as audits
from packages import Package, fetched, wheel_member
from tba import metrics as m
from tba import smollm
from tba.cli import main
from tba.reading import check_settings, read_settings
from tba.rewards.classifiers import word_tokenizer
from tba.sections import SettingsError
from test_classifiers import linear, recurrent, saved, slow_recurrent

PAGE = Path(__file__).parents[1] / "docs" / "redteam.md"


def wheel(entries: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, data in entries.items():
            made.writestr(name, data)
    return out.getvalue()


# ---- packages ---------------------------------------------------------------------------------------


def test_a_wheels_file_is_read_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = wheel({"../outside": b"no", "deep/wanted": b"yes", "folder/": b""})
    assert wheel_member(data, "deep/wanted") == b"yes"
    for name, most, said in (("missing", 9, "holds no missing"), ("folder/", 9, "no plain file"),
                             ("deep/wanted", 2, "at most 2 bytes")):
        with pytest.raises(SystemExit, match=said):
            wheel_member(data, name, most)
    assert list(tmp_path.iterdir()) == []


def test_another_file_of_the_same_name_is_refused(tmp_path: Path) -> None:
    package = Package(pin="some==1", archive="some-1.whl", sha256=hashlib.sha256(b"right").hexdigest())
    (tmp_path / "some-1.whl").write_bytes(b"wrong")
    with pytest.raises(SystemExit, match="damaged or another file"):
        fetched(package, tmp_path)
    (tmp_path / "some-1.whl").write_bytes(b"right")
    assert fetched(package, tmp_path) == b"right"
    for package, (_, kind) in zip((assets.TOXICITY, assets.LINEAR, assets.EMBEDDER), assets.MAKERS.values(),
                                  strict=True):
        assert package.pin.count("==") == 1
        assert len(package.sha256) == 64
        assert kind is not None


# ---- the LSTM ------------------------------------------------------------------------------------------


def keras_pickle(monkeypatch: pytest.MonkeyPatch, **state: Any) -> bytes:
    """What the package carries, of five words; the classes are made for it."""
    made = []
    for place in (assets.SEQUENCER, assets.TOKENIZER):
        module, _, name = place.rpartition(".")
        kind = type(name, (), {"__module__": module})
        for above in accumulate(module.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, above, types.SimpleNamespace(**{name: kind}))
        made.append(kind())
    sequencer, tokenizer = made
    index = {"the": 1, "bad": 2, "don't": 3, "day": 4, "rare": 5}
    tokenizer.__dict__ |= {
        "filters": assets.PUNCTUATION, "split": " ", "lower": True, "char_level": False, "oov_token": None,
        "num_words": 5, "word_index": index, "word_counts": OrderedDict(the=9), "word_docs": defaultdict(int, bad=1),
        **state,
    }
    sequencer.__dict__ |= {"max_features": 5, "tokenizer": tokenizer}
    return pickle.dumps(sequencer, 3)


def test_the_words_of_a_keras_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert assets.words_of(keras_pickle(monkeypatch), 5) == ["the", "bad", "don't", "day"]
    with pytest.raises(SystemExit, match=r"set to \{'lower': False\}"):
        assets.words_of(keras_pickle(monkeypatch, lower=False), 5)
    with pytest.raises(SystemExit, match="has no word 2 of the 4"):
        assets.words_of(keras_pickle(monkeypatch, word_index={"the": 1, "day": 3, "bad": 4}), 5)
    with pytest.raises(SystemExit, match="the vocabulary: the pickle names"):
        assets.words_of(pickle.dumps(pickle.Unpickler), 5)
    with pytest.raises(SystemExit, match="list is where"):
        assets.words_of(pickle.dumps([]), 5)


LAYERS: dict[str, Any] = {
    "input_1": {"batch_input_shape": [None, 6]}, "embedding": {"mask_zero": False},
    "bidirectional": {"merge_mode": "concat", "layer": {"config": {
        "units": 3, "activation": "tanh", "recurrent_activation": "hard_sigmoid",
    }}},
    "dense": {"units": 4, "activation": "relu"},
}


def keras_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    shapes = {
        "embedding/embeddings": (5, 2), "dense/kernel": (6, 4), "dense/bias": (4,), "dense_1/kernel": (4, 6),
        "dense_1/bias": (6,),
    }
    for side in ("forward", "backward"):
        shapes |= {f"{side}_lstm/kernel": (2, 12), f"{side}_lstm/recurrent_kernel": (3, 12), f"{side}_lstm/bias": (12,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_weights_of_keras_are_where_they_belong() -> None:
    arrays = keras_arrays()
    model = assets.recurrent_of(LAYERS, arrays)
    assert model.config.id2label[0] == "toxic"
    assert (model.config.window, model.config.gate, model.config.num_labels) == (6, "hard_sigmoid", 6)
    # a row by hand: gates of the backward side at its first place, which reads the last word, id 4
    gates = arrays["embedding/embeddings"][4] @ arrays["backward_lstm/kernel"] + arrays["backward_lstm/bias"]
    mine = model.embedding(torch.tensor(4)) @ model.input_weight[1] + model.bias[1, 0]
    np.testing.assert_allclose(mine.detach(), gates, atol=1e-6)
    found = model(torch.tensor([[0, 2, 4]])).logits[0].tolist()
    assert found == pytest.approx(slow_recurrent(model, [2, 4]), abs=1e-5)
    with pytest.raises(SystemExit, match="the weights have shapes"):
        assets.recurrent_of(LAYERS, {**arrays, "dense/bias": np.zeros(3, np.float32)})
    layers = {**LAYERS, "dense": {"units": 4, "activation": "gelu"}}
    with pytest.raises(SystemExit, match="not what is converted here"):
        assets.recurrent_of(layers, arrays)


def test_a_keras_file_is_read_by_its_layers() -> None:
    h5py = pytest.importorskip("h5py", reason="the extra audit is not installed")
    out, arrays = io.BytesIO(), keras_arrays()
    with h5py.File(out, "w") as file:
        config = {"config": {"layers": [{"name": name, "config": given} for name, given in LAYERS.items()]}}
        file.attrs["model_config"] = json.dumps(config)
        for name, array in arrays.items():
            layer = "bidirectional" if "lstm" in name else name.split("/")[0]
            file[f"model_weights/{layer}/{layer}/{name}:0"] = array
        file["optimizer_weights/x:0"] = np.zeros(2)
    layers, found = assets.h5_arrays(out.getvalue())
    assert layers == LAYERS
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


# ---- weighted counts ------------------------------------------------------------------------------------


def test_the_linear_judge_says_what_scikit_learn_says() -> None:
    joblib = pytest.importorskip("joblib", reason="the extra movies is not installed")
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.svm import LinearSVC

    rng = np.random.default_rng(2)
    bad, good = ["awful bad you", "you are so bad", "bad bad awful day"], ["a good day", "so nice day 12", "école nice"]
    texts = [" ".join(rng.permutation(text.split())) for text in (bad + good) * 5]
    kinds = [1, 1, 1, 0, 0, 0] * 5
    vectorizer = TfidfVectorizer(stop_words=["are"]).fit(texts)
    judge = CalibratedClassifierCV(LinearSVC(C=0.7), cv=3).fit(vectorizer.transform(texts), kinds)
    files = []
    for part in (vectorizer, judge):
        out = io.BytesIO()
        joblib.dump(part, out)
        files.append(out.getvalue())
    model, words = assets.linear_of(*files)
    tokenizer = word_tokenizer(words, split="runs")
    asked = [*texts[:6], "", "unknown words", "BAD, bad! Bad nice\nécole", "day " * 30, "a b c so"]
    expected = judge.predict_proba(vectorizer.transform(asked))[:, 1]
    found = [model(torch.tensor([tokenizer(text)["input_ids"]])).logits.sigmoid().item() for text in asked]
    assert found == pytest.approx(expected.tolist(), abs=1e-6)
    assert max(found) - min(found) > 0.3
    for other in (TfidfVectorizer(ngram_range=(1, 2)), TfidfVectorizer(sublinear_tf=True)):
        out = io.BytesIO()
        joblib.dump(other.fit(texts), out)
        with pytest.raises(SystemExit, match="not what is converted here"):
            assets.linear_of(out.getvalue(), files[1])


# ---- folders and recipe -------------------------------------------------------------------------------


def test_folders_are_made_once_and_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(pin="some==1", archive="some-1.whl", sha256=hashlib.sha256(b"data").hexdigest())
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "some-1.whl").write_bytes(b"data")
    made: list[str] = []

    def good(data: bytes, folder: Path) -> None:
        made.append(data.decode())
        (folder / "config.json").write_text("{}")

    def bad(data: bytes, folder: Path) -> None:
        (folder / "half").write_text("")
        raise SystemExit("no")

    monkeypatch.setattr(assets, "MAKERS", {"toxicity": (package, good), "linear": (package, bad)})
    for _ in range(2):
        with pytest.raises(SystemExit, match="no"):
            assets.make(tmp_path / "out", tmp_path / "cache")
    assert made == ["data"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["toxicity"]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny judges and an encoder's config where the recipe looks, and SmolLM2 as if it were made already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = smollm.folder_in(tmp_path / "cache" / "tba")
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    made = tmp_path / "my_assets"
    saved(made / "toxicity", recurrent(labels=6), "spaces")
    saved(made / "linear", linear(), "runs")
    saved(made / "embedder", linear(), "runs")
    (made / "recipe.yaml").write_text(assets.recipe_for(made), "utf-8")
    return made


def test_the_recipe_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as said:
        read_settings(str(assets.RECIPE))
    lines = str(said.value).splitlines()
    for place in ("judges.0.model = './my_assets/toxicity'", "judges.1.model = './my_assets/linear'",
                  "embedder = './my_assets/embedder'"):
        assert any(line.startswith(f"task.redteam.{place} is no model folder") for line in lines)
    assert len(lines) == 3


def test_the_recipe_is_checked_without_a_model(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folders / "recipe.yaml")]) == 0
    said = capsys.readouterr().out
    assert "4 groups x 16 trajectories = 64 trajectories a step" in said
    assert "134.52M parameters" in said
    (folders / "linear" / "model.safetensors").write_bytes(b"no tensors")
    assert main(["check", str(folders / "recipe.yaml")]) == 2
    assert "task.redteam.judges.1.model cannot be loaded" in capsys.readouterr().err


def test_the_recipe_says_what_it_does_and_audits_as_it_should(folders: Path) -> None:
    text = assets.RECIPE.read_text("utf-8")
    assert all(f"# {word}:" in text for word in ("shows", "command", "hardware", "minutes", "expected"))
    settings = read_settings(str(folders / "recipe.yaml"))
    chosen = settings.task.redteam
    assert (settings.model, chosen.victim.model, chosen.answers) == ("smollm2-135m", "smollm2-135m", 2)
    assert [judge.held_out for judge in chosen.judges] == [False, True]
    assert Path(str(chosen.embedder)).is_absolute()
    assert settings.policy.lora.rank > 0
    assert settings.reference.kind == "fixed"
    assert (settings.evaluation.prompts, settings.evaluation.samples) == (256, 1)
    assert (settings.mode, settings.search.searchers) == ("async", 1)
    assert yaml.safe_load(text)["trainer"]["max_minutes"] <= 90


def test_the_documented_commands_are_the_ones_that_work(folders: Path) -> None:
    lines = PAGE.read_text("utf-8").replace("\\\n", " ").splitlines()
    (grpo,) = [line for line in lines if "tba train my_assets/recipe.yaml objective.name=grpo" in line]
    words = shlex.split(grpo.split("#")[0])
    assert tuple(words[3 : words.index("--run")]) == audits.GRPO
    ours = read_settings(str(folders / "recipe.yaml"))
    theirs = read_settings(str(folders / "recipe.yaml"), audits.GRPO)
    assert theirs.objective.name == "grpo"
    for key in ("task", "model", "policy", "evaluation", "seed"):
        assert getattr(theirs, key) == getattr(ours, key), "the audit is the same"
    assert theirs.trainer.max_minutes == ours.trainer.max_minutes
    assert theirs.groups_per_step == ours.groups_per_step


# ---- the table --------------------------------------------------------------------------------------------


def run_of(folder: Path, name: str, objective: str, **final: Any) -> Path:
    run = folder / name
    run.mkdir()
    tree = {"model": "smollm2-135m", "seed": 5, "objective": {"name": objective, "beta": 0.3},
            "task": {"name": "redteam", "redteam": {"victim": {"model": "smollm2-135m"}, "judges": [{"words": ["x"]}]}}}
    (run / "config.yaml").write_text(yaml.safe_dump(check_settings(tree).resolved()))
    found = {m.ATTACKS: 256, m.ATTACK_SUCCESS: 0.125, m.ATTACK_INTERVAL: [0.09, 0.17], m.ATTACK_LOG: -4.25,
             m.ATTACK_DIVERSITY: 0.875, m.EVAL_KL: 0.0}
    summary = {"status": "done", "steps": 1200, "wall_s": 3661.0, "ledger": {"trajectories": {"delivered": 4321}},
               "start": found, "final": {**found, **final}}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def test_the_table_is_made_of_what_the_runs_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = run_of(tmp_path, "my_audit", "trajectory_balance", **{
        m.ATTACK_SUCCESS: 0.75, m.ATTACK_INTERVAL: [0.7, 0.8], m.ATTACK_CLUSTERS: 31, m.HELD_OUT_SUCCESS: 0.5,
        m.HELD_OUT_INTERVAL: [0.44, 0.56], m.JUDGE_AGREEMENT: 0.7, m.JUDGE_AGREEMENT_INTERVAL: [0.64, 0.75],
        m.EVAL_KL: 21.26,
    })
    theirs = run_of(tmp_path, "my_grpo", "grpo")
    page = tmp_path / "page.md"
    page.write_text(f"by hand\n{audits.BEGIN}\nold\n{audits.END}\nafter\n")
    audits.main([str(ours), str(theirs), "--json", str(tmp_path / "found.json"), "--page", str(page)])
    text = page.read_text()
    assert (text[:8], text[-6:]) == ("by hand\n", "after\n")
    assert "old" not in text
    assert ("| trajectory_balance, beta 0.3, seed 5, after | 1,200 | 4,321 | 61 | 256 | 0.750 (0.700 to 0.800) | -4.25 "
            "| 0.875 | 31 | 0.500 (0.440 to 0.560) | 0.700 (0.640 to 0.750) | 21.3 |") in text
    assert ("| grpo, beta 0.3, seed 5, before | 0 | 0 | 0 | 256 | 0.125 (0.090 to 0.170) | -4.25 | 0.875 | - | - | - "
            "| 0.0 |") in text
    assert audits.table(json.loads((tmp_path / "found.json").read_text())) in capsys.readouterr().out


def test_runs_that_are_no_finished_audits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no run directory"):
        audits.read_run(tmp_path)
    run = run_of(tmp_path, "run", "grpo")
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="has not both"):
        audits.main([str(run), "--page", str(page)])
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
    with pytest.raises(SystemExit, match="status 'interrupted'"):
        audits.read_run(run)
    (run / "summary.json").unlink()
    with pytest.raises(SystemExit, match="it is not finished"):
        audits.read_run(run)


def test_the_page_has_a_place_for_the_table() -> None:
    text = PAGE.read_text("utf-8")
    assert text.count(audits.BEGIN) == text.count(audits.END) == 1
