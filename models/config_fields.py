"""The fields of a configuration file, and the account of which have been read.

A configuration that is half understood gives fluent, wrong text. So every field must be consumed, known to be harmless,
or switched off (None, False, empty); anything else is refused by name: families take the fields they implement and call
`refuse_unread` at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import ModelConfigError, UnsupportedModelError

_REQUIRED = object()


class ConfigFields:
    """The fields of one configuration object, and which of them somebody has read.

    `origin` names it in messages, e.g. `config.json` or `config.json's rope_parameters`.
    """

    def __init__(self, fields: Mapping[str, Any], origin: str) -> None:
        self._fields = dict(fields)
        self._unread = set(fields)
        self.origin = origin

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def supply(self, name: str, value: Any) -> None:
        """Fill in a field that the file leaves to be derived."""
        self._fields[name] = value
        self._unread.add(name)

    def peek(self, name: str) -> Any:
        """The raw value of `name`, or None; does not count as read."""
        return self._fields.get(name)

    def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of `name` as `kind`; `default` where it is absent or null.

        Raises:
            ModelConfigError: it is required and absent, or of another type.
        """
        self._unread.discard(name)
        value = self._fields.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelConfigError(f"{self.origin} has no {name}: the file is incomplete, get it again")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError as error:
                raise ModelConfigError(f"{self.origin} has {name} beyond any float: fix the file") from error
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelConfigError(
                f"{self.origin} has {name}={shortened(value)}, expected {kind.__name__}: fix the file"
            )
        return value

    def skip(self, *names: str) -> None:
        """Count fields as read that change nothing for this family, whatever they say."""
        self._unread.difference_update(names)

    def require(self, name: str, *allowed: Any) -> None:
        """Accept `name` only where it is absent, null or one of `allowed`, the values that are implemented."""
        self._unread.discard(name)
        value = self._fields.get(name)
        if value is not None and value not in allowed:
            wanted = " or ".join(shortened(each) for each in allowed) or "none"
            raise UnsupportedModelError(
                f"{self.origin} has {name}={shortened(value)}, implemented is {wanted}: use a model without it"
            )

    def refuse_unread(self, harmless: frozenset[str]) -> None:
        """Refuse the first field that nobody read, that is switched on and that is not known to be `harmless`."""
        for name in sorted(self._unread - harmless):
            value = self._fields[name]
            if value is None or value is False or value in ([], {}, ""):
                continue
            raise UnsupportedModelError(
                f"{self.origin} sets {name}={shortened(value)}, which is not implemented: use a model without it"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelConfigError: unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ModelConfigError(f"{path} is not JSON ({error}): get the file again") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} holds a {type(value).__name__}, expected an object: get the file again")
    return value


def shortened(value: Any) -> str:
    """A field's value as a message names it: on one line, and not all of a long one."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
