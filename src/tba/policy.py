"""A causal language model as a policy: ids in, log-probs out."""

# Shape legend: N rows, T positions, V vocabulary.

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba import lora, smollm
from tba.batch import Rows, make_rows
from tba.catalog import FRESH, MODELS, PACKAGED
from tba.head import WORTH, Head, head_of, target_logps
from tba.limits import FREE, Limits
from tba.sections import LoraSettings
from tba.settings import ArchitectureSettings
from tba.tokenizers import character_tokenizer, subword_tokenizer

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model, its tokenizer, and the temperature that both policy and reference divide logits by."""

    model: Any
    """A causal LM: `model(input_ids=, attention_mask=).logits`; always in eval mode, so dropout is off."""
    tokenizer: Any
    temperature: float
    autocast: bool = False
    """Compute in bfloat16; log-softmax stays float32."""
    limits: Limits = FREE
    """Where completions may not stop and where they must; a reference knows none."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a completion."""
        listed = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ids = listed if isinstance(listed, list) else [listed]
        return frozenset(int(i) for i in [*ids, self.tokenizer.eos_token_id] if i is not None)

    def encode(self, prompt: str | list[dict[str, str]]) -> tuple[int, ...]:
        """Prompt ids, templated once: a string, or chat messages through the model's chat template.

        The BOS that the tokenizer or template defines comes once, never twice; no EOS is appended.
        """
        if isinstance(prompt, str):
            ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        while len(ids) >= 2 and bos is not None and ids[0] == ids[1] == bos:
            del ids[0]
        if isinstance(prompt, str) and len(ids) > 1 and eos is not None and ids[-1] == eos != bos:
            del ids[-1]
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Completion ids as text, special tokens removed."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_logps(self, rows: Rows, is_split: bool | None = None) -> Float[Tensor, "N T"]:
        """Log-prob of each target, nats, zero outside completions; float32 log-softmax.

        `is_split`: whether distinct prompts are read apart; None: where that saves.
        """
        device = next(self.model.parameters()).device
        rows = Rows(**{f.name: getattr(rows, f.name).to(device) for f in dataclasses.fields(rows)})
        split = split_rows(rows)
        if is_split is None:
            is_split = split.saves(rows) and cache_word(self.model) is not None
        num_places = (split.place_NC if is_split else rows.target_NT).numel()
        head = self._head_worth(num_places)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            if is_split:
                return self._logps_of_split(split, rows, head)
            found = self._forward(head, input_ids=rows.input_NT, attention_mask=rows.attention_NT)
            return self._limited_logps(found, rows.target_NT, rows.completion_NT, head)

    def wants_split(self, rows: Rows) -> bool:
        """Whether reading the prompts of `rows` apart saves, in two passes through the model."""
        split = split_rows(rows)
        return split.saves(rows) and cache_word(self.model) is not None and split.input_NR.shape[1] > 0

    def _head_worth(self, num_places: int) -> Head | None:
        """The model's head, to be applied apart; None where the logits of so many places are few, or cannot be."""
        vocabulary = getattr(self.model.config, "vocab_size", 0)
        return head_of(self.model) if num_places * vocabulary >= WORTH else None

    def _forward(self, head: Head | None, **inputs: Any) -> Tensor:
        """[N T ...] logits of the model; with a head that is applied apart, the hidden states that it takes."""
        return self.model(**inputs).logits if head is None else head.body(**inputs).last_hidden_state

    def next_logits(self, logits_NV: Tensor, place_N: Tensor) -> Tensor:
        """[N V] logits of the id at a place of each completion, with what the limits say of it."""
        if self.limits == FREE:
            return logits_NV
        return self.limits.of_next(logits_NV, place_N, torch.tensor(sorted(self.stop_ids)), self.tokenizer.eos_token_id)

    def _limited_logps(self, found: Tensor, target: Tensor, mask: Tensor, head: Head | None) -> Tensor:
        """[N T] log-probs of completions, whose ids `mask` marks, out of what `_forward` found, within the limits."""
        place = mask.long().cumsum(1) - 1
        stop_S = torch.tensor(sorted(self.stop_ids))
        if head is None:
            logits = found if self.limits == FREE else self.limits.banned(found, place, stop_S)
            logps = target_logps(logits, target, mask, self.temperature)
        else:
            logps_M = head.logps(
                found[mask], target[mask], self.temperature, limits=self.limits, place_M=place[mask], stop_S=stop_S
            )
            logps = torch.zeros(mask.shape, dtype=logps_M.dtype, device=mask.device).masked_scatter(mask, logps_M)
        return self.limits.forced(logps, place)

    def _logps_of_split(self, split: Split, rows: Rows, head: Head | None) -> Float[Tensor, "N T"]:
        """`token_logps` with each distinct prompt read once, for all of its completions."""
        from transformers import DynamicCache

        cache = DynamicCache()
        kept = {str(cache_word(self.model)): cache, "use_cache": True}
        keep = {"logits_to_keep": 1} if head is None else {}
        last_P = self._forward(
            head, input_ids=split.prompt_PT, attention_mask=split.mask_PT, position_ids=positions(split.mask_PT),
            **kept, **keep,
        )[:, -1]
        found_NC = last_P[split.prompt_N][:, None]
        if split.input_NR.shape[1]:
            cache.batch_select_indices(split.prompt_N)
            mask_NT = torch.cat([split.mask_PT[split.prompt_N], split.mask_NR], 1)
            rest_NR = self._forward(
                head, input_ids=split.input_NR, attention_mask=mask_NT, **kept,
                position_ids=positions(mask_NT)[:, -split.input_NR.shape[1] :],
            )
            found_NC = torch.cat([found_NC, rest_NR], 1)
        target_NC, mask_NC = (x.gather(1, split.place_NC) for x in (rows.target_NT, rows.completion_NT))
        logps_NC = self._limited_logps(found_NC, target_NC, mask_NC & split.inside_NC, head)
        return torch.zeros_like(rows.target_NT, dtype=logps_NC.dtype).scatter_add(1, split.place_NC, logps_NC)

    @torch.no_grad()
    def sequence_logps(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, max_tokens: int = 16_384
    ) -> list[float]:
        """Log p(completion | prompt), nats, of (prompt ids, completion ids) pairs, without gradient.

        Equal pairs are computed once.
        """
        return self._of_pairs(pairs, max_tokens, lambda rows, logps_NT: logps_NT.sum(-1).tolist())

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Overwrites the weights; see `copy_in`."""
        copy_in(self.model, tensors)

    @torch.no_grad()
    def completion_logps(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, max_tokens: int = 16_384
    ) -> list[tuple[float, ...]]:
        """Log-prob of each completion id, nats, of (prompt ids, completion ids) pairs, without gradient.

        Equal pairs are computed once.
        """
        return self._of_pairs(pairs, max_tokens, lambda rows, logps_NT: [
            tuple(logps[mask].tolist()) for logps, mask in zip(logps_NT.cpu(), rows.completion_NT, strict=True)
        ])

    def _of_pairs(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], max_tokens: int,
        value: Callable[[Rows, Tensor], list[V]],
    ) -> list[V]:
        """What `value` makes of the rows of `pairs` and their token log-probs, in pieces of `max_tokens`."""
        keys = [(tuple(prompt), tuple(completion)) for prompt, completion in pairs]
        distinct = list(dict.fromkeys(keys))
        step = max(1, max_tokens // max(len(p) + len(c) for p, c in distinct))
        found: list[V] = []
        for at in range(0, len(distinct), step):
            rows = make_rows(distinct[at : at + step])
            found += value(rows, self.token_logps(rows))
        value_of = dict(zip(distinct, found, strict=True))
        return [value_of[key] for key in keys]

    def frozen_copy(self) -> Policy:
        """A copy of the policy as it is now, for use as reference or by an engine; adapters share their base."""
        return dataclasses.replace(self, model=_copied(self.model, trainable=False))

    def trainable_copy(self) -> Policy:
        """A copy of the policy as it is now, whose parameters take gradients; of one with adapter, the adapter's."""
        return dataclasses.replace(self, model=_copied(self.model, trainable=True))

    def sampling_copy(self, dtype: str) -> Policy:
        """A frozen copy whose base computes in `dtype`; in another one than its own the base is no longer shared.

        An adapter keeps its precision, so that what is loaded into it stays what was published.
        """
        made = self.frozen_copy()
        if (wanted := getattr(torch, dtype)) != self.dtype:
            _cast_base(made.model, wanted)
        return made

    @property
    def dtype(self) -> torch.dtype:
        """Of the base's weights."""
        return next(self.model.parameters()).dtype

    def without_limits(self) -> Policy:
        """The same policy, free to stop anywhere: what a reference is, which says how likely a finished text is."""
        return dataclasses.replace(self, limits=FREE)

    def without_adapter(self) -> Policy:
        """A frozen copy that is the base model for good; of a policy without adapter, a plain frozen copy."""
        made = self.frozen_copy().without_limits()
        if lora.has_adapter(made.model):
            lora.turn_off(made.model)
        return made

    def save(self, path: Path) -> None:
        """Writes a plain Hugging Face model folder: config, safetensors, tokenizer.

        An adapter is merged in, and lies beside it as `adapter/`.
        """
        _be_quiet()
        if lora.has_adapter(self.model):
            lora.save(self.model, path)
        else:
            self.model.save_pretrained(path, safe_serialization=True)
        self.tokenizer.save_pretrained(path)


def _copied(model: Any, *, trainable: bool) -> Any:
    if lora.has_adapter(model):
        made = lora.copy_sharing_base(model)
        lora.set_trainable(made, trainable)
        return made
    return copy.deepcopy(model).requires_grad_(trainable)


def _cast_base(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Gives `model` a base of its own in `dtype`: the tensors that it had may be those of others. Ties are kept."""
    made: dict[int, torch.nn.Parameter] = {}
    for owner, module in model.named_modules():
        for name, old in module.named_parameters(recurse=False):
            if not lora.is_adapter_name(f"{owner}.{name}"):
                new = made.setdefault(id(old), torch.nn.Parameter(old.detach().to(dtype), requires_grad=False))
                setattr(module, name, new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows as P distinct prompts, left-padded, and what follows each row's own: C targets, of them R = C - 1 read."""

    prompt_PT: Int[Tensor, "P T"]
    mask_PT: Int[Tensor, "P T"]
    prompt_N: Int[Tensor, " N"]
    input_NR: Int[Tensor, "N R"]
    mask_NR: Int[Tensor, "N R"]
    place_NC: Int[Tensor, "N C"]
    """Place of each target in the rows; the last one beyond their width."""
    inside_NC: Bool[Tensor, "N C"]

    def saves(self, rows: Rows) -> bool:
        """Whether a quarter of the positions is saved at least, which a second pass through the model must earn."""
        return 4 * (self.prompt_PT.numel() + self.input_NR.numel()) <= 3 * rows.input_NT.numel()


def split_rows(rows: Rows) -> Split:
    """Prompts apart from completions. Padding lies left of a prompt, so that no gap follows it."""
    width = rows.input_NT.shape[1]
    start_N = rows.completion_NT.int().argmax(1) + 1
    number_P, first_P = np.unique(rows.prompt_N.cpu().numpy(), return_index=True)
    first_P = torch.from_numpy(first_P).to(start_N.device)
    at_PT = torch.arange(int(start_N.max()), device=start_N.device) - (start_N.max() - start_N[first_P])[:, None]
    place_NC = start_N[:, None] - 1 + torch.arange(int(rows.completion_NT.sum(1).max()), device=start_N.device)
    inside_NC = place_NC < width
    read_NR = place_NC[:, 1:].clamp(max=width - 1)
    return Split(
        prompt_PT=rows.input_NT[first_P].gather(1, at_PT.clamp(min=0)), mask_PT=(at_PT >= 0).long(),
        prompt_N=torch.searchsorted(torch.from_numpy(number_P).to(start_N.device), rows.prompt_N),
        input_NR=rows.input_NT.gather(1, read_NR),
        mask_NR=(rows.attention_NT.gather(1, read_NR) & inside_NC[:, 1:]).long(),
        place_NC=place_NC.clamp(max=width - 1), inside_NC=inside_NC,
    )


def positions(mask_NT: Int[Tensor, "N T"]) -> Int[Tensor, "N T"]:
    """Position of each id among those that are no padding."""
    return (mask_NT.cumsum(1) - 1).clamp(min=0)


def cache_word(model: Any) -> str | None:
    """Name of the argument by which the model goes on from what it has read, which releases of transformers differ in.

    None if it cannot.
    """
    inner = model.get_base_model() if lora.has_adapter(model) else model
    taken = inspect.signature(inner.forward).parameters
    return next((word for word in ("cache", "past_key_values") if word in taken), None)


# ---- weights in and out -------------------------------------------------------------------------------


def named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each tied tensor once; of a model with adapter, the adapter's."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    is_adapted = lora.has_adapter(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (not is_adapted or lora.is_adapter_name(name)):
            seen.add(id(tensor))
            found[name] = tensor
    return found


@torch.no_grad()
def copy_out(
    model: torch.nn.Module, into: Mapping[str, npt.NDArray[Any]] | None = None,
    whole: Callable[[Tensor], Tensor] = torch.Tensor.detach,
) -> dict[str, npt.NDArray[Any]]:
    """The tensors that the model computes with, copied to host memory; later optimizer steps do not change them.

    Of a model whose adapter is off these are none. `into` is an earlier copy of the same model, which is written over.
    `whole` makes a tensor of what the model has of it, one after another.
    """
    if lora.has_adapter(model) and lora.is_off(model):
        return {}
    own = named_tensors(model)
    if into is None:
        return {name: whole(tensor).cpu().numpy().copy() for name, tensor in own.items()}
    for name, tensor in own.items():
        torch.from_numpy(into[name]).copy_(whole(tensor))
    return dict(into)


@torch.no_grad()
def copy_in(model: torch.nn.Module, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Overwrites the model's tensors.

    Raises:
        ValueError: names or shapes are not the model's; nothing has been overwritten then.
    """
    own = named_tensors(model)
    odd = sorted(own.keys() ^ tensors.keys())
    wrong = [f"{n} {tensors[n].shape} for {tuple(own[n].shape)}" for n in own.keys() & tensors.keys()
             if tuple(tensors[n].shape) != tuple(own[n].shape)]
    if odd or wrong:
        raise ValueError(f"weights do not fit the model: names on one side only {odd[:3]}, shapes {wrong[:3]}.")
    for name, tensor in own.items():
        tensor.copy_(torch.from_numpy(np.array(tensors[name], copy=True)))


# ---- loading ------------------------------------------------------------------------------------------


def load_policy(
    model: str, *, architecture: ArchitectureSettings, characters: str | Sequence[str], seed: int, temperature: float,
    autocast: bool = False, trust_remote_code: bool = False, adapter: LoraSettings | None = None,
    tokenizer: str | None = None,
) -> Policy:
    """The policy of a built-in or packaged model, one made from scratch, a model folder, or a Hugging Face id.

    Master weights are float32; folders must hold safetensors. With `adapter` the model is adapted, and is the
    same model until the adapter is trained. `tokenizer` is a folder or an id; the model's own if None. That of a model
    from scratch has these `characters`, or with `architecture.vocabulary` is trained on them: texts then.
    """
    if model in FRESH:
        size = architecture.vocabulary
        reader = character_tokenizer("".join(characters)) if size is None else subword_tokenizer(characters, size)
        make = _new_llama if model == "new-llama" else _new_table
        made = make(architecture, reader, seed)
    else:
        from transformers import AutoModelForCausalLM

        _be_quiet()
        _register_table()
        where = str(_folder_of(model))
        options = {"trust_remote_code": trust_remote_code}
        reader = load_tokenizer(tokenizer or model, trust_remote_code=trust_remote_code)
        made = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, use_safetensors=True, **options)
    if adapter is not None and adapter.rank:
        made = lora.add_adapter(made, adapter, seed)
    return Policy(model=made.eval(), tokenizer=reader, temperature=temperature, autocast=autocast)


def load_tokenizer(where: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model that is not made from scratch, without the model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(_folder_of(where)), trust_remote_code=trust_remote_code)


def _folder_of(model: str) -> Path | str:
    """Where a model's files are; what is no model of ours stays as it is."""
    if model in MODELS:
        return Path(str(resources.files("tba").joinpath("assets", model)))
    return smollm.model_folder(smollm.cache_root(os.environ)) if model in PACKAGED else model


def _new_llama(shape: ArchitectureSettings, tokenizer: Any, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=shape.width, intermediate_size=8 * shape.width // 3,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        max_position_embeddings=shape.positions, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _new_table(shape: ArchitectureSettings, tokenizer: Any, seed: int) -> Any:
    from tba.table_model import TableConfig, TableModel

    config = TableConfig(vocab_size=len(tokenizer), positions=shape.positions, eos_token_id=tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TableModel(config)


def _be_quiet() -> None:
    """Turns off the library's own progress bars: progress of a run is shown in one place."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _register_table() -> None:
    from tba import table_model

    table_model.register()
