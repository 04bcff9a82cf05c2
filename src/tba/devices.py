"""Where models compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba.sections import SettingsError

if TYPE_CHECKING:
    import torch

KINDS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that are looked for by name."""


def device_of(name: str, place: str) -> torch.device:
    """The device `name`, the value of the setting `place`; auto is cuda if there is one.

    Raises:
        SettingsError: it is no device, or not here.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(name)
    except RuntimeError:
        found = None
    if found is None or found.type not in KINDS:
        raise SettingsError([f"{place} = {name!r} is no device; write cpu, cuda, cuda:1 or auto."])
    here = 1 if found.type == "cpu" else getattr(torch, found.type).device_count()
    if (found.index or 0) >= here:
        raise SettingsError([
            f"{place} = {name!r} is not here: this process sees {here} devices of the kind {found.type}; write auto or "
            f"cpu. In async mode resources.*.gpus say which process sees how many."
        ])
    return found
