"""Two small classifiers of words: an LSTM read both ways, and a linear one of weighted counts."""

# Shape legend: N texts, T positions, W words of the window, D width, H units, G directions, F folds, L labels.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

NONE = "<none>"
"""Token of id 0: padding, the start of every text, and every word that is not known. Both models pass over it."""
PUNCTUATION = r'[!"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~\t\n]'
"""What separates words beside spaces, where they are split at spaces: an apostrophe does not."""
RUN = r"[\p{L}\p{N}_]{2,}"
"""A word where words are runs: two letters, digits or underscores, or more."""


class RecurrentConfig(PreTrainedConfig):
    """Sizes of `RecurrentWords`."""

    model_type = "tba_recurrent_words"

    def __init__(
        self, vocab_size: int = 8, width: int = 4, units: int = 3, dense: int = 5, window: int = 7,
        gate: Literal["sigmoid", "hard_sigmoid"] = "sigmoid", **options: Any,
    ) -> None:
        """`width` of a word's vector, `units` of each direction, `dense` of the hidden layer.

        `window`: words that are read, the last ones of a text; a shorter text is filled up on its left with id 0.
        `gate`: what opens the LSTM's gates; hard_sigmoid is clip(x / 5 + 1 / 2, 0, 1).
        """
        self.vocab_size, self.width, self.units, self.dense = vocab_size, width, units, dense
        self.window, self.gate = window, gate
        super().__init__(**options)


class RecurrentWords(PreTrainedModel):
    """Word vectors, an LSTM in each direction, the maximum over places, one hidden layer, a logit for each label.

    The filling is read like words, as in training, so that a score is of the text alone: of no other text in a batch,
    and of no padding, whichever side it is on.
    """

    config_class = RecurrentConfig
    base_model_prefix = "words"

    def __init__(self, config: RecurrentConfig) -> None:
        """Weights are drawn from a normal distribution of standard deviation 0.1."""
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, config.width)
        gates = 4 * config.units
        self.input_weight = torch.nn.Parameter(0.1 * torch.randn(2, config.width, gates))
        self.state_weight = torch.nn.Parameter(0.1 * torch.randn(2, config.units, gates))
        self.bias = torch.nn.Parameter(torch.zeros(2, 1, gates))
        self.hidden = torch.nn.Linear(2 * config.units, config.dense)
        self.label = torch.nn.Linear(config.dense, len(config.id2label or {}))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: they are drawn in `__init__`."""

    def get_input_embeddings(self) -> torch.nn.Module:
        """The word vectors."""
        return self.embedding

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any
    ) -> SequenceClassifierOutput:
        """Logits [N, L] of `input_ids` [N, T]."""
        del unused
        ids_NW = last_words(input_ids, attention_mask, self.config.window)
        return SequenceClassifierOutput(logits=self.label(self.hidden(self._states(ids_NW)).relu()))

    def _states(self, ids_NW: Tensor) -> Tensor:
        """[N 2H] of each unit the largest state over all places, those of the forward direction first."""
        vectors_NWD = self.embedding(ids_NW)
        both_GNWD = torch.stack([vectors_NWD, vectors_NWD.flip(1)])
        state_GNH = both_GNWD.new_zeros(2, len(ids_NW), self.config.units)
        cell_GNH, most_GNH = state_GNH, torch.full_like(state_GNH, -torch.inf)
        for place in range(self.config.window):
            gates = both_GNWD[:, :, place] @ self.input_weight + state_GNH @ self.state_weight + self.bias
            let_in, keep, new, let_out = gates.chunk(4, -1)
            cell_GNH = self._opened(keep) * cell_GNH + self._opened(let_in) * new.tanh()
            state_GNH = self._opened(let_out) * cell_GNH.tanh()
            most_GNH = torch.maximum(most_GNH, state_GNH)
        return torch.cat([most_GNH[0], most_GNH[1]], -1)

    def _opened(self, gate: Tensor) -> Tensor:
        return gate.sigmoid() if self.config.gate == "sigmoid" else (gate * 0.2 + 0.5).clamp(0.0, 1.0)


class LinearConfig(PreTrainedConfig):
    """Sizes of `LinearWords`."""

    model_type = "tba_linear_words"

    def __init__(self, vocab_size: int = 8, folds: int = 2, **options: Any) -> None:
        """`folds`: margins, each with a calibration of its own, whose chances are averaged."""
        self.vocab_size, self.folds = vocab_size, folds
        super().__init__(**{"num_labels": 1, **options})


class LinearWords(PreTrainedModel):
    """Counts of words, each times its rarity, at length 1; of each fold a margin and a sigmoid of it; their mean.

    chance = mean_f sigmoid(slope_f m_f + offset_f),  m_f = sum_w x_w weight_wf / |x|,  x_w = count_w rarity_w.
    The one logit is that of the chance, exact where the chance rounds to 1.
    """

    config_class = LinearConfig
    base_model_prefix = "words"

    def __init__(self, config: LinearConfig) -> None:
        """Weights are drawn from a normal distribution, and every word is as rare."""
        super().__init__(config)
        self.weight = torch.nn.Embedding(config.vocab_size, config.folds)
        self.rarity = torch.nn.Parameter(torch.ones(config.vocab_size))
        self.slope = torch.nn.Parameter(torch.ones(config.folds))
        self.offset = torch.nn.Parameter(torch.zeros(config.folds))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: they are drawn in `__init__`."""

    def get_input_embeddings(self) -> torch.nn.Module:
        """The weights of words."""
        return self.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any
    ) -> SequenceClassifierOutput:
        """Logits [N, 1] of `input_ids` [N, T]."""
        del unused
        rarity_NT = self.rarity[input_ids] * are_words(input_ids, attention_mask)
        # |x|^2 = sum over w of count_w^2 rarity_w^2 = sum over places of how often their word is there times rarity^2
        same_NTT = (input_ids[:, :, None] == input_ids[:, None, :]) * (rarity_NT > 0)[:, None, :]
        length_N1 = (rarity_NT.square() * same_NTT.sum(-1)).sum(1, keepdim=True).sqrt()
        margin_NF = (rarity_NT[..., None] * self.weight(input_ids)).sum(1) / length_N1.clamp(min=1e-12)
        z_NF = self.slope * margin_NF + self.offset
        sigmoid = torch.nn.functional.logsigmoid
        return SequenceClassifierOutput(
            logits=sigmoid(z_NF).logsumexp(-1, keepdim=True) - sigmoid(-z_NF).logsumexp(-1, keepdim=True)
        )


def are_words(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """[N, T] whether a place holds a known word."""
    return (input_ids != 0) if attention_mask is None else (input_ids != 0) & attention_mask.bool()


def last_words(input_ids: Tensor, attention_mask: Tensor | None, window: int) -> Tensor:
    """[N, W] the last `window` known words of each row, in their order, on the right; 0 on their left.

    `[5, 0, 6, 7]` gives `[6, 7]` with a window of 2, and `[0, 5, 6, 7]` with one of 4.
    """
    is_word = are_words(input_ids, attention_mask)
    from_end = is_word.long().flip(1).cumsum(1).flip(1)
    rows, places = torch.where(is_word & (from_end <= window))
    made = input_ids.new_zeros(len(input_ids), window)
    made[rows, window - from_end[rows, places]] = input_ids[rows, places]
    return made


def word_tokenizer(words: Sequence[str], *, split: Literal["spaces", "runs"]) -> Any:
    """The fast tokenizer of `words` in lower case, whose ids are their places from 1.

    `spaces`: what is between spaces and `PUNCTUATION`; `runs`: what `RUN` finds.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([NONE, *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=NONE))
    if split == "spaces":
        inner.normalizer = normalizers.Sequence([
            normalizers.Replace(Regex(PUNCTUATION), " "), normalizers.Lowercase(),
        ])
        inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    else:
        inner.normalizer = normalizers.Lowercase()
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(RUN), "removed", invert=True)
    # A text without any known word has an id all the same.
    inner.post_processor = processors.TemplateProcessing(single=f"{NONE} $A", special_tokens=[(NONE, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token=NONE, pad_token=NONE, model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def register() -> None:
    """Makes `AutoModelForSequenceClassification` know saved folders of both; safe to call twice."""
    for config, model in ((RecurrentConfig, RecurrentWords), (LinearConfig, LinearWords)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForSequenceClassification.register(config, model, exist_ok=True)
