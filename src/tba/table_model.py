"""A causal LM that is a table: one row of logits for every sequence of ids read so far."""

# Shape legend: N rows, T positions, V vocabulary.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

MAX_ROWS = 5_000_000
"""Rows that a table may have."""


class TableConfig(PreTrainedConfig):
    """Size of the table."""

    model_type = "tba_table"

    def __init__(self, vocab_size: int = 6, positions: int = 4, **options: Any) -> None:
        """`positions` ids are told apart, counted from the start of the prompt; the first (BOS) is not."""
        self.vocab_size = vocab_size
        self.positions = positions
        super().__init__(**options)


class TableModel(PreTrainedModel):
    """Logits looked up by the exact ids before a position: no two contexts share a parameter."""

    config_class = TableConfig
    base_model_prefix = "table"

    def __init__(self, config: TableConfig) -> None:
        """Rows are drawn from a normal distribution of standard deviation 0.5."""
        super().__init__(config)
        rows = (config.vocab_size + 1) ** (config.positions - 1)
        if rows > MAX_ROWS:
            raise ValueError(
                f"architecture.positions = {config.positions} with {config.vocab_size} ids needs {rows} rows, "
                f"more than {MAX_ROWS}; lower it."
            )
        self.logits = torch.nn.Parameter(torch.randn(rows, config.vocab_size) * 0.5)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: the rows are drawn in `__init__`."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any) -> CausalLMOutput:
        """Logits [N, T, V] of right-padded `input_ids` [N, T]; places beyond the table read its last row."""
        del attention_mask, unused
        base = self.config.vocab_size + 1
        context_NT = torch.zeros_like(input_ids)
        for place in range(1, input_ids.shape[1]):
            context_NT[:, place] = context_NT[:, place - 1] * base + input_ids[:, place] + 1
        return CausalLMOutput(logits=self.logits[context_NT.clamp(max=len(self.logits) - 1)])


def register() -> None:
    """Makes `AutoModelForCausalLM` know saved tables; safe to call twice."""
    AutoConfig.register("tba_table", TableConfig, exist_ok=True)
    AutoModelForCausalLM.register(TableConfig, TableModel, exist_ok=True)
