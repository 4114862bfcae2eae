"""Byte sizes as people write them: `512MiB`, `1.5 GiB`, `2GB`, or a plain number of bytes."""

import re
from fractions import Fraction

from kv_common.errors import JaxkvError

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


class ByteSizeError(JaxkvError):
    """Text that is not a number of bytes."""


def parse_byte_size(text: str) -> int:
    """Whole bytes, at least 1, that `text` means. Raises ByteSizeError."""
    match = _PATTERN.fullmatch(text)
    unit = match and _UNIT_BYTES.get(match[2].lower())
    if not match or unit is None:
        raise ByteSizeError(
            f"{text!r} is not a byte size: write a number and B, KiB, MiB, GiB, KB, MB or GB, as in 512MiB"
        )
    size = int(Fraction(match[1]) * unit)  # exact: a float would lose bytes of a large size
    if size < 1:
        raise ByteSizeError(f"{text!r} is less than one byte: give at least 1")
    return size


def format_byte_size(size_bytes: int) -> str:
    """`size_bytes` in the largest binary unit that it fills, with one decimal."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes >= 1024**power:
            return f"{size_bytes / 1024**power:.1f} {unit}"
    return f"{size_bytes} bytes"
