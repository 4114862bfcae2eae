"""One small module per model family: its configuration to ours, its weight names to our parameters.

Adding a family is adding its module here; nothing else in the package knows families by name.
"""

from models.config import UnsupportedModelError
from models.families import llama
from models.families.family import Family

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY,)}


def family_of(architecture: str, origin: str) -> Family:
    """The family that implements `architecture` (config.json's model_type, GGUF's general.architecture).

    Raises:
        UnsupportedModelError: none does.
    """
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{origin} is of architecture {architecture!r}, implemented are {', '.join(sorted(FAMILIES))}: use "
            "one of those"
        )
    return FAMILIES[architecture]
