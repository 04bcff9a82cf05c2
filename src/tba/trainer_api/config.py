"""TBAConfig: the fields of TRL's GRPOConfig under their names, and what TBA adds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from tba.settings import SettingsError
from tba.trainer_api.fields import refusals


@dataclass
class TBAConfig(TrainingArguments):
    """What a `TBATrainer` is set by: every field of GRPOConfig (TRL), with its default but where docs/trl.md says so.

    Each field takes part, or is refused by name, with what to use instead, when it is set to anything but its default;
    docs/trl_fields.md lists which. The fields at the end are TBA's own.

    Raises:
        SettingsError: with every field that is refused.
    """

    # as in GRPOConfig, with other defaults than TrainingArguments
    learning_rate: float = 1e-6
    logging_steps: float = 10

    # model
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False

    # data
    num_generations: int = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool | None = True
    pad_to_multiple_of: int | str | None = "auto"

    # sampling
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | str | None = None
    chat_template_kwargs: dict[str, Any] | str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    use_transformers_paged: bool = False

    # loss
    beta: float = 0.02
    num_iterations: int = 1
    epsilon: float = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str | bool = "group"
    loss_type: str = "trajectory_balance"
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_cap: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True

    # logging
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    log_completions_hub_repo: str | None = None

    # TBA's own
    mode: str = "async"
    """async: searchers and trainer side by side; lockstep: one deterministic process."""
    searchers: int = 1
    """Searchers in async mode."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of TBA, by dotted path: {"buffer.mix": {"recent": 0.8, "uniform": 0.2}}."""

    def __post_init__(self) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(self) if f.default is not dataclasses.MISSING}
        given = {name: getattr(self, name) for name in defaults}
        problems = refusals(given, defaults)
        if problems:
            raise SettingsError(problems)
        # The old names of these two warn; whatever they are changes nothing here.
        self.activation_checkpointing = bool(self.activation_checkpointing or self.gradient_checkpointing)
        kwargs = self.activation_checkpointing_kwargs or self.gradient_checkpointing_kwargs
        self.activation_checkpointing_kwargs = kwargs
        self.gradient_checkpointing, self.gradient_checkpointing_kwargs = False, None
        super().__post_init__()
