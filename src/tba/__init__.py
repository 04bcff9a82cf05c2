"""TBA: post-training of language models by trajectory balance, with search and training apart."""

from importlib import import_module
from importlib.util import find_spec

__version__ = "0.1.0"

_NAMES = {"TBAConfig": "trainer_api", "TBATrainer": "trainer_api"}


def __getattr__(name: str) -> object:
    """Load a room, or a name that people import from here, when it is first asked for."""
    if name in _NAMES:
        return getattr(import_module(f"tba.{_NAMES[name]}"), name)
    if not name.startswith("_") and find_spec(f"tba.{name}"):
        return import_module(f"tba.{name}")
    raise AttributeError(f"module 'tba' has no attribute {name!r}; it has {', '.join(__dir__())}.")


def __dir__() -> list[str]:
    from pkgutil import iter_modules

    rooms = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    return sorted({"__version__", *_NAMES, *rooms})
