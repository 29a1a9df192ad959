"""Presets: one frozen config a file; its docstring is the claim and the command."""

import difflib
import importlib
import pkgutil

from experiments.config import TrainConfig
from experiments.errors import UserError

NAMES = tuple(sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__)))


def load(name: str) -> TrainConfig:
    """The preset called `name`.

    Raises:
      UserError: there is none of that name; the message names the nearest.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1, 0.3)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"no config {name!r}; there are {', '.join(NAMES)}{hint}")
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").CONFIG
