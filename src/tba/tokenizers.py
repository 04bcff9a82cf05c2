"""Tokenizers of models that are made from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tba.settings import SettingsError

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"


def character_tokenizer(characters: str) -> Any:
    """A character-level tokenizer with its own pad, bos and eos; text gets one BOS in front."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if not characters:
        raise SettingsError(["model = new-llama or new-table needs a task that lists its characters; this has none."])
    vocabulary = {token: number for number, token in enumerate([PAD, BOS, EOS, *dict.fromkeys(characters)])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def subword_tokenizer(texts: Sequence[str], size: int) -> Any:
    """A byte-level BPE tokenizer of at most `size` tokens, trained on `texts`; text gets one BOS in front.

    Words keep the space before them, so that a text cut between words has the ids of the whole one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if not any(texts):
        raise SettingsError([
            f"architecture.vocabulary = {size} needs a task whose rows have texts to train a tokenizer on; this has "
            f"none: leave it out, or use the preference task."
        ])
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, BOS, EOS], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    ))
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, inner.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
