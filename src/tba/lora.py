"""A low-rank adapter on a frozen model that all copies of a process share."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tba.sections import LoraSettings
from tba.settings import SettingsError

MARK = ".lora_"
"""What the name of every tensor of an adapter holds, and of no other."""


def add_adapter(model: torch.nn.Module, settings: LoraSettings, seed: int) -> Any:
    """`model` with an adapter that changes nothing yet; only the adapter is trainable afterwards.

    The update of a weight W is (alpha / rank) B A (arXiv 2106.09685, equation 3), with A drawn from `seed`
    and B zero. There is no dropout: the residual needs the log-prob of the policy itself.

    Raises:
        SettingsError: the model has none of `policy.lora.targets`.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank, lora_alpha=2 * settings.rank if settings.alpha is None else settings.alpha,  # type: ignore
        target_modules="all-linear" if settings.targets is None else list(settings.targets),
        lora_dropout=0.0, task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft asks a model of transformers for a property under its old name
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)  # type: ignore[arg-type]
        except ValueError as error:
            raise SettingsError([
                f"policy.lora.targets = {settings.targets}: {error} Give ends of names of linear layers, or null."
            ]) from error


def settings_of(config: Any, model_type: str) -> tuple[dict[str, Any], list[str]]:
    """`policy.lora` of a peft configuration, and what of it has no meaning here; `model_type` gives peft's targets.

    Ranks, scale and targets are taken. Whatever else is set away from its default is refused by name.
    """
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    if not isinstance(config, LoraConfig):
        return {}, [f"peft_config is a {type(config).__name__}; the adapter here is low-rank: give a peft.LoraConfig."]
    plain, problems = LoraConfig(), []
    taken = {"r", "lora_alpha", "target_modules", "task_type", "base_model_name_or_path", "inference_mode"}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "lora_dropout" and value:
            problems.append(f"peft_config.lora_dropout = {value}: the residual needs the log-prob of the policy "
                            f"itself, without dropout; leave it out.")
        elif field.name not in taken and value != getattr(plain, field.name):
            problems.append(f"peft_config.{field.name} = {value!r:.60} has no meaning for TBA; leave it out.")
    targets = config.target_modules
    if targets is None:
        targets = USUAL.get(model_type)
    if targets is None or (isinstance(targets, str) and targets != "all-linear"):
        problems.append(f"peft_config.target_modules = {config.target_modules!r}: give a list of ends of names of "
                        f"linear layers, or 'all-linear'.")
        targets = "all-linear"
    found = {"rank": config.r, "alpha": float(config.lora_alpha)}
    return found | ({} if targets == "all-linear" else {"targets": sorted(targets)}), problems


def has_adapter(model: torch.nn.Module) -> bool:
    """Whether `add_adapter` made the model."""
    return getattr(model, "peft_config", None) is not None


def is_adapter_name(name: str) -> bool:
    """Whether a tensor of a model with adapter belongs to the adapter."""
    return MARK in name


def copy_sharing_base(model: torch.nn.Module) -> torch.nn.Module:
    """A copy with an adapter of its own; the tensors of the base are the same objects in both."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shared: dict[int, Tensor] = {id(tensor): tensor for name, tensor in tensors.items() if not is_adapter_name(name)}
    return copy.deepcopy(model, shared)  # what the memo holds is taken for copied already


def set_trainable(model: torch.nn.Module, trainable: bool) -> None:
    """Lets the adapter take gradients, or not; the base never does."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable and is_adapter_name(name))


def is_off(model: Any) -> bool:
    """Whether a model with adapter computes without it, in all of its layers or in some."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    return any(layer.disable_adapters or layer.merged for layer in layers)


def turn_off(model: Any) -> None:
    """Makes the model its base from now on."""
    model.base_model.disable_adapter_layers()


def save(model: Any, path: Path) -> None:
    """Writes the model with its adapter merged in as a plain model folder, and the adapter alone as `adapter/`.

    Merging takes a copy of the base for as long as it lasts.
    """
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(path, safe_serialization=True)
    model.save_pretrained(path / "adapter", safe_serialization=True)
