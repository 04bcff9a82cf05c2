"""Tiny classifiers made on the spot: reward models with random weights and tokenizers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:,/\n"
POSITIONS = 64
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
"""Ends every turn with EOS, so that a chat's score is read there."""


def letters_tokenizer(*, pad: str | None = "<pad>", chat: bool = False, side: str = "right", segments: bool = False,
                      **more: Any) -> Any:
    """A token per character; `pad` may be EOS, or nothing. No BOS, no EOS of its own accord."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>", "[CLS]", "[SEP]", "[user]", "[assistant]"]
    vocabulary = {token: number for number, token in enumerate([*special, *LETTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(special)
    if more.pop("cls", False):
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token=pad, padding_side=side,
        model_input_names=["input_ids", *["token_type_ids"] * segments, "attention_mask"], **more,
    )
    if chat:
        made.chat_template = TEMPLATE
    return made


def classifier(kind: str, tokenizer: Any, *, labels: int = 1, seed: int = 0, config_pad: bool = True) -> Any:
    """A random classifier of width 16: llama, gpt_neox, gpt2 (absolute positions), bert or roberta."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    shapes: dict[str, dict[str, Any]] = {
        "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                      "num_key_value_heads": 2, "max_position_embeddings": POSITIONS},
        "gpt_neox": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                         "max_position_embeddings": POSITIONS},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS},
        "bert": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "max_position_embeddings": POSITIONS},
        "roberta": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                        "max_position_embeddings": POSITIONS + 4},
    }
    pad = tokenizer.pad_token_id if config_pad else None
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), num_labels=labels, pad_token_id=pad, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, **shapes[kind],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)  # scores differ by tenths, not by thousandths
        if kind == "roberta":
            model.classifier.out_proj.weight.mul_(20.0)
    return model.eval()


def save_policy(folder: Path, *, seed: int = 0) -> Path:
    """A causal LM over the letters, as a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = letters_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_classifier(folder: Path, kind: str = "llama", **options: Any) -> Path:
    """A folder as a user would have it."""
    model_options = {k: options.pop(k) for k in ("labels", "seed", "config_pad") if k in options}
    tokenizer = letters_tokenizer(**options)
    classifier(kind, tokenizer, **model_options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def alone(model: Any, ids: Sequence[int], segments: Sequence[int] = ()) -> float:
    """One text, no padding, no pad token known: the model's own pooling then takes the last token."""
    before = model.config.pad_token_id
    model.config.pad_token_id = None
    more = {"token_type_ids": torch.tensor([list(segments)])} if segments else {}
    found = model(input_ids=torch.tensor([list(ids)]), **more).logits.mean().item()
    model.config.pad_token_id = before
    return found
