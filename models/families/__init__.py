"""One small module per model family: its configuration to ours, its weight names to our parameters.

Adding a family is adding a module with a FAMILY here; nothing else knows families by name.
"""

import importlib
import pkgutil

from models.config import UnsupportedModelError
from models.families.family import Family, GgufFormat

__all__ = ["FAMILIES", "Family", "GgufFormat", "family_of", "gguf_format_of"]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES if hasattr(module, "FAMILY")}
"""By model_type in config.json."""

GGUF_FORMATS: dict[str, GgufFormat] = {
    family.gguf.architecture: family.gguf for family in FAMILIES.values() if family.gguf is not None
}
"""By general.architecture in a GGUF file."""


def family_of(architecture: str, origin: str) -> Family:
    """The family that implements `architecture`, config.json's model_type. Raises UnsupportedModelError: none does."""
    if architecture not in FAMILIES:
        raise _unknown(architecture, origin, sorted(FAMILIES))
    return FAMILIES[architecture]


def gguf_format_of(architecture: str, origin: str) -> GgufFormat:
    """The format of `architecture`, GGUF's general.architecture. Raises UnsupportedModelError: none has it."""
    if architecture not in GGUF_FORMATS:
        raise _unknown(architecture, origin, sorted(GGUF_FORMATS))
    return GGUF_FORMATS[architecture]


def _unknown(architecture: str, origin: str, known: list[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{origin} is of architecture {architecture!r}, implemented are {', '.join(known)}: use one of those"
    )
