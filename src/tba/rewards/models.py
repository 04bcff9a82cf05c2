"""Reward models: sequence classifiers that score prompt and completion, whatever the padding."""

# Shape legend: N texts, T positions, L labels.

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tba.devices import device_of
from tba.preference_settings import Activation, RewardSettings
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, clip
from tba.rewards.inputs import Encoder, Input, TooLong, messages_of
from tba.sections import SettingsError

RECORD = "tba_reward"
"""Key of a model's config under which its training has left how it reads: {"reads": ..., "at_eos": ...}."""
NO_LIMIT = 1 << 20
"""Tokens that no model is asked to read at once; what tokenizers name beyond is no limit."""


class ModelScorer:
    """Scores completions with a sequence classifier; batching and padding change no score."""

    def __init__(
        self, model: Any, encoder: Encoder, *, index: int | None, activation: Activation, batch_tokens: int,
        without_eos: float | None = None,
    ) -> None:
        """`index` is the label that counts, None the mean over labels; `without_eos` scores what did not stop."""
        self.model, self.encoder = model, encoder
        self._index, self._batch_tokens, self._without_eos = index, batch_tokens, without_eos
        self._activation: Activation = activation

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | Failure]:
        """One score per completion, in order: units of the model's logits, or what `activation` makes of them."""
        found: list[float | Failure] = [0.0] * len(completions)
        inputs: dict[int, Input] = {}
        for place, completion in enumerate(completions):
            stopped = completion.finish == "stop"
            if not stopped and self._without_eos is not None:
                found[place] = self._without_eos
                continue
            made = encode_safely(self.encoder, prompt, completion)
            if isinstance(made, Failure):
                found[place] = made
            else:
                inputs[place] = made
        for place, score in zip(inputs, self.scores(list(inputs.values())), strict=True):
            found[place] = score
        return found

    @torch.inference_mode()
    def scores(self, inputs: Sequence[Input]) -> list[float]:
        """One score per input, in order."""
        found = [0.0] * len(inputs)
        for places in batches([len(i.ids) for i in inputs], self._batch_tokens):
            logits_NL = end_logits(self.model, **padded([inputs[p] for p in places], self.encoder.tokenizer))
            picked_N = picked(logits_NL.float(), self._index, self._activation)
            for place, score in zip(places, picked_N.tolist(), strict=True):
                found[place] = score
        return found


def encode_safely(encoder: Encoder, prompt: Prompt, completion: Completion) -> Input | Failure:
    """What the model reads of one completion, or why it cannot."""
    try:
        return encoder.encode(messages_of(prompt), completion.text, stopped=completion.finish == "stop")
    except TooLong as error:
        return Failure(reason="too_long", detail=str(error))
    except Exception as error:
        # A tokenizer or a template may choke on one text; its siblings are scored.
        return Failure(reason="raised", detail=clip(f"{type(error).__name__}: {error}"))


def batches(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Places of texts that are read together: longest first, padded to at most `most_tokens`, one at least."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda p: (-lengths[p], p)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > most_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def padded(inputs: Sequence[Input], tokenizer: Any) -> dict[str, Tensor]:
    """A batch padded on the right. Masks come from lengths, so that any id may pad, EOS too."""
    width = max(len(i.ids) for i in inputs)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    made = {
        "input_ids": torch.tensor([[*i.ids, *[pad] * (width - len(i.ids))] for i in inputs]),
        "attention_mask": torch.tensor([[1] * len(i.ids) + [0] * (width - len(i.ids)) for i in inputs]),
    }
    if inputs[0].segments:
        made["token_type_ids"] = torch.tensor([[*i.segments, *[0] * (width - len(i.ids))] for i in inputs])
    return made


def last_attended(attention_mask: Tensor) -> Tensor:
    """[N] place of each row's last attended token, whichever side the padding is on; ids play no part.

    `[1, 1, 0]` gives 1, `[0, 1, 1]` gives 2.
    """
    width = attention_mask.shape[1]
    return width - 1 - attention_mask.flip(1).argmax(1)


def end_logits(model: Any, input_ids: Tensor, attention_mask: Tensor, **more: Tensor) -> Tensor:
    """[N, L] logits of each text. Of a decoder they are read at the last attended token.

    The model's own pooling looks for the last id that is not the pad token's: where EOS pads, or no pad token is
    known, that is another token than the last one. Models whose score head is no linear layer per token (encoders,
    encoder-decoders) pool by themselves, by the mask.
    """
    input_ids, attention_mask = input_ids.to(model.device), attention_mask.to(model.device)
    more = {name: tensor.to(model.device) for name, tensor in more.items()}
    head = token_head(model)
    if head is None:
        return model(input_ids=input_ids, attention_mask=attention_mask, **more).logits
    if "position_ids" in inspect.signature(model.base_model.forward).parameters:
        more["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    more.pop("token_type_ids", None)
    hidden_NTD = model.base_model(input_ids=input_ids, attention_mask=attention_mask, **more)[0]
    rows_N = torch.arange(len(input_ids), device=hidden_NTD.device)
    return head(hidden_NTD[rows_N, last_attended(attention_mask)])


def token_head(model: Any) -> torch.nn.Linear | None:
    """The head of a decoder, which scores every token; None if the model has no such head."""
    head = getattr(model, "score", None)
    return head if isinstance(head, torch.nn.Linear) and not model.config.is_encoder_decoder else None


def picked(logits_NL: Tensor, index: int | None, activation: Activation) -> Tensor:
    """[N] the activated logit of label `index`, or the mean over labels."""
    activate = {
        "none": lambda x: x, "sigmoid": torch.sigmoid, "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
    }[activation]
    scores_NL = activate(logits_NL)
    return scores_NL.mean(-1) if index is None else scores_NL[:, index]


# ---- loading ------------------------------------------------------------------------------------------


def load_scorer(reward: RewardSettings, place: str = "task.rewards.0") -> ModelScorer:
    """The scorer of the settings of one reward model, found at `place` of the tree.

    Raises:
        SettingsError: the model cannot be loaded, or is not as the settings say.
    """
    model, tokenizer, missing = load_classifier(str(reward.model), f"{place}.model", reward.dtype)
    if missing:
        raise SettingsError([_headless(place, str(reward.model), missing)])
    reads, at_eos = reading_of(model, tokenizer, reward.reads, reward.at_eos)
    problems = [*_problems(reward, place, model, tokenizer, reads, at_eos)]
    device = device_of(reward.device, f"{place}.device")
    if problems:
        raise SettingsError(problems)
    longest = min(longest_of(model, tokenizer), reward.max_tokens or NO_LIMIT)
    return ModelScorer(
        model.to(device), Encoder(tokenizer, reads=reads, at_eos=at_eos, max_tokens=longest), index=reward.index,
        activation=reward.activation, batch_tokens=reward.batch_tokens, without_eos=reward.without_eos,
    )


def load_classifier(where: str, place: str, dtype: str = "float32", labels: int | None = None) -> Any:
    """(model in eval mode, tokenizer, names of weights that the files lack) of a folder or a Hugging Face id.

    Raises:
        SettingsError: it cannot be loaded, not from safetensors, or not without running its own code.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from tba.rewards.classifiers import register

    register()
    more = {} if labels is None else {"num_labels": labels}
    with refusing(where, place):
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            where, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False,
            output_loading_info=True, **more,
        )
    model.config.use_cache = False
    return model.eval().requires_grad_(False), tokenizer, info["missing_keys"]


def unloadable(rewards: Sequence[RewardSettings], *, fetches: bool, place: str = "task.rewards") -> list[str]:
    """What keeps reward models from being loaded, as far as config, tokenizer and the files' headers tell.

    No weights are read, so that a model is refused before anything else loads. Models that are no folder are looked
    at only if `fetches`, since their config may have to be fetched.
    """
    found: list[str] = []
    for number, reward in enumerate(rewards):
        if reward.model is not None and (fetches or Path(reward.model).is_dir()):
            try:
                found += _unloadable(reward, f"{place}.{number}")
            except SettingsError as error:
                found += error.problems
    return found


def _unloadable(reward: RewardSettings, place: str) -> Iterator[str]:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from tba.rewards.classifiers import register

    register()
    where = str(reward.model)
    with refusing(where, f"{place}.model"), torch.device("meta"):
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        hollow = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    files = sorted(Path(where).glob("*.safetensors"))
    head = {name for name in hollow.state_dict() if not name.startswith(f"{hollow.base_model_prefix}.")}
    if files and head.isdisjoint(_names_in(files, f"{place}.model")):
        yield _headless(place, where, head)
    reads, at_eos = reading_of(hollow, tokenizer, reward.reads, reward.at_eos)
    yield from _problems(reward, place, hollow, tokenizer, reads, at_eos)


def _names_in(files: Sequence[Path], place: str) -> set[str]:
    """Names of the tensors in safetensors files, from their headers."""
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        except SafetensorError as error:
            raise SettingsError([
                f"{place} cannot be loaded: {str(path)!r} is no whole safetensors file ({error}); get it anew."
            ]) from error
    return names


def _headless(place: str, where: str, missing: Iterable[str]) -> str:
    return (f"{place}.model = {where!r} has no trained weights for {', '.join(sorted(missing)[:3])}: it is no "
            f"finished reward model; give one, or train it with tba reward-model.")


@contextmanager
def refusing(where: str, place: str) -> Iterator[None]:
    """What the library raises for a model that cannot be had, as the user's mistake."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing is returned, and said by who asked
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SettingsError([f"{place} = {where!r} cannot be loaded: {type(error).__name__}: {reason}"]) from error
    finally:
        logging.set_verbosity(verbosity)


def reading_of(model: Any, tokenizer: Any, reads: str, at_eos: bool | None) -> tuple[Any, bool]:
    """How the model reads: as asked, else as its folder says, else by chat template if it has one, without EOS."""
    said = getattr(model.config, RECORD, None) or {}
    if reads == "auto":
        reads = said.get("reads") or ("chat" if tokenizer.chat_template else "text")
    return reads, bool(said.get("at_eos", False)) if at_eos is None else at_eos


def longest_of(model: Any, tokenizer: Any) -> int:
    """Tokens that the model can read at once."""
    positions = getattr(model.config, "max_position_embeddings", None) or NO_LIMIT
    embeddings = getattr(model.base_model, "embeddings", None)
    offset = getattr(embeddings, "padding_idx", None)  # RoBERTa and its kin count positions from here
    return min(NO_LIMIT, tokenizer.model_max_length, positions - (0 if offset is None else offset + 1))


def _problems(
    reward: RewardSettings, place: str, model: Any, tokenizer: Any, reads: str, at_eos: bool
) -> Iterator[str]:
    labels, known = model.config.num_labels, model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > known:
        yield (f"{place}.model = {reward.model!r}: its tokenizer has {len(tokenizer)} tokens, and the model knows "
               f"{known}: it is another model's; put the tokenizer that it was trained with into the folder.")
    if reward.index is not None and reward.index >= labels:
        yield (f"{place}.index = {reward.index}: {reward.model!r} has {labels} labels "
               f"({', '.join(str(v) for v in model.config.id2label.values())}); give a number below {labels}.")
    if reads not in ("text", "chat", "pair", "completion"):
        yield f"{place}.model = {reward.model!r} says that it reads {reads!r}; set {place}.reads yourself."
    if reads == "chat" and not tokenizer.chat_template:
        yield f"{place}.reads = 'chat', but the tokenizer of {reward.model!r} has no chat template; set it to text."
    if at_eos and tokenizer.eos_token_id is None:
        yield f"{place}.at_eos = True, but the tokenizer of {reward.model!r} has no EOS token; set it to false."
