"""What becomes of each field of TRL's GRPOConfig: taken, met by anything, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TAKEN = {
    "output_dir": "the run directory",
    "per_device_train_batch_size": "with gradient_accumulation_steps, completions of a step: `trainer.batch_size`",
    "gradient_accumulation_steps": "see per_device_train_batch_size; memory is bounded by `trainer.micro_batch_tokens`",
    "num_train_epochs": "with max_steps left out, passes over the prompts",
    "max_steps": "`trainer.steps`",
    "learning_rate": "`trainer.learning_rate`",
    "lr_scheduler_type": "`trainer.schedule`: constant, constant_with_warmup, linear, cosine",
    "warmup_steps": "`trainer.warmup_steps`; a number below 1 is a share of the steps",
    "optim": "adamw_torch or adamw_torch_fused, which are AdamW",
    "weight_decay": "`trainer.weight_decay`",
    "adam_beta1": "`trainer.adam_betas`",
    "adam_beta2": "`trainer.adam_betas`",
    "max_grad_norm": "`trainer.clip_norm`; 0 clips nothing",
    "bf16": "`policy.autocast`; master weights stay float32",
    "logging_strategy": "when on_log is called; `metrics.jsonl` has every step",
    "logging_steps": "see logging_strategy",
    "logging_first_step": "see logging_strategy",
    "disable_tqdm": "whether a progress bar is shown",
    "report_to": "`logging.report_to`: tensorboard, wandb, mlflow, trackio; others as integrations of transformers",
    "run_name": "`logging.name`",
    "project": "`logging.project`; left out, or huggingface: what WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME say, or tba",
    "trackio_space_id": "`logging.space`",
    "eval_strategy": "no: no evaluation in training; steps, epoch: before, then, and after",
    "eval_steps": "see eval_strategy",
    "eval_delay": "see eval_strategy",
    "metric_for_best_model": "what EarlyStoppingCallback watches",
    "greater_is_better": "see metric_for_best_model",
    "save_strategy": "when a checkpoint is written, at the next end of a round; always at the end",
    "save_steps": "see save_strategy",
    "save_total_limit": "`checkpoint.keep`",
    "push_to_hub": "the final model is pushed when training has ended",
    "hub_model_id": "the repository pushed to; the name of output_dir if left out",
    "hub_token": "the token to push with",
    "hub_private_repo": "whether the repository is made private",
    "hub_revision": "the branch pushed to",
    "seed": "`seed`",
    "resume_from_checkpoint": "as in train(resume_from_checkpoint=...)",
    "model_init_kwargs": "dtype float32 (master weights are), and trust_remote_code",
    "trust_remote_code": "`policy.trust_remote_code`",
    "num_generations": "`search.num_samples`, and `trainer.group_size` if a step has that many completions",
    "num_generations_eval": "`evaluation.samples`; num_generations if left out",
    "max_completion_length": "`search.max_new_tokens`",
    "generation_batch_size": "completions between two publications of the weights",
    "steps_per_generation": "micro-batches between two publications: `trainer.sync_every`",
    "temperature": "`policy.temperature`, of policy and reference alike",
    "top_p": "`search.top_p`",
    "beta": "`objective.beta`; above 0 for trajectory balance",
    "num_iterations": "`buffer.reuse`",
    "epsilon": "`objective.clip` of loss_type grpo and dr_grpo",
    "epsilon_high": "`objective.clip` of loss_type grpo and dr_grpo; `objective.ratio_max` of cispo",
    "importance_sampling_level": "sequence with loss_type grpo: `objective.name` gspo",
    "reward_weights": "weights of `task.rewards`",
    "loss_type": "`objective.name`: trajectory_balance; grpo, dr_grpo and cispo of TRL's",
    "sync_ref_model": "`reference.kind` ema",
    "ref_model_mixup_alpha": "1 - `reference.decay`",
    "ref_model_sync_steps": "`reference.every`",
}
"""Fields that take part, and as what."""

_MEMORY = "changes memory and speed alone; `trainer.micro_batch_tokens` bounds memory here"
ANY = {
    "gradient_checkpointing": _MEMORY,
    "gradient_checkpointing_kwargs": _MEMORY,
    "activation_checkpointing": _MEMORY,
    "activation_checkpointing_kwargs": _MEMORY,
    "per_device_eval_batch_size": "changes memory and speed alone; evaluation samples in batches of its own",
    "eval_accumulation_steps": _MEMORY,
    "use_cache": "sampling has a cache, training reads every prompt once",
    "disable_dropout": "dropout is off in any case",
    "cast_lm_head_to_fp32": "log-probs are float32 in any case",
    "eval_on_start": "a run that is evaluated is evaluated before training too",
    "log_completions": "those of evaluations are in completions.jsonl, those trained on behind tba buffer show",
    "num_completions_to_print": "see log_completions",
    "log_unique_prompts": "see log_completions",
    "log_multimodal": "prompts are text",
    "remove_unused_columns": "every column reaches the reward functions",
    "log_level": "said to the log of transformers",
    "log_level_replica": "said to the log of transformers",
    "logging_nan_inf_filter": "numbers that are not finite are left out of on_log",
    "include_num_input_tokens_seen": "tokens are always counted",
    "do_train": "a flag for scripts, which the trainer does not read",
    "do_eval": "a flag for scripts, which the trainer does not read",
    "do_predict": "a flag for scripts, which the trainer does not read",
    "prediction_loss_only": "an evaluation samples and scores; it has no such loss",
    "skip_memory_metrics": "memory is not measured",
    "hub_strategy": "the final model is pushed once, at the end",
    "hub_always_push": "the final model is pushed once, at the end",
    "local_rank": "one process trains",
    "ddp_timeout": "one process trains",
    "dataloader_num_workers": "there is no data loader: prompts are leased to searchers",
    "dataloader_pin_memory": "there is no data loader",
    "dataloader_persistent_workers": "there is no data loader",
    "dataloader_prefetch_factor": "there is no data loader",
    "vllm_mode": "only read with use_vllm",
    "vllm_gpu_memory_utilization": "only read with use_vllm",
}
"""Fields that change no result whatever they are, and why."""

_SAMPLING = "searchers sample by temperature and top_p alone; leave it out"
_VLLM = "searchers sample with transformers; leave it out, and add searchers instead (searchers=4)"
_ONE = "one process trains; scale search with searchers=N, and `ray.address` in settings"
_FIXED = "leave it out"
_LOSS = "the losses here are trajectory_balance, grpo, dr_grpo and cispo; leave it out"
_TOOLS = "completions are text of the model alone; leave it out"
REFUSED = {
    "trackio_bucket_id": "trackio_space_id, or the environment variables of trackio",
    "trackio_static_space_id": "trackio sync --sdk static, when the run has ended",
    "lr_scheduler_kwargs": "settings={'trainer.stable_steps': ..., 'trainer.decay_steps': ...}",
    "optim_args": "AdamW has learning_rate, weight_decay, adam_beta1 and adam_beta2 here",
    "optim_target_modules": "all weights are trained, or peft_config's",
    "adam_epsilon": "it is 1e-8; leave it out",
    "average_tokens_across_devices": _ONE,
    "label_smoothing_factor": _LOSS,
    "fp16": "bf16=True",
    "bf16_full_eval": "bf16=True, which evaluation uses too",
    "fp16_full_eval": "bf16=True, which evaluation uses too",
    "tf32": "torch.backends.cuda.matmul.allow_tf32 before the trainer is made",
    "torch_compile": _FIXED, "torch_compile_backend": _FIXED, "torch_compile_mode": _FIXED,
    "use_liger_kernel": _FIXED, "liger_kernel_config": _FIXED, "neftune_noise_alpha": _FIXED,
    "torch_empty_cache_steps": "settings={'trainer.micro_batch_tokens': ...} bounds memory",
    "auto_find_batch_size": "settings={'trainer.micro_batch_tokens': ...} bounds memory",
    "log_on_each_node": _ONE,
    "eval_do_concat_batches": _FIXED, "eval_use_gather_object": _FIXED,
    "include_for_metrics": _FIXED, "batch_eval_metrics": _FIXED,
    "save_only_model": "checkpoints are whole; final/ in the run directory is the model alone",
    "save_on_each_node": _ONE,
    "enable_jit_checkpoint": "Ctrl-C and SIGTERM always leave a checkpoint",
    "load_best_model_at_end": "the final model is the last one; a callback that stops training keeps the best",
    "ignore_data_skip": "a resumed run goes on with the prompts that come next",
    "restore_callback_states_from_checkpoint": "keep the state of a callback in a file of its own, in on_save",
    "full_determinism": "mode='lockstep'",
    "data_seed": "seed, which fixes the order of the prompts too",
    "use_cpu": "the environment variable CUDA_VISIBLE_DEVICES='' before the script starts",
    "accelerator_config": _ONE, "parallelism_config": _ONE,
    "dataloader_drop_last": "there is no data loader: the prompts follow each other for ever",
    "dataloader_multiprocessing_context": "there is no data loader; leave it out",
    "dataloader_in_order": "there is no data loader; leave it out",
    "label_names": _FIXED,
    "train_sampling_strategy": "prompts come in a new order each pass; leave it out",
    "length_column_name": _FIXED,
    "ddp_find_unused_parameters": _ONE, "ddp_bucket_cap_mb": _ONE, "ddp_broadcast_buffers": _ONE,
    "ddp_static_graph": _ONE, "ddp_backend": _ONE, "fsdp": _ONE, "fsdp_config": _ONE, "deepspeed": _ONE,
    "debug": _FIXED,
    "router_aux_loss_coef": _LOSS,
    "ds3_gather_for_generation": _ONE,
    "shuffle_dataset": "prompts come in a new order each pass, fixed by seed",
    "pad_to_multiple_of": "masks come from lengths, whatever the padding; leave it out",
    "top_k": _SAMPLING, "min_p": _SAMPLING, "generation_kwargs": _SAMPLING, "repetition_penalty": _SAMPLING,
    "cache_implementation": _SAMPLING,
    "chat_template_kwargs": "a chat template in processing_class that needs none",
    "use_vllm": _VLLM, "vllm_model_impl": _VLLM, "vllm_enable_sleep_mode": _VLLM,
    "vllm_structured_outputs_regex": _VLLM, "vllm_server_base_url": _VLLM, "vllm_server_host": _VLLM,
    "vllm_server_port": _VLLM, "vllm_server_timeout": _VLLM, "vllm_group_port": _VLLM,
    "vllm_max_model_length": _VLLM, "vllm_tensor_parallel_size": _VLLM,
    "vllm_importance_sampling_correction": _VLLM, "vllm_importance_sampling_mode": _VLLM,
    "vllm_importance_sampling_clip_max": _VLLM, "vllm_importance_sampling_clip_min": _VLLM,
    "vllm_importance_sampling_cap": _VLLM,
    "use_transformers_continuous_batching": _VLLM, "transformers_continuous_batching_config": _VLLM,
    "use_transformers_paged": _VLLM,
    "delta": _LOSS, "sapo_temperature_neg": _LOSS, "sapo_temperature_pos": _LOSS,
    "vespo_k_pos": _LOSS, "vespo_lambda_pos": _LOSS, "vespo_k_neg": _LOSS, "vespo_lambda_neg": _LOSS,
    "multi_objective_aggregation": "the reward is the weighted sum of the functions; leave it out",
    "scale_rewards": "the loss decides: grpo divides by the group's spread, the others by none; leave it out",
    "mask_truncated_completions": "judge what was cut in the reward, or give None for it: it is then unscored",
    "top_entropy_quantile": _LOSS, "entropy_coef": _LOSS, "use_adaptive_entropy": _LOSS, "entropy_coef_min": _LOSS,
    "entropy_coef_max": _LOSS, "entropy_coef_delta": _LOSS, "entropy_target": _LOSS,
    "max_tool_calling_iterations": _TOOLS,
    "off_policy_mask_threshold": "settings={'buffer.max_age': ...} bounds age; trajectory balance needs no mask",
    "use_bias_correction_kl": _LOSS,
    "log_completions_hub_repo": "completions.jsonl in the run directory has them",
}
"""Fields that have no meaning here, and what to use instead."""

OTHER_DEFAULTS = {
    "beta": "0.02: trajectory balance has no meaning without; TRL's 0 leaves KL out",
    "loss_type": "trajectory_balance",
    "bf16": "False: TRL's None turns it on",
}
"""Fields whose default is another one than TRL's, and why."""

SAME = {"scale_rewards": (False, "none", True), "model_init_kwargs": ({},), "hub_private_repo": (False,)}
"""Further values of a field that mean what its default does."""


def refusals(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Every field that is set to something which has no meaning here, with what to use instead."""
    return [
        f"{name} = {value!r} has no meaning for TBA; instead: {REFUSED[name]}."
        for name, value in given.items()
        if name in REFUSED and value != defaults[name] and value not in SAME.get(name, ())
    ]


def arguments_problems(given: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with arguments of the trainer that TBATrainer does not know."""
    instead = {
        "optimizers": "learning_rate, lr_scheduler_type, weight_decay, adam_beta1 and adam_beta2 of TBAConfig",
        "quantization_config": "peft_config on a model in float32",
        "tools": _TOOLS, "environment_factory": _TOOLS, "rollout_func": "an engine of your own, see README.md",
    }
    for name, value in given.items():
        if name not in instead:
            yield f"{name} = {value!r:.60} is no argument of TBATrainer; leave it out."
        elif value not in (None, (None, None), []):
            yield f"{name} = {value!r:.60} has no meaning for TBA; instead: {instead[name]}."


def table() -> str:
    """`docs/trl_fields.md`: every field and what becomes of it."""
    lines = ["# Fields of GRPOConfig in TBAConfig", "", "Generated from `tba.trainer_api.fields`.", ""]
    for title, of in (("Taken", TAKEN), ("Any value will do", ANY), ("Refused, with what to use instead", REFUSED)):
        lines += [f"## {title}", "", "| field | |", "|---|---|"]
        lines += [f"| {name} | {said} |" for name, said in of.items()] + [""]
    lines += ["## Other defaults than TRL's", "", "| field | default |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {said} |" for name, said in OTHER_DEFAULTS.items())]) + "\n"
