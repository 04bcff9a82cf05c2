"""A causal language model as victim, on a device of its own; an answer depends only on the attack."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tba.devices import device_of
from tba.engines.protocol import Sampling
from tba.engines.transformers import TransformersEngine
from tba.leases import completion_seed
from tba.policy import load_policy
from tba.records import Prompt
from tba.redteam_settings import VictimSettings
from tba.rewards.inputs import whole_characters, without
from tba.settings import ArchitectureSettings

SEED = 0
"""Of its answers, with the attack: the same attack gets the same answers in every process and after resume."""


class ModelVictim:
    """Answers through its chat template, or a template of the settings."""

    def __init__(self, settings: VictimSettings, place: str) -> None:
        """Loads the model; `place` is where the settings are, for messages.

        Raises:
            SettingsError: there is no such model or device.
        """
        self._settings = settings
        policy = load_policy(
            str(settings.model), architecture=ArchitectureSettings(), characters="", seed=0, temperature=1.0
        )
        device = device_of(settings.device, f"{place}.device")
        policy.model.requires_grad_(False).to(device, getattr(torch, settings.dtype))
        self._policy, self._engine = policy, TransformersEngine(policy)
        added = policy.tokenizer.added_tokens_decoder.values()
        self._special = {*policy.tokenizer.all_special_tokens, *(t.content for t in added if t.special)} - {""}

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str]]:
        """`count` answers to each attack."""
        chosen = self._settings
        sampling = Sampling(
            max_new_tokens=chosen.max_new_tokens, temperature=chosen.temperature, top_p=chosen.top_p
        )
        found: list[list[str]] = []
        for at in range(0, len(attacks), chosen.batch_attacks):
            part = attacks[at : at + chosen.batch_attacks]
            prompts = [Prompt(id="attack", tokens=self._ids(attack), text=attack) for attack in part]
            seeds = [completion_seed(SEED, attack, "victim") for attack in part]
            made = self._engine.generate(prompts, num_samples=count, sampling=sampling, seeds=seeds)
            found += [[completion.text for completion in answers] for answers in made]
        return found

    def _ids(self, attack: str) -> tuple[int, ...]:
        """What the model reads. What looks like one of its special tokens is taken out of the attack, so that none
        can end its own turn."""
        text = without(whole_characters(attack), self._special)
        template = self._settings.template
        if template is not None:
            return self._policy.encode(template.replace("{attack}", text))
        return self._policy.encode([{"role": "user", "content": text}])
