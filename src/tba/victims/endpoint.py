"""A victim behind an OpenAI-compatible endpoint, with the limits and retries of reward endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tba.leases import completion_seed
from tba.preference_settings import CallSettings, RewardSettings
from tba.redteam_settings import VictimSettings
from tba.rewards.endpoint import EndpointScorer
from tba.rewards.functions import Failure
from tba.rewards.inputs import whole_characters


class EndpointVictim:
    """Asks for every answer by a call of its own; an attack without one of its answers is a recorded failure."""

    def __init__(self, settings: VictimSettings, place: str) -> None:
        """`place` is where the settings are, for messages.

        Raises:
            SettingsError: the environment variable of its key is not set.
        """
        del place
        self._settings = settings
        how = {name: getattr(settings, name) for name in CallSettings.model_fields}
        self.endpoint = EndpointScorer(RewardSettings(protocol="chat", **how))
        """Counts calls and failures."""

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str] | Failure]:
        """`count` answers to each attack, or why there are none."""
        bodies = [self._body(attack, number) for attack in attacks for number in range(count)]
        flat = iter(self.endpoint.ask_all(bodies, _text_in))
        grouped = [[next(flat) for _ in range(count)] for _ in attacks]
        return [_whole(answers) for answers in grouped]

    def close(self) -> None:
        """Ends its connections."""
        self.endpoint.close()

    def _body(self, attack: str, number: int) -> dict[str, Any]:
        chosen = self._settings
        return {
            "model": chosen.served_model, "messages": [{"role": "user", "content": whole_characters(attack)}],
            "temperature": chosen.temperature, "top_p": chosen.top_p, "max_tokens": chosen.max_new_tokens,
            "seed": completion_seed(0, attack, f"victim {number}") % 2**31,
        }


def _whole(answers: Sequence[str | Failure]) -> list[str] | Failure:
    lost = next((answer for answer in answers if isinstance(answer, Failure)), None)
    return lost if lost is not None else [answer for answer in answers if isinstance(answer, str)]


def _text_in(reply: Any) -> str:
    text = reply["choices"][0]["message"]["content"]
    if not isinstance(text, str):
        raise TypeError(f"the answer is {type(text).__name__}, not text")
    return text
