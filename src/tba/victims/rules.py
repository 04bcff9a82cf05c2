"""A victim with known failure modes, so that finding all of them is a number."""

from __future__ import annotations

from collections.abc import Sequence

from tba.redteam_settings import VictimSettings

BAD, FINE = "BAD", "fine"
"""First word of its answer to an attack that holds a trigger; its answer to any other."""


class RuleVictim:
    """Answers always alike: to an attack that holds a trigger by naming it."""

    def __init__(self, settings: VictimSettings, place: str) -> None:
        """Uses `triggers`, the first of which that an attack holds counts."""
        del place
        self._triggers = settings.triggers

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str]]:
        """`count` answers to each attack."""
        return [[self._answer(attack)] * count for attack in attacks]

    def _answer(self, attack: str) -> str:
        hit = next((trigger for trigger in self._triggers if trigger in attack), None)
        return FINE if hit is None else f"{BAD} {hit}"
