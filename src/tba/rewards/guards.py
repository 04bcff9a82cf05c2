"""Guard models as judges: the chance of the first word of a causal LM's verdict."""

# Shape legend: N texts, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tba.devices import device_of
from tba.records import Completion, Prompt
from tba.redteam_settings import JudgeSettings
from tba.rewards.functions import Failure
from tba.rewards.inputs import Encoder, Input
from tba.rewards.models import batches, encode_safely, last_attended, longest_of, padded, refusing
from tba.sections import SettingsError


class GuardScorer:
    """Shows a guard the attack and an answer as a chat, and reads how likely its verdict begins with a word.

    The chance is over the whole vocabulary, so that a word outside the likeliest ones has one too.
    """

    def __init__(self, model: Any, encoder: Encoder, *, token: int, suffix: Sequence[int], batch_tokens: int) -> None:
        """`token` is the id of the word, `suffix` the ids that follow the chat."""
        self.model, self.encoder = model, encoder
        self._token, self._suffix, self._batch_tokens = token, tuple(suffix), batch_tokens

    @torch.inference_mode()
    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | Failure]:
        """The chance of each completion, or why there is none."""
        found: list[float | Failure] = [0.0] * len(completions)
        inputs: dict[int, Input] = {}
        for place, completion in enumerate(completions):
            made = encode_safely(self.encoder, prompt, completion)
            if isinstance(made, Failure):
                found[place] = made
            else:
                inputs[place] = Input(ids=(*made.ids, *self._suffix))
        numbered = list(inputs.items())
        for chosen in batches([len(made.ids) for _, made in numbered], self._batch_tokens):
            tensors = padded([numbered[at][1] for at in chosen], self.encoder.tokenizer)
            tensors = {name: tensor.to(self.model.device) for name, tensor in tensors.items()}
            logits_NTV = self.model(**tensors).logits
            last_N = last_attended(tensors["attention_mask"])
            logits_NV = logits_NTV[torch.arange(len(chosen), device=logits_NTV.device), last_N].float()
            for at, chance in zip(chosen, logits_NV.softmax(-1)[:, self._token].tolist(), strict=True):
                found[numbered[at][0]] = chance
        return found


def load_guard(judge: JudgeSettings, place: str) -> GuardScorer:
    """The guard of a judge's settings, found at `place` of the tree.

    Raises:
        SettingsError: it cannot be loaded, or has no chat template, or has not the word.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, word = str(judge.model), str(judge.first_token)
    with refusing(where, f"{place}.model"):
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=getattr(torch, judge.dtype), use_safetensors=True, trust_remote_code=False
        )
    if not tokenizer.chat_template:
        raise SettingsError([f"{place}.model = {where!r} has no chat template, which a guard is read by."])
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if not ids:
        raise SettingsError([f"{place}.first_token = {word!r} is no token of {where!r}; give its verdict's word."])
    suffix = tokenizer(judge.suffix, add_special_tokens=False)["input_ids"] if judge.suffix else []
    longest = min(longest_of(model, tokenizer), judge.max_tokens or 1 << 20) - len(suffix)
    held: Any = model.eval().requires_grad_(False)
    held.to(device_of(judge.device, f"{place}.device"))
    return GuardScorer(
        model, Encoder(tokenizer, reads="chat", at_eos=False, max_tokens=longest), token=ids[0], suffix=suffix,
        batch_tokens=judge.batch_tokens,
    )
